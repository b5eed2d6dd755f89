"""The ``trainer`` command. Imports almost nothing: each subcommand brings its own modules when it is called."""

import os
import sys
import time

from trainer.cli import streams
from trainer.errors import ConfigError, TrainerError

USAGE = """\
trainer: SFT and RL training for language models, with exact resumes

  trainer sft @ run.toml                     supervised fine-tuning
  trainer rl @ run.toml                      reinforcement learning
  trainer sft @ run.toml --resume            go on from the newest checkpoint, as if the run had never stopped
  torchrun --nproc-per-node 8 -m trainer sft @ run.toml
                                             the same on several devices
  trainer config @ run.toml                  print the resolved config and where each value comes from
  trainer config --schema                    print the JSON schema of a config
  trainer check resume @ run.toml            kill and resume your own config, compare with a run that never stopped
  trainer ckpt ls|show|diff|verify ...       look at checkpoints
  trainer ckpt prune|export|repair|import ...
                                             thin out, hand on and mend them, bring in those of other trainers
  trainer plot RUN...                        curves of one or more runs as PNG
  trainer rollouts show RUN                  what the model wrote in an RL step, and its rewards

A config is made of files and flags: "trainer sft @ a.toml @ b.toml --optim.lr 1e-4". Later files win over earlier
ones, flags over files. "trainer COMMAND --help" tells more; "trainer sft --help optim" explains the keys of [optim].

  -h, --help     this text
  --version      the version
"""

# torchrun ends all ranks as soon as one has failed. The others wait so that rank 0 gets its message out first.
RANK_GRACE_SECONDS = 3.0


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0, a TrainerError's ``exit_code``, 143 after SIGTERM, 130 after Ctrl-C,
    141 where the reader of the output has gone."""
    argv = sys.argv[1:] if argv is None else argv
    streams.prepare()
    try:
        with streams.watched_output():
            return _guarded(argv)
    except streams.OutputLost as lost:
        return streams.give_up_output(lost)


def _guarded(argv: list[str]) -> int:
    """Run one subcommand; what went wrong is told in a line."""
    try:
        return _dispatch(argv)
    except ConfigError as error:
        if _is_other_rank():  # every rank has read the same config
            time.sleep(RANK_GRACE_SECONDS)
        else:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except TrainerError as error:
        if _is_other_rank():  # most errors are shared: once rank 0 has told it, torchrun ends this process
            time.sleep(RANK_GRACE_SECONDS)
        _print_error(error)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        _print_error(TrainerError(f"{error.filename}: {error.strerror or error}; look at the path and its permissions"))
        return TrainerError.exit_code
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        return stop.code or 0  # argparse's, which has printed already
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    match command:
        case "-h" | "--help":
            print(USAGE, end="")
            return 0
        case "--version":
            from trainer import __version__

            print(f"exact-trainer {__version__}")
            return 0
    _check_directory()
    match command:
        case "sft" | "rl":
            return _train(command, rest)
        case "config":
            from trainer.cli.config import main as config

            return config(rest)
        case "ckpt":
            from trainer.cli.ckpt import main as ckpt

            return ckpt(rest) or 0
        case "check":
            from trainer.cli.check import main as check

            return check(rest)
        case "plot":
            from trainer.cli.plot import main as plot

            return plot(rest) or 0
        case "rollouts":
            from trainer.cli.rollouts import main as rollouts

            return rollouts(rest)
    if not command:
        print(USAGE, end="", file=sys.stderr)
        return 2
    raise ConfigError(
        f"trainer has no command {command!r}; it has sft, rl, config, check, ckpt, plot and rollouts (trainer --help)"
    )


def _check_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the current directory has been removed, so no path can be found; go to one that exists (cd)"
        ) from error


def _train(kind: str, argv: list[str]) -> int:
    from trainer.cli.config import main as config
    from trainer.cli.help import asks_for_help

    if asks_for_help(argv) or "--dry-run" in argv:
        return config([kind, *(token for token in argv if token != "--dry-run")], command=kind)

    from trainer.config.load import load_config
    from trainer.config.run import RLConfig, SFTConfig

    # Config and environment are read before torch is imported: a typo costs no waiting.
    if kind == "rl":
        loaded = load_config(RLConfig, argv)
        _check_launch()

        from trainer.rl.train import run as train_rl

        return train_rl(loaded, owns_process=True)
    loaded = load_config(SFTConfig, argv)
    _check_launch()

    from trainer.sft.train import run as train_sft

    return train_sft(loaded, owns_process=True)


def _check_launch() -> None:
    from trainer.core.distributed import check_launch

    check_launch()


def _is_other_rank() -> bool:
    return os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1"


def _print_error(error: TrainerError) -> None:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank is not None and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"error{where}: {error}", file=sys.stderr, flush=True)

"""`trainer ckpt import`: brings in the checkpoint of another trainer."""

from dataclasses import asdict
from pathlib import Path

from trainer.cli.ckpt_common import print_json
from trainer.errors import ConfigError

USAGE = """\
trainer ckpt import SRC OUT (@ FILE | --KEY VALUE)... [OPTIONS]

Writes OUT/checkpoints/step_NNNNNNNN from another trainer's checkpoint SRC, for a run of the given config that goes on
from there: "trainer sft @ FILE --resume.dir OUT", or --output-dir OUT --resume. The config names the model (its
architecture is compared), the data that come next, and the schedule.

  SRC                  checkpoint-N/ of the Hugging Face Trainer, a directory of Accelerate's save_state, or a
                       torch.distributed.checkpoint directory of prime-rl or torchtitan: weights, AdamW's state, learning
                       rates and step come out exactly, or the directory is refused by name. Nothing in it is executed
  --step N             updates done, where the files disagree or do not say
  --schedule config    the config's schedule applies from here on, whatever learning rates were saved
  --fresh-optimizer    take only the weights, as step 0 with new optimizer state (a model directory has no more; to
                       simply start from one, use --model.name instead)
  --json               print JSON
"""


def main(argv: list[str]) -> int:
    """Runs `trainer ckpt import` with the arguments after "import"; returns the exit code."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    positional, options, rest = _parse(argv)

    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig

    config = load_config(SFTConfig, rest).config

    from trainer.train.importing import import_checkpoint

    source, out = positional
    step = options.get("--step")
    done = import_checkpoint(
        Path(source),
        Path(out),
        config,
        step=None if step is None else int(step),
        fresh_optimizer="--fresh-optimizer" in options,
        schedule_of_config="--schedule" in options,
    )
    if "--json" in options:
        print_json({**asdict(done), "path": str(done.path)})
        return 0
    print(f"{done.path}: step {done.step} of {source} ({done.kind})")
    for note in done.notes:
        print(f"  {note}")
    print(f"go on with: trainer sft {' '.join(rest)} --resume.dir {out}")
    return 0


def _parse(argv: list[str]) -> tuple[tuple[str, str], dict[str, str], list[str]]:
    """Returns (SRC, OUT), the command's own options, and the tokens of the config.

    Raises:
        ConfigError: SRC or OUT is missing, or an option's value is wrong.
    """
    options: dict[str, str] = {}
    rest: list[str] = []
    tokens = list(argv)
    if len(tokens) < 2 or any(token.startswith(("-", "@")) for token in tokens[:2]):
        raise ConfigError("trainer ckpt import needs SRC and OUT first: trainer ckpt import SRC OUT @ run.toml")
    source, out = tokens.pop(0), tokens.pop(0)
    while tokens:
        token = tokens.pop(0)
        flag, given, text = token.partition("=")
        if flag in ("--fresh-optimizer", "--json"):
            options[flag] = ""
        elif flag in ("--step", "--schedule"):
            value = text if given else tokens.pop(0) if tokens else ""
            if flag == "--step" and not value.isdecimal():
                raise ConfigError(f"--step {value}: expected a number of updates")
            if flag == "--schedule" and value != "config":
                raise ConfigError(f"--schedule {value}: expected config")
            options[flag] = value
        else:
            rest.append(token)
    return (source, out), options, rest

"""``trainer check resume``: does a run of this config that is killed and resumed equal the run that never stopped?"""

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, TrainerError

EXACT, DIFFERENT, FAILED = 0, 1, 2

USAGE = """\
trainer check resume (@ FILE | --KEY VALUE)... [OPTIONS]

Trains your own config three times, in real processes: once without a stop, once until a real signal ends it in the
middle of a step, and once resumed from the checkpoint before. Then everything is compared: each step's loss, lr,
gradient norm, counters and sample ids, and every tensor and entry of the final checkpoint. Only the first steps are
run, under the schedule of the whole run; the output directory of the config is not touched.

  --steps N            steps to compare (default: 10)
  --at N               send the signal in the step after this one (default: half of --steps)
  --signal KILL|TERM   KILL: everything is gone at once; TERM: the run may save and leave (default: KILL)
  --nproc N            processes of the uninterrupted and the interrupted run, through torchrun (default: 1)
  --resume-nproc N     processes of the resumed run (default: as --nproc); at another number sample ids, counters and
                       learning rates must be equal, and losses and tensors lie within --bound
  --bound X            largest relative distance of what another number of processes adds up in another order
                       (default: 1e-4 for model.dtype float32, 2e-2 for bfloat16)
  --repeat             also run the uninterrupted run twice, which tells kernels that are not deterministic from a
                       fault of the resume; done by itself where something differs (--no-repeat: never)
  --keep DIR           run in DIR and keep all of it (default: a temporary directory, kept only where something is wrong)
  --json               print the result as JSON

Prints `exact` and exits with 0; or the first thing that differs and the likely cause, and exits with 1; 2 means that a
run failed. Everything else is the config, as for "trainer sft" or "trainer rl".
"""


@dataclass(frozen=True)
class Options:
    steps: int | None = None
    at: int | None = None
    signal: int = signal.SIGKILL
    nproc: int = 1
    resume_nproc: int | None = None
    bound: float | None = None
    repeat: bool | None = None
    keep: str | None = None
    json: bool = False


def main(argv: list[str]) -> int:
    """Runs ``trainer check`` with the arguments after "check"; returns the exit code."""
    if argv and argv[0] in ("-h", "--help") or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return EXACT
    if not argv or argv[0] != "resume":
        found = f"no check {argv[0]!r}" if argv else "to be told what to check"
        raise ConfigError(f"trainer check has {found}; it knows: trainer check resume @ run.toml (--help)")
    options, rest = parse(argv[1:])
    try:
        return _check_resume(options, rest)
    except ConfigError:
        raise
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def parse(argv: list[str]) -> tuple[Options, list[str]]:
    """Returns the check's own options and the tokens that are left: the config.

    Raises:
        ConfigError: an option's value is missing or wrong.
    """
    values: dict[str, object] = {}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, given, text = token.partition("=")
        if flag in ("--repeat", "--no-repeat", "--json"):
            values["json" if flag == "--json" else "repeat"] = flag != "--no-repeat"
        elif flag in _CONVERT:
            if not given:
                if not tokens or tokens[0].startswith("--"):
                    raise ConfigError(f"{flag} needs a value (trainer check --help)")
                text = tokens.pop(0)
            values[flag[2:].replace("-", "_")] = _CONVERT[flag](flag, text)
        else:
            rest.append(token)
    return Options(**values), rest  # type: ignore[arg-type]


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text}: expected a number from 1")
    return int(text)


def _number(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise ConfigError(f"{flag} {text}: expected a number between 0 and 1")
    return number


def _signal(flag: str, text: str) -> int:
    name = f"SIG{text.upper().removeprefix('SIG')}"
    if name not in ("SIGKILL", "SIGTERM"):
        raise ConfigError(f"{flag} {text}: expected KILL or TERM")
    return signal.Signals[name]


_CONVERT = {
    "--steps": _count,
    "--at": _count,
    "--signal": _signal,
    "--nproc": _count,
    "--resume-nproc": _count,
    "--bound": _number,
    "--keep": lambda flag, text: text,
}


def _check_resume(options: Options, argv: list[str]) -> int:
    from trainer.config.kinds import KINDS, kind_of
    from trainer.config.load import load_config

    config = load_config(KINDS[kind_of(argv)], argv).config

    from trainer.cli.check_report import Report
    from trainer.cli.check_resume import ResumeCheck, make_plan

    plan = make_plan(config, argv, options)
    report = Report(plan, quiet=options.json)
    result = ResumeCheck(plan, report).run()
    if options.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        report.result(result)
    return EXACT if result.diagnosis is None else DIFFERENT


def kept_directory(keep: str) -> Path:
    """Returns DIR of --keep, made and empty.

    Raises:
        ConfigError: it holds something.
    """
    path = Path(keep)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--keep {keep}: it exists and is not empty; name a new directory")
    path.mkdir(parents=True, exist_ok=True)
    return path

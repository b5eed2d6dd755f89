"""The runs behind ``trainer check resume``, and the comparison of what they leave."""

import json
import math
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.check import Options, kept_directory
from trainer.cli.check_process import RunFailed, TrainingProcess
from trainer.config.rules import SKIPS
from trainer.config.run import RunConfig
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.cli.check_report import Report
    from trainer.train.comparison import StateComparison, Value
    from trainer.train.diagnosis import Diagnosis, Evidence

LAUNCHER_SECONDS = 60.0  # what torchrun may take beyond the run's own ckpt.grace_seconds

DEFAULT_STEPS = 10
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative distance that another order of additions may make over a few steps, by compute dtype."""
SPREADS = 2.0
"""A measured bound is this many times the distance that was measured: resumed runs lie less far, and at random."""


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        checkpoint: the step that is saved before the signal.
        bound: 0 = everything must be equal bit for bit.
    """

    argv: tuple[str, ...]
    config: RunConfig
    steps: int
    at: int
    checkpoint: int
    signal: int
    nproc: int
    resume_nproc: int
    bound: float
    measures: bool
    """The bound may be measured where the resumed run is outside of it: by what the number of processes changes alone."""
    repeat: bool | None
    keep: str | None


@dataclass(frozen=True)
class Interruption:
    """Where the signal met the run."""

    last_step: int
    """The last step that it had logged when the signal was sent."""
    exit_code: int
    checkpoint: int | None
    """The newest that it left behind."""
    resumed_from: int = 0


@dataclass(frozen=True)
class Result:
    plan: Plan
    interruption: Interruption
    values: "Sequence[Value]"
    states: "StateComparison"
    diagnosis: "Diagnosis | None"
    repeated: bool
    """Whether the uninterrupted run was run twice."""
    measured: float | None
    """How far an uninterrupted run at the other number of processes lies from the first; None = none was run."""
    directory: Path | None
    """Where the runs are; None where they have been removed."""

    def to_json(self) -> dict[str, Any]:
        diagnosis = self.diagnosis
        verdict = "different" if diagnosis else "within bound" if self.plan.bound else "exact"
        return {
            "verdict": verdict,
            "steps": self.plan.steps,
            "killed_after_step": self.interruption.last_step,
            "resumed_from": self.interruption.resumed_from,
            "nproc": self.plan.nproc,
            "resume_nproc": self.plan.resume_nproc,
            "bound": self.plan.bound,
            "measured_spread": self.measured,
            "values": len(self.values),
            "tensors": self.states.tensors,
            "what": diagnosis.what if diagnosis else None,
            "cause": diagnosis.cause if diagnosis else None,
            "first": asdict(diagnosis.first) if diagnosis and diagnosis.first else None,
            "checkpoint_differences": [asdict(difference) for difference in self.states.differences],
            "directory": None if self.directory is None else str(self.directory),
        }


def make_plan(config: RunConfig, argv: Sequence[str], options: Options) -> Plan:
    """Returns the plan for a config and the options of the command line.

    Raises:
        ConfigError: the steps do not fit the run, or the signal does not fit the steps.
    """
    longest = config.max_steps
    steps = options.steps or min(DEFAULT_STEPS, longest or DEFAULT_STEPS)
    if longest is not None and steps > longest:
        raise ConfigError(f"--steps {steps}: the run has only max_steps = {longest}")
    at = options.at or steps // 2
    if not 1 <= at < steps:
        raise ConfigError(
            f"--at {at}: the signal must come before the last of --steps {steps}, so that something is left to resume"
        )
    resume_nproc = options.resume_nproc or options.nproc
    bound = 0.0 if resume_nproc == options.nproc else options.bound or BOUNDS[config.model.dtype]
    if options.bound and not bound:
        raise ConfigError("--bound is for --resume-nproc: at the same number of processes everything must be equal")
    return Plan(
        argv=tuple(argv),
        config=config,
        steps=steps,
        at=at,
        checkpoint=max(1, at - 1),  # one step before the signal, so that the resumed run has a step to repeat
        signal=options.signal,
        nproc=options.nproc,
        resume_nproc=resume_nproc,
        bound=bound,
        measures=bool(bound) and options.bound is None,
        repeat=options.repeat,
        keep=options.keep,
    )


def without_flag(argv: Sequence[str], flag: str) -> list[str]:
    """Returns the tokens without every `flag VALUE` and `flag=VALUE`: of a list, a later one would only add to them."""
    kept: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == flag:
            del tokens[: bool(tokens) and not tokens[0].startswith(("--", "@"))]
        elif not token.startswith(f"{flag}="):
            kept.append(token)
    return kept


class ResumeCheck:
    """Runs a plan, telling `report` how far it is."""

    def __init__(self, plan: Plan, report: "Report"):
        self.plan, self.report = plan, report
        self.directory = kept_directory(plan.keep) if plan.keep else Path(tempfile.mkdtemp(prefix="trainer-check-"))

    def run(self) -> Result:
        """Returns what was found; the runs are removed if all is well and --keep was not given.

        Raises:
            RunFailed: a run ended otherwise than it should have; the message has its output.
        """
        keep = True
        try:
            with self.report.progress():
                self._train("never-stopped", "never stopped", self.plan.nproc)
                interruption = self._interrupt()
                self._train("resumed", "resumed", self.plan.resume_nproc, resume=True)
                interruption = self._resumed_from(interruption)
                result = self._compare(interruption)
            keep = result.diagnosis is not None or self.plan.keep is not None
        except ConfigError:
            keep = self.plan.keep is not None
            raise
        finally:
            if not keep:
                shutil.rmtree(self.directory, ignore_errors=True)
        return result

    # -- the runs ------------------------------------------------------------------------------------------------------

    def _flags(self, run_dir: Path, *, interval: int, resume: bool) -> list[str]:
        """The config's own flags and, after them, what a check decides by itself."""
        flags = [
            *without_flag(self.plan.argv, "--ckpt.at"),
            "--output-dir",
            str(run_dir),
            "--stop-step",
            str(self.plan.steps),
        ]
        flags += ["--no-resume", "--no-overwrite", *(["--resume"] if resume else [])]
        flags += ["--ckpt.interval", str(interval), "--ckpt.keep-every", "none", "--ckpt.at-end"]
        flags += ["--ckpt.at", "", "--ckpt.micro-interval", "0", "--ckpt.minutes", "none"]
        flags += [
            "--ckpt.stop-minutes",
            "none",
            *(f"--no-ckpt.{name}" for name in SKIPS),
        ]  # all of the state, to the end
        flags += ["--no-ckpt.export-weights", "--data.log-ids", "--wandb.mode", "off", "--log.progress", "off"]
        return flags

    def _start(self, name: str, nproc: int, *, resume: bool = False) -> TrainingProcess:
        # The run that never stops writes no checkpoint before its last: so a save that changes something shows, too.
        stops = name == "resumed"
        run_dir = self._run_dir(name)
        flags = self._flags(run_dir, interval=self.plan.checkpoint if stops else 0, resume=resume)
        return TrainingProcess(flags, run_dir, self.directory / f"{name}.log", nproc)

    def _run_dir(self, name: str) -> Path:
        return self.directory / name

    def _train(self, name: str, label: str, nproc: int, *, resume: bool = False) -> None:
        with self.report.phase(label) as progress, self._start(name, nproc, resume=resume) as process:
            process.finish(progress)

    def _interrupt(self) -> Interruption:
        plan = self.plan
        with self.report.phase("interrupted") as progress, self._start("resumed", plan.nproc) as process:
            last_step = process.interrupt(plan.signal, plan.at, plan.checkpoint, progress)
            code = process.wait(progress, plan.config.ckpt.grace_seconds + LAUNCHER_SECONDS)
            if plan.signal != signal.SIGKILL and code == 0 and process.last_step() >= plan.steps:
                raise RunFailed(
                    f"the run went on to step {plan.steps} and exited 0 although it got {signal.Signals(plan.signal).name} "
                    f"after step {last_step}; give more --steps, or look at {process.log}"
                )
            self.report.interrupted(last_step, code)
        return Interruption(last_step, code, self._newest())

    def _newest(self) -> int | None:
        from trainer.checkpoint.discovery import Status, discover

        found = discover(self._run_dir("resumed") / "checkpoints")
        return max((c.step for c in found if c.status is Status.COMMITTED and c.step is not None), default=None)

    def _resumed_from(self, interruption: Interruption) -> Interruption:
        """Reads from the run's own record where the resumed process began."""
        from trainer.train.sinks.jsonl import read_rows

        starts = [row for row in read_rows(self._run_dir("resumed") / "events.jsonl") if row.get("event") == "start"]
        if len(starts) != 2 or starts[-1].get("fresh"):
            raise RunFailed(f"the run was started again and did not resume: {json.dumps(starts)}")
        return replace(interruption, resumed_from=int(starts[-1]["step"]))

    # -- the comparison ------------------------------------------------------------------------------------------------

    def _compare(self, interruption: Interruption) -> Result:
        result = self._compared(self.plan, interruption)
        measured = None
        if result.diagnosis is not None and self.plan.measures:
            measured = self._spread_of_processes()
            if measured * SPREADS > self.plan.bound:
                result = self._compared(replace(self.plan, bound=measured * SPREADS), interruption)
        repeat = self.plan.repeat if self.plan.repeat is not None else result.diagnosis is not None
        diagnosis = self._repeat(result) if repeat else result.diagnosis
        directory = self.directory if diagnosis is not None or self.plan.keep else None
        return replace(result, diagnosis=diagnosis, repeated=repeat, measured=measured, directory=directory)

    def _compared(self, plan: Plan, interruption: Interruption) -> Result:
        from trainer.train.comparison import Bound, compare_rows, compare_states, run_rows
        from trainer.train.diagnosis import diagnose

        a, b = self._run_dir("never-stopped"), self._run_dir("resumed")
        values = list(compare_rows(run_rows(a), run_rows(b), Bound(plan.bound), plan.steps))
        states = compare_states(a / self._last, b / self._last, Bound(plan.bound))
        diagnosis = diagnose(self._evidence(interruption, values, states))
        return Result(plan, interruption, values, states, diagnosis, repeated=False, measured=None, directory=None)

    def _evidence(self, interruption: Interruption, values: "list[Value]", states: "StateComparison") -> "Evidence":
        from trainer.train.comparison import Bound, compare_rows, run_rows
        from trainer.train.diagnosis import Evidence

        rows = run_rows(self._run_dir("never-stopped"))
        superseded = run_rows(self._run_dir("resumed"), "metrics.superseded.jsonl")
        before = compare_rows(rows, superseded, Bound(), max(superseded, default=0))
        # The signal may have come between the row of a step and its sample ids: what is not there is no difference.
        before = [value for value in before if value.step in superseded and value.b is not None]
        return Evidence(
            interruption.resumed_from, values, before, rows, states.differences, loaded=interruption.checkpoint
        )

    def _repeat(self, result: Result) -> "Diagnosis | None":
        """Runs the uninterrupted run again, and judges with what that shows."""
        from trainer.train.comparison import Bound, compare_rows, run_rows
        from trainer.train.diagnosis import diagnose

        self._train("repeated", "never stopped, again", self.plan.nproc)
        evidence = self._evidence(result.interruption, list(result.values), result.states)
        again = compare_rows(evidence.uninterrupted, run_rows(self._run_dir("repeated")), Bound(), self.plan.steps)
        return diagnose(replace(evidence, repeated=list(again)))

    def _spread_of_processes(self) -> float:
        """Returns how far a run that never stops comes to lie from the first one by the number of its processes alone.

        With Muon that is far: it blows up directions in which a gradient is nothing but rounding.
        """
        from trainer.train.comparison import Bound, compare_rows, compare_states, run_rows, spread

        self._train("other-processes", f"never stopped, on {self.plan.resume_nproc}", self.plan.resume_nproc)
        a, b, any_distance = self._run_dir("never-stopped"), self._run_dir("other-processes"), Bound(math.inf)
        values = compare_rows(run_rows(a), run_rows(b), any_distance, self.plan.steps)
        return spread(values, compare_states(a / self._last, b / self._last, any_distance))

    @property
    def _last(self) -> str:
        return f"checkpoints/step_{self.plan.steps:08d}"

"""When to save, what to resume from, and what to keep: the checkpoints of one run.

Every method is collective: all ranks call it, rank 0 looks at the file system, and what it finds is agreed on.
"""

import copy
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from trainer.checkpoint.app_state import AppState, attempt
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.dcp import DTYPE_NAMES
from trainer.checkpoint.discovery import Candidate, Checkpoint, Status, discover, inspect_step, locate, newest_first
from trainer.checkpoint.leaves import load_leaves
from trainer.checkpoint.manifest import Manifest, check_bytes
from trainer.checkpoint.paths import CHECKPOINTS, SUPERSEDED, is_shard, step_name
from trainer.checkpoint.retention import plan_removals
from trainer.checkpoint.staging import Shard, Stager
from trainer.checkpoint.storage import Written, global_bytes
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tables import JSON_TENSOR
from trainer.core.distributed import on_main, world_from_env
from trainer.core.files import FileRecord
from trainer.core.log import logger
from trainer.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trainer.config.train import CkptConfig, ResumeConfig

WEIGHTS = "model"
"""The owner of the weights: one that is not finite makes a state that is never resumed from."""


class CheckpointManager:
    def __init__(
        self, run_dir: Path | str, config: "CkptConfig", app: AppState, *, describe: Callable[[], Mapping[str, Any]]
    ):
        """
        run_dir: the run's output directory; checkpoints go to ``<run_dir>/checkpoints``.
        app: the state to save and to load into.
        describe: what the run says about itself in each manifest (config, fingerprints, mesh, ...): JSON, called on
            rank 0 at each save.
        """
        self.run_dir = Path(run_dir)
        self.config = config
        self.app = app
        self.describe = describe
        self.store = CheckpointStore(self.run_dir / CHECKPOINTS)
        self.world = world_from_env()
        self._stager = Stager(copy=config.async_)
        self._writer: BackgroundWriter | None = None  # made by the first save with `ckpt.async`
        self._writing: int | None = None  # the step that it was given last
        self._parent: Mapping[str, Any] | None = None
        # The checkpoint that holds the state as of now, if there is one; its micro-step; and what is pending in it.
        self._on_disk: tuple[Path, int, Mapping[str, Any] | None] | None = None
        self._loaded: tuple[int, Mapping[str, float]] | None = None  # a step and what its manifest had measured
        self._tidied = False
        self._retained = True  # false after a load: a crash may have come between that commit and the removals after it

    def due(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint is due after `step` updates: each `ckpt.interval`, `ckpt.at`, and the end."""
        interval = self.config.interval
        by_interval = interval > 0 and step > 0 and step % interval == 0
        return by_interval or step in self.config.at or (self.config.at_end and step == max_steps)

    # -- save ----------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        resumable: bool = True,
        reason: str = "",
        micro_step: int = 0,
        pending: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes the state after `step` updates, then removes what retention no longer wants. Returns its directory.

        With `ckpt.async` it returns as soon as the state is copied; the checkpoint is there when `wait` returns, or
        `poll` or the next save find it done. One save at a time: a second one waits for the first.

        The step that was last saved or loaded, and so is on disk as it is in memory, is not written again; what a crash
        after its commit left for retention to remove is removed.

        resumable, reason: a state to look at and not to go on from, and why. One whose weights are not finite never is
            resumable.
        micro_step, pending: of a state with more in it than that of the boundary; see Manifest.
        metrics: what was measured at this step, for `ckpt.keep_best`; of the step that was loaded, what its checkpoint
            has stays.

        Raises:
            CheckpointError: on every rank, if any rank failed, now or in the save before; every earlier checkpoint is
                still there.
        """
        final = self.store.directory / step_name(step)
        if self._is_on_disk(final, pending):
            if not self._retained:
                on_main(self._apply_retention)
                self._retained = True
            return final
        self.wait()
        self._tidy_once()
        started = time.perf_counter()
        state = self.app.state_dict()
        self._check_step(step, state)
        self.app.check_agreement(state)
        shard, run = attempt("preparing the save", lambda: (self._stager.stage(state), self._description()))
        dtypes = Counter(DTYPE_NAMES[tensor.dtype] for tensor in state.values())
        manifest = Manifest(
            step=step,
            files={},
            micro_step=micro_step,
            pending=pending,
            resumable=resumable,
            reason=reason,
            metrics=self._measured(step, metrics or {}),
            world_size=self.world.size,
            dtypes=dict(sorted(dtypes.items())),
            parent=self._parent,
            run=run,
            versions=_versions(),
        )
        write = partial(self._write, shard, global_bytes(state), manifest)
        if self.config.async_:
            self._writer = self._writer or BackgroundWriter()
            self._writing = step
            self._writer.submit(write)
            logger.debug(
                f"step {step}: the state is copied, training stood still {time.perf_counter() - started:.3f} s"
            )
        else:
            write(None)
        self._on_disk = (final, micro_step, pending) if resumable else None
        self._retained = True
        return final

    def _measured(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns what was measured at `step`, now or, where this process began at it, by the process before."""
        before = self._loaded[1] if self._loaded is not None and self._loaded[0] == step else {}
        return {**before, **{name: value for name, value in metrics.items() if math.isfinite(value)}}

    def _description(self) -> Mapping[str, Any]:
        """Returns what the manifest says about the run as of now, on rank 0."""
        return copy.deepcopy(dict(self.describe())) if self.world.is_main else {}

    def _write(self, shard: Shard, needed_bytes: int, manifest: Manifest, group: "ProcessGroup | None") -> None:
        """The part of a save that may run beside the training: nothing here reads the live state."""
        started = time.perf_counter()

        def describe(written: Written) -> Manifest:
            if written.not_finite is None:
                return replace(manifest, files=written.files)
            reason = f"{written.not_finite} has a value that is not finite"
            logger.error(f"step {manifest.step}: {reason}; the checkpoint is written and never resumed from")
            return replace(manifest, files=written.files, resumable=False, reason=reason)

        path = self.store.write(manifest.step, shard, needed_bytes, describe, finite=WEIGHTS, group=group)
        on_main(self._apply_retention, group=group)
        logger.debug(f"{path} is committed, {needed_bytes / 2**20:.0f} MiB in {time.perf_counter() - started:.2f} s")

    def poll(self) -> None:
        """Raises what a save in the background raised, once it has ended. Call it after each step; it never waits.

        Raises:
            CheckpointError: on every rank: the checkpoint of the step that is named was not written.
        """
        if self._writer is not None:
            self._settle(self._writer.poll)

    def wait(self) -> None:
        """Returns once the last save is durable, or raises as `poll` does."""
        if self._writer is not None:
            self._settle(self._writer.wait)

    def _settle(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except CheckpointError as error:
            self._on_disk = None
            raise CheckpointError(f"the save of step {self._writing} in the background failed: {error}") from error
        except BaseException:
            self._on_disk = None
            raise

    def close(self) -> None:
        """Waits for the last save and gives back what saving needed.

        Raises:
            CheckpointError: as `poll`.
        """
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                self._settle(writer.close)
        finally:
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Closes; a failed save is raised, unless an error is on its way already: then it is logged."""
        try:
            self.close()
        except Exception as failure:
            if kind is None:
                raise
            logger.error("{}", failure)

    def _is_on_disk(self, path: Path, pending: Mapping[str, Any] | None) -> bool:
        if self._on_disk is None or self._on_disk[0] != path:
            return False
        _, micro_step, there = self._on_disk
        return pending == there or (pending is None and micro_step > 0)  # with more in it than is asked for

    def check_space(self) -> None:
        """Checks before the first step, fresh or resumed, that a checkpoint of this state fits on the disk.

        With `ckpt.keep_last` = N, there are N + 1 of them for a moment; where those that are not there yet do not fit, a
        warning says so.

        Raises:
            CheckpointError: not even one fits, with the bytes needed and free.
        """
        on_main(self._check_space, global_bytes(self.app.state_dict()))

    def _check_space(self, needed_bytes: int) -> None:
        self.store.check_space(needed_bytes)
        if self.config.keep_last is not None:
            there = sum(c.status is Status.COMMITTED for c in discover(self.store.directory))
            try:
                self.store.check_space(needed_bytes, max(1, self.config.keep_last + 1 - there))
            except CheckpointError as error:
                logger.warning(f"the disk may fill up during this run: {error}")

    def _check_step(self, step: int, state: Mapping[str, Tensor]) -> None:
        """A checkpoint's name and its contents must not disagree: the step is counted first and saved then."""
        leaves = load_leaves(state[JSON_TENSOR].numpy().tobytes(), "this run's state")
        counted = leaves.get("progress", {}).get("step", step)
        if counted != step:
            raise CheckpointError(f"asked to save step {step}, but the run's own counter stands at {counted}")

    def _apply_retention(self) -> None:
        candidates = discover(self.store.directory)
        plan = plan_removals(
            candidates,
            keep_last=self.config.keep_last,
            keep_every=self.config.keep_every,
            keep_best=self.config.keep_best,
        )
        for candidate in plan:
            try:
                self.store.remove(candidate.path)
            except CheckpointError as error:  # the new checkpoint is durable; a full disk will be an error of its own
                logger.warning(f"retention: {error}")

    def _tidy_once(self) -> None:
        if not self._tidied:
            on_main(self._tidy)
            self._tidied = True

    def _tidy(self) -> None:
        for line in self.store.tidy():
            logger.info(f"checkpoints: {line}")

    # -- resume --------------------------------------------------------------------------------------------------------

    def choose(self, resume: "ResumeConfig", damaged: Mapping[Path, str] | None = None) -> Checkpoint | None:
        """Returns the checkpoint to resume from, the same on every rank; None = start fresh (`resume.if_exists` only).

        Without a step, the newest resumable one is taken; newer ones that cannot be used are passed over, each with a
        logged reason. What is named explicitly is taken or is an error.

        Of the bytes only the tables are checked here: `load` checks the tensors while it reads them. Where it finds
        damage, the next call is told so by `damaged` (path -> what is wrong).

        Raises:
            IncompleteCheckpoint, CorruptCheckpoint, CheckpointError: nothing usable; the message lists each candidate.
        """
        if resume.dir is None or on_main(self._is_own, resume.dir):
            self._tidy_once()  # a fork's source is never written to
        candidates, explicit, where = on_main(self._candidates, resume)
        rejected: list[str] = []
        for candidate in candidates:
            problem = (damaged or {}).get(candidate.path)
            if problem is None:
                problem = candidate.reason if candidate.status is not Status.COMMITTED else self._check(candidate)
            if problem is None:
                return candidate.checkpoint()
            if explicit:
                raise _refusal(candidate, problem)
            rejected.append(f"{candidate.path.name}: {candidate.status}: {problem}")
            if self.world.is_main:
                logger.warning(f"not resuming from {rejected[-1]}")
        if resume.if_exists and not candidates:  # where there were some and none is usable, starting over loses a run
            return None
        listed = "".join(f"\n  {line}" for line in rejected)
        hint = "" if candidates else "; leave --resume out to start fresh, or give --resume.if-exists for both cases"
        raise CheckpointError(f"no checkpoint to resume from in {where}{hint}{listed}")

    def resume(self, resume: "ResumeConfig") -> Checkpoint | None:
        """Chooses and loads; where the newest turns out to be damaged, the one before it. Returns what was loaded.

        Raises:
            As `choose` and `load`.
        """
        damaged: dict[Path, str] = {}
        while (checkpoint := self.choose(resume, damaged)) is not None:
            try:
                self.load(checkpoint)
                return checkpoint
            except CorruptCheckpoint as error:  # where it was asked for by name, `choose` raises it
                damaged[checkpoint.path] = str(error)
        return None

    def load(self, checkpoint: Checkpoint, *, skip: AbstractSet[str] = frozenset()) -> None:
        """Loads a checkpoint into the owners, checks that it took, and sets newer checkpoints of this run aside.

        With `ckpt.verify = "checksum"` every byte is checked while it is read: once, not in a pass of its own.

        skip: owners that keep their state.

        Raises:
            CorruptCheckpoint: a file is damaged. The owners' tensors are overwritten by then: load another checkpoint,
                or end.
            CheckpointMismatch: as AppState.load.
        """
        self.app.load(checkpoint.path, skip=skip, check=self._share(checkpoint.manifest))
        self._loaded = (checkpoint.step, checkpoint.manifest.metrics)
        if not on_main(self._is_own, checkpoint.path):
            self._parent = {
                "path": str(checkpoint.path),
                "step": checkpoint.step,
                "checksum": checkpoint.manifest.checksum,
            }
            return
        self._parent = checkpoint.manifest.parent
        manifest = checkpoint.manifest
        self._on_disk = None if skip else (checkpoint.path, manifest.micro_step, manifest.pending)
        self._retained = False
        on_main(self._supersede, checkpoint.step)

    def _supersede(self, step: int) -> None:
        for name in self.store.supersede(step):
            logger.info(f"checkpoints: {name} is newer than the resumed step {step}: moved to superseded/")

    def _is_own(self, path: str | Path) -> bool:
        own = [self.run_dir, self.run_dir / CHECKPOINTS, self.run_dir / CHECKPOINTS / SUPERSEDED]
        # Each may be a link to another disk. Not Path.resolve, which fails where links go round in a circle.
        run_dir, *places = (Path(os.path.realpath(directory)) for directory in own)
        place = Path(os.path.realpath(path))
        return place in (run_dir, places[0]) or place.parent in places

    def _candidates(self, resume: "ResumeConfig") -> tuple[list[Candidate], bool, Path]:
        """Returns the candidates in the order to try, whether they were named explicitly, and where they were found."""
        if resume.dir is not None and resume.if_exists and not Path(resume.dir).exists():
            return [], False, Path(resume.dir)
        directory, is_run = (self.store.directory, True) if resume.dir is None else locate(resume.dir)
        if not is_run:
            candidate = inspect_step(directory)
            if resume.step is not None and candidate.step != resume.step:
                raise CheckpointError(
                    f"--resume.dir {resume.dir} is step {candidate.step}, not {resume.step} as --resume.step asks"
                )
            return [candidate], True, directory
        candidates = newest_first(discover(directory))
        if resume.step is None:
            return candidates, False, directory
        chosen = [candidate for candidate in candidates if candidate.step == resume.step]
        if not chosen and (candidates or not resume.if_exists):
            steps = ", ".join(str(c.step) for c in reversed(candidates) if c.status is Status.COMMITTED) or "none"
            raise CheckpointError(f"{directory} has no checkpoint of step {resume.step}; resumable steps: {steps}")
        return chosen, True, directory

    def _check(self, candidate: Candidate) -> str | None:
        """Returns what is wrong with the tables of a checkpoint, None if nothing; sizes were compared by discovery."""
        manifest = candidate.checkpoint().manifest
        if self.config.verify == "size":
            return None
        tables = [name for name in manifest.files if not is_shard(name)]
        try:
            on_main(check_bytes, candidate.path, manifest, tables)
        except CheckpointError as error:
            return str(error)
        return None

    def _share(self, manifest: Manifest) -> dict[str, FileRecord]:
        """Returns the shards that this rank checks: at the world size that wrote them, the one it wrote itself."""
        if self.config.verify == "size":
            return {}
        shards = sorted(filter(is_shard, manifest.files))
        size = self.world.size
        return {n: manifest.files[n] for k, n in enumerate(shards) if k * size // len(shards) == self.world.rank}


@cache
def _versions() -> Mapping[str, str]:
    return {"trainer": version("exact-trainer"), "torch": version("torch")}


def _refusal(candidate: Candidate, problem: str) -> CheckpointError:
    """Returns the error for a checkpoint that was asked for by name and cannot be used."""
    message = f"cannot resume from {candidate.path}: {problem}"
    match candidate.status:
        case Status.INCOMPLETE:
            return IncompleteCheckpoint(message)
        case Status.CORRUPT | Status.COMMITTED:  # committed, and its bytes did not hold
            return CorruptCheckpoint(message)
        case _:
            return CheckpointError(message)

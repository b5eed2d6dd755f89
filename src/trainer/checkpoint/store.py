"""The checkpoints directory of one run: writing, removing and setting aside, so that nothing committed is ever lost.

A save writes ``step_00000012.tmp-<token>/`` (each rank its shard, then the manifest), syncs it, and renames it to
``step_00000012/``: that rename is the commit. Where the step exists already, the old directory is first renamed to
``step_00000012.replaced-<token>/``, which `discovery` takes for the step until the new one is in place. A removal
renames to ``step_00000012.removed-<token>/`` and takes the manifest first. So whatever a crash leaves behind is told by
its name, and `tidy` clears it up at the next start; a directory that is called step_... is never removed on suspicion.

All ranks call `write`; everything else runs on rank 0 alone, through `on_main`.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.dcp import lost_each_other
from trainer.checkpoint.discovery import WHOLE, Candidate, Status, discover, inspect_step
from trainer.checkpoint.manifest import Manifest, check_sizes, dump_manifest
from trainer.checkpoint.paths import (
    LOCK,
    MANIFEST,
    SUPERSEDED,
    is_removed,
    is_temporary,
    os_errors,
    replaced_step_of,
    step_name,
    step_of,
)
from trainer.checkpoint.staging import Shard
from trainer.checkpoint.storage import Written, write_shard
from trainer.core import files
from trainer.core.distributed import on_main
from trainer.core.lock import try_flock
from trainer.core.log import logger
from trainer.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SLACK_BYTES = 8 << 20  # headers, metadata, manifest and the file system's own blocks


class CheckpointStore:
    def __init__(self, directory: Path):
        """directory: ``<run>/checkpoints``; created with the first save."""
        self.directory = directory
        self._lock_fd: int | None = None  # rank 0, while a save is running

    def write(
        self,
        step: int,
        shard: Shard,
        needed_bytes: int,
        describe: Callable[[Written], Manifest],
        *,
        finite: str | None = None,
        group: "ProcessGroup | None" = None,
    ) -> Path:
        """Writes and commits a checkpoint; collective. Returns its directory once it is durable.

        needed_bytes: of all shards together.
        describe: makes the manifest of what was written; called on rank 0.
        finite: an owner whose tensors are looked at, as `write_shard` does.
        group: the ranks' group of the calling thread.

        Raises:
            CheckpointError: on every rank, if any rank failed; names ranks, files and reasons. What was committed
                before still is.
        """
        temporary = None
        try:
            temporary = on_main(self._begin, step, needed_bytes, group=group)
            written = write_shard(temporary, shard, finite=finite, group=group)
            return on_main(self._commit, temporary, step, lambda: describe(written), group=group)
        except RuntimeError as error:
            self._discard(temporary)
            raise lost_each_other(f"cannot write the checkpoint of step {step}", error) from error
        except BaseException:
            self._discard(temporary)
            raise

    def check_space(self, needed_bytes: int, count: int = 1) -> None:
        """Checks that `count` checkpoints of `needed_bytes` fit on the disk; on rank 0.

        Raises:
            CheckpointError: with the bytes needed and free.
        """
        place = self.directory
        while not place.exists():
            place = place.parent
        with os_errors(f"cannot ask for the free space at {place}"):
            free_bytes = files.free_bytes(place)
        wanted_bytes = count * (needed_bytes + _SLACK_BYTES)
        if free_bytes < wanted_bytes:
            what = "a checkpoint needs" if count == 1 else f"{count} checkpoints need"
            raise CheckpointError(
                f"{what} {_size(wanted_bytes)}, but {self.directory} has {_size(free_bytes)} free; make room, lower "
                "--ckpt.keep-last, or choose another --output-dir"
            )

    def _begin(self, step: int, needed_bytes: int) -> Path:
        final = self.directory / step_name(step)
        if os.path.lexists(final) and (final.is_symlink() or inspect_step(final, step).status is Status.FOREIGN):
            raise CheckpointError(f"{final} is not a checkpoint of this trainer and will not be replaced; move it away")
        self.check_space(needed_bytes)
        temporary = self.directory / f"{step_name(step)}.tmp-{secrets.token_hex(4)}"
        with os_errors(f"cannot begin the checkpoint of step {step}"):
            files.make_dirs(self.directory)
            files.make_dir(temporary)
            # Held until the commit. The kernel lets go of it when this process dies, however it dies: a temporary
            # directory whose lock is free belongs to nobody.
            self._lock_fd = os.open(temporary / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try_flock(self._lock_fd)
        return temporary

    def _commit(self, temporary: Path, step: int, describe: Callable[[], Manifest]) -> Path:
        final = self.directory / step_name(step)
        manifest = describe()
        try:
            check_sizes(temporary, manifest)
        except CorruptCheckpoint as error:
            raise CheckpointError(
                f"{error}: what a rank wrote is not what rank 0 sees; {self.directory} must be on a file system that "
                "all ranks share"
            ) from error
        with os_errors(f"cannot commit the checkpoint of step {step}"):
            files.fsync_dir(temporary)  # the shards' names; their bytes were synced by the ranks that wrote them
            files.write_new(temporary / MANIFEST, dump_manifest(manifest))
            files.fsync_dir(temporary)
            replaced = self._rename_into_place(temporary, final)
        self._unlock()
        try:
            files.unlink(final / LOCK)
            if replaced is not None:
                files.remove_tree(replaced, MANIFEST)
        except OSError as error:  # the commit stands
            logger.warning(
                f"{replaced or final / LOCK} could not be removed ({error.strerror}); the next start tries again"
            )
        return final

    def _rename_into_place(self, temporary: Path, final: Path) -> Path | None:
        """The commit. Returns where an earlier checkpoint of the step was put, which counts until the second rename."""
        if not os.path.lexists(final):
            files.rename(temporary, final)
            return None
        replaced = final.with_name(f"{final.name}.replaced-{secrets.token_hex(4)}")
        files.rename(final, replaced)
        try:
            files.rename(temporary, final)
        except OSError:
            if not os.path.lexists(final):
                files.rename(replaced, final)
            raise
        return replaced

    def _discard(self, temporary: Path | None) -> None:
        """Clears up after a failed save, on rank 0; the failure itself is what gets raised."""
        if self._lock_fd is None or temporary is None:
            return
        self._unlock()
        try:
            if temporary.exists():
                files.remove_tree(temporary, MANIFEST)
        except OSError as error:
            logger.warning(f"{temporary} could not be removed ({error.strerror}); the next start removes it")

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def remove(self, path: Path) -> None:
        """Removes a checkpoint; from the first moment on it is none.

        Raises:
            CheckpointError: it, or what is left of it, could not be removed.
        """
        with os_errors(f"cannot remove {path}"):
            doomed = path
            if not is_removed(path.name):  # else a removal that was interrupted: go on with it
                doomed = path.with_name(f"{path.name}.removed-{secrets.token_hex(4)}")
                files.rename(path, doomed)
            files.remove_tree(doomed, MANIFEST)

    def remove_empty_superseded(self) -> None:
        """Removes superseded/ itself once nothing is left in it."""
        place = self.directory / SUPERSEDED
        with os_errors(f"cannot remove {place}"):
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()

    def tidy(self) -> list[str]:
        """Ends what a crash interrupted: puts a replaced checkpoint back, removes leftovers. Returns what was done.

        Left alone are the temporary directory of a save that is running (its lock is held) and everything foreign.
        """
        done = []
        for candidate in sorted(discover(self.directory), key=_written, reverse=True):
            path, name = candidate.path, candidate.path.name
            replaced = replaced_step_of(name)
            with os_errors(f"cannot clear up {path}"):
                if replaced is not None and candidate.status in WHOLE:
                    if os.path.lexists(self.directory / step_name(replaced)):
                        # Now: were the newer one set aside after the load, the next start would put this one back.
                        files.remove_tree(path, MANIFEST)
                        done.append(f"{name} removed: an older one of that step, whose removal had failed")
                        continue
                    files.rename(path, self.directory / step_name(replaced))
                    done.append(f"{name} put back as {step_name(replaced)}: writing it anew was interrupted")
                elif candidate.status is not Status.INCOMPLETE or (is_temporary(name) and _is_locked(path)):
                    continue
                elif is_temporary(name) or is_removed(name) or replaced is not None:
                    files.remove_tree(path, MANIFEST)
                    done.append(f"{name} removed: {candidate.reason}")
        return done

    def supersede(self, step: int) -> list[str]:
        """Moves every checkpoint after `step` into superseded/, usable or not. Returns the moved names."""
        moved = []
        for candidate in discover(self.directory):
            if candidate.step is None or candidate.step <= step or step_of(candidate.path.name) is None:
                continue
            with os_errors(f"cannot set {candidate.path} aside"):
                files.make_dirs(self.directory / SUPERSEDED)
                target, number = self.directory / SUPERSEDED / candidate.path.name, 1
                while os.path.lexists(target):
                    number += 1
                    target = target.with_name(f"{candidate.path.name}.{number}")
                files.rename(candidate.path, target)
            moved.append(candidate.path.name)
        return moved


def _written(candidate: Candidate) -> int:
    """When its manifest was written, in ns; 0 where it has none."""
    try:
        return (candidate.path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _is_locked(temporary: Path) -> bool:
    try:
        fd = os.open(temporary / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # killed before the lock was made, or right before the commit
    try:
        return try_flock(fd) is False  # where the file system has no locks, a directory belongs to nobody
    finally:
        os.close(fd)


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} bytes"

"""One process at a time in a directory.

The lock is a POSIX record lock on a file: the kernel lets go of it when the process dies, however it dies; a loader
process that was forked does not hold on to it; and it works over NFS.
"""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from trainer.core.log import logger

WAIT_SECONDS = 5.0
"""A process that was just killed may still be on its way out."""
WAIT_FOR_OTHER_HOST_SECONDS = 120.0
"""A file server lets go of the locks of a machine that died only after its lease, 90 seconds as a rule."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class DirectoryLock:
    """A file `.lock` in a directory, held until `release`."""

    NAME = ".lock"

    def __init__(self) -> None:
        self._fd = -1
        self._path: Path | None = None

    def acquire(self, directory: Path) -> str | None:
        """Waits a little for the lock. Returns None once it is held, else who has it.

        A lock that is held on another directory is let go of afterwards. Where the file system has no locks, this
        process counts as the holder.

        Raises:
            OSError: the file cannot be made.
        """
        path, began, told = directory / self.NAME, time.monotonic(), False
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            if _try_lock(fd):
                if _is_at(fd, path):
                    break
                os.close(fd)  # the one before removed it, or moved the directory, after it was opened here
                continue
            holder = _read(fd)
            os.close(fd)
            patience = (
                WAIT_SECONDS if holder.get("host") in (None, socket.gethostname()) else WAIT_FOR_OTHER_HOST_SECONDS
            )
            if time.monotonic() - began > patience:
                return f"process {holder.get('pid', '?')} on {holder.get('host', 'some host')}"
            if not told:
                logger.info(f"{directory} is in use by process {holder.get('pid', '?')}: waiting for it to end")
                told = True
            time.sleep(0.1)
        self.release()
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._fd, self._path = fd, path
        return None

    def moved(self, directory: Path) -> None:
        """Notes that the directory, and the lock in it, have another name now."""
        self._path = directory / self.NAME

    def release(self) -> None:
        """Removes the file and lets go; a second call does nothing."""
        if self._path is None:
            return
        try:
            if _is_at(self._fd, self._path):
                self._path.unlink()
        except OSError as error:
            logger.warning(f"{self._path} cannot be removed: {error.strerror}")  # it does no harm
        finally:
            os.close(self._fd)
            self._fd, self._path = -1, None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read(fd: int) -> dict:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def try_flock(fd: int) -> bool | None:
    """Asks for the whole-file lock of an open file. Returns whether it is ours now; None = the file system has none.

    Unlike the record lock above it belongs to the open file, not to the process: one process can see its own as held.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True

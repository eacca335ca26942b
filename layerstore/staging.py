"""Files and directories on their way to a name, and what is left of them when a writer dies.

A staged file is ``.tmp-<pid>-<random>`` beside its target and flocked as long as its writer lives. The pid is for
people: a leftover is what nobody holds a lock on and nobody has touched for some time (writers on hosts that don't
share locks). Stores and the node's cache use it. Nothing here maps errors: callers do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREFIX = ".tmp-"
FILE_MODE = 0o644
"""Of everything published, whatever the umask; the mode of the store's root says who may come in."""
DIRECTORY_MODE = 0o755
_LOCK_NAME = "lock"
_WORK_NAME = "work"


class StagedFile:
    """A new file. Either :meth:`publish` gives it a name, or :meth:`discard` removes it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path, self._file = _make_file(directory)
        self._open = True

    def fileno(self) -> int:
        """For reading back what has been written; closed with the rest."""
        return self._file

    def write(self, data: Buffer) -> None:
        """All of it, in as many writes as it takes."""
        view = memoryview(data).cast("B")
        while view:
            written = os.write(self._file, view)
            if written == 0:
                raise OSError(errno.EIO, "the file system took no bytes", self._path)
            view = view[written:]

    def seal(self) -> None:
        """Make the bytes durable. No error can come later: quotas of NFS are enforced as late as close."""
        os.fchmod(self._file, FILE_MODE)
        os.fsync(self._file)
        # Closing any descriptor flushes and reports; the lock stays with the other one.
        os.close(os.dup(self._file))

    def publish(self, target: str) -> None:
        """Rename to ``target``, in the same directory, durably. Only after :meth:`seal`."""
        os.rename(self._path, target)
        self._close()
        sync_directory(self._directory)

    def discard(self) -> None:
        """Remove what has not been published. Idempotent."""
        if self._open:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            finally:
                self._close()

    def _close(self) -> None:
        self._open = False
        try:
            os.close(self._file)
        except OSError:
            pass  # sealed already, or not wanted


class ScratchDirectory:
    """A private directory ``path`` in ``parent``, locked until :meth:`remove`."""

    def __init__(self, parent: str) -> None:
        self._base, self._lock = _make_scratch(parent)
        self.path = os.path.join(self._base, _WORK_NAME)
        os.mkdir(self.path, 0o700)

    def remove(self) -> None:
        try:
            _remove_scratch(self._base)
        finally:
            os.close(self._lock)


def write_file(target: str, data: bytes) -> None:
    """Replace ``target`` atomically and durably."""
    staged = StagedFile(os.path.dirname(target))
    try:
        staged.write(data)
        staged.seal()
        staged.publish(target)
    finally:
        staged.discard()


def read_file(path: str, limit: int) -> bytes:
    """All of a small file, or its first ``limit + 1`` bytes."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        left = min(os.fstat(file).st_size, limit) + 1
        while left and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)


def make_file(path: str) -> None:
    """Create an empty file, unless it exists."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        return
    os.fchmod(file, FILE_MODE)
    os.close(file)


def make_directory(path: str) -> None:
    """Create a directory durably, unless it exists; its parent exists."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return
    os.chmod(path, DIRECTORY_MODE)
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Make names durable."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and some FUSE file systems: directories have no fsync
            raise
    finally:
        os.close(file)


def reclaim_files(directory: str, before_ns: int, *, dry_run: bool) -> int:
    """Remove dead staged files last touched at ``before_ns`` or earlier; the bytes they took."""
    freed = 0
    for path in _temporaries(directory):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, IsADirectoryError):
            continue
        try:
            status = os.fstat(file)
            # Renamed while we looked: then the inode has its final name, and only this one goes.
            if touched(status) <= before_ns and _try_lock(file):
                freed += allocated(status)
                if not dry_run:
                    _unlink(path)
        finally:
            os.close(file)
    return freed


def reclaim_scratch(parent: str, before_ns: int, *, dry_run: bool) -> int:
    """Remove dead scratch directories in which nothing was touched after ``before_ns``; the bytes they took."""
    freed = 0
    for base in _temporaries(parent):
        size, newest = _usage(base)
        if newest > before_ns:
            continue
        try:
            lock = os.open(os.path.join(base, _LOCK_NAME), os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            # Its maker died, or is just about to make the lock: without one there is nothing else inside.
            if not dry_run and os.path.isdir(base):
                _remove_empty(base)
            continue
        try:
            if _try_lock(lock):
                freed += size
                if not dry_run:
                    _remove_scratch(base)
        finally:
            os.close(lock)
    return freed


def touched(status: os.stat_result) -> int:
    """Nanoseconds when a file was last changed, as far as its file system knows.

    The later of mtime and ctime: archives and rsync set an mtime in the past, while ctime can't be set; a file system
    without ctime says 0.
    """
    return max(status.st_mtime_ns, status.st_ctime_ns)


def allocated(status: os.stat_result) -> int:
    """Bytes that a file takes on its disk."""
    return status.st_blocks * 512


def _temporary_name() -> str:
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _temporaries(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _lock_new(file: int) -> bool:
    """Lock a file just made; False if a reclaimer was faster and has removed it."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _make_file(directory: str) -> tuple[str, int]:
    while True:
        path = os.path.join(directory, _temporary_name())
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _lock_new(file):
                return path, file
        except BaseException:
            os.close(file)
            _unlink(path)
            raise
        os.close(file)  # a reclaimer was faster


def _make_scratch(parent: str) -> tuple[str, int]:
    while True:
        base = os.path.join(parent, _temporary_name())
        os.mkdir(base, 0o700)
        try:
            lock = os.open(os.path.join(base, _LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a reclaimer was faster
        except BaseException:
            _remove_empty(base)
            raise
        if _lock_new(lock):
            return base, lock
        os.close(lock)


def _remove_scratch(base: str) -> None:
    """Contents, lock, directory: in this order what a killed removal leaves is still recognised."""
    work = os.path.join(base, _WORK_NAME)
    if os.path.lexists(work):
        shutil.rmtree(work)
    _unlink(os.path.join(base, _LOCK_NAME))
    _remove_empty(base)


def _remove_empty(base: str) -> None:
    try:
        os.rmdir(base)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _usage(base: str) -> tuple[int, int]:
    """Bytes allocated below ``base``, and when anything in it was last touched."""
    size, newest = 0, 0
    for directory, _, files in os.walk(base):
        for path in (directory, *(os.path.join(directory, name) for name in files)):
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            size += allocated(status)
            newest = max(newest, touched(status))
    return size, newest

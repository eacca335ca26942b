"""What a sandbox has written: a count of its upper, whatever a program left there."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from layerstore.staging import allocated

MAX_ENTRIES = 200_000
"""Entries that are counted, in about half a second; what has more is reported as not counted to the end."""
DEPTH = 64
"""Directories held open at once, and so the deepest that are counted."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Written:
    """Counts of an upper.

    Attributes:
        files: everything but directories and marks of deletion. A file of a layer that was changed in any way counts,
            for the upper has a whole copy of it.
        bytes: that they take on the disk; holes take none, and a file with several names is counted once.
        directories: new ones, and those of layers in which something was written.
        deleted: names of layers that were deleted or renamed.
        complete: False where there is more than was counted.
    """

    files: int = 0
    bytes: int = 0
    directories: int = 0
    deleted: int = 0
    complete: bool = True

    def to_json(self) -> dict[str, object]:
        return {
            "files": self.files,
            "bytes": self.bytes,
            "directories": self.directories,
            "deleted": self.deleted,
            "complete": self.complete,
        }


def written(upper: str, *, limit: int = MAX_ENTRIES) -> Written:
    """Count what is in ``upper``, without following a link or entering a mount, and without raising.

    A directory that is missing or can't be read makes the count incomplete; somebody may still write into it.
    """
    count = _Count(limit)
    try:
        top = os.open(upper, _DIRECTORY)
    except OSError:
        return Written(complete=False)
    try:
        count.device = os.fstat(top).st_dev
        count.walk(top)
    except OSError:
        count.complete = False
    finally:
        os.close(top)
    return Written(count.files, count.bytes, count.directories, count.deleted, count.complete)


class _Count:
    def __init__(self, limit: int) -> None:
        self.left = limit
        self.device = 0
        self.files = self.bytes = self.directories = self.deleted = 0
        self.complete = True
        self._shared: set[int] = set()

    def walk(self, top: int) -> None:
        """Depth first; each level is an open directory and the names in it that are still to be entered."""
        levels = [(top, self._count(top))]
        try:
            while levels:
                fd, names = levels[-1]
                if not names:
                    levels.pop()
                    if fd != top:
                        os.close(fd)
                    continue
                name = names.pop()
                if len(levels) >= DEPTH or self.left <= 0:
                    self.complete = False
                    continue
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=fd)
                except OSError:
                    self.complete = False
                    continue
                levels.append((below, self._count(below)))
        finally:
            for fd, _ in levels:
                if fd != top:
                    os.close(fd)

    def _count(self, fd: int) -> list[str]:
        """Count the entries of one directory; the names of those to enter."""
        names: list[str] = []
        try:
            if os.fstat(fd).st_dev != self.device:
                self.complete = False
                return []
            with os.scandir(fd) as entries:
                for entry in entries:
                    if self.left <= 0:
                        self.complete = False
                        break
                    self.left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        self.directories += 1
                        names.append(entry.name)
                    else:
                        self._leaf(entry.stat(follow_symlinks=False))
        except OSError:  # it can't be read, or an entry has gone meanwhile
            self.complete = False
        return names

    def _leaf(self, status: os.stat_result) -> None:
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # overlayfs' whiteout
            self.deleted += 1
            return
        self.files += 1
        if status.st_nlink > 1:
            if status.st_ino in self._shared:
                return
            self._shared.add(status.st_ino)
        self.bytes += allocated(status)

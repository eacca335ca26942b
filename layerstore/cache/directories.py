"""The directories of packs, which appear and go as a whole."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time

from layerstore.cache.format import Origin, dump_origins, is_hex
from layerstore.cache.frames import FramesFile
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.staging import PREFIX, allocated, make_directory, reclaim_files, sync_directory, write_file


class PackDirectories:
    """``packs/sha256`` of a cache whose owner this process is. Any thread may call. Raises OSError."""

    def __init__(self, cache: str) -> None:
        """``cache`` is the directory of the cache."""
        self._directory = os.path.join(cache, "packs", "sha256")
        self._lock = threading.Lock()
        self._temporaries: set[str] = set()
        """Names of what is being made or removed."""

    def create(self) -> None:
        """Make the place for packs, unless it is there."""
        make_directory(os.path.dirname(self._directory))
        make_directory(self._directory)

    def path(self, hex: str) -> str:
        """Of a pack, or where it will be."""
        return os.path.join(self._directory, hex)

    def frames(self, hex: str) -> str:
        """Its frames file. The time of last use of the pack is the file's mtime."""
        return os.path.join(self._directory, hex, "frames")

    def hexes(self) -> list[str]:
        """All packs that are there, sorted."""
        return sorted(filter(is_hex, os.listdir(self._directory)))

    def size(self, hex: str) -> int:
        """Bytes on disk; 0 if it isn't there."""
        return directory_size(self.path(hex))

    def last_use(self, hex: str) -> int:
        """Nanoseconds since 1970; 0 if that isn't known."""
        try:
            return os.stat(self.frames(hex)).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def touch(self, hex: str) -> bool:
        """It is used now; False if it isn't there."""
        try:
            os.utime(self.frames(hex))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def make(self, pack: StoredPack, index: FrameIndex, origin: Origin) -> None:
        """A pack of which nothing is there yet; durable on return. It must not exist."""
        staged = self._temporary()
        try:
            os.mkdir(staged)
            file = os.open(os.path.join(staged, "data"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.truncate(file, pack.raw_size)
                os.fsync(file)
            finally:
                os.close(file)
            write_file(os.path.join(staged, "origins"), dump_origins([origin]))
            write_file(os.path.join(staged, "frames"), FramesFile.content(index, pack))
            os.rename(staged, self.path(pack.digest.hex))
            sync_directory(self._directory)
        finally:
            self.delete(staged)

    def take_away(self, hex: str) -> str:
        """Rename a pack, so that no crash leaves half of it; returns what is to be deleted then."""
        trash = self._temporary()
        os.rename(self.path(hex), trash)
        return trash

    def delete(self, path: str) -> None:
        """Remove what was staged or taken away, if it is there still."""
        try:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        finally:
            with self._lock:
                self._temporaries.discard(os.path.basename(path))

    def reclaim(self) -> int:
        """Remove packs that were being made or removed when their owner died; the bytes they took."""
        freed = 0
        for name in os.listdir(self._directory):
            with self._lock:
                dead = name.startswith(PREFIX) and name not in self._temporaries
            if dead:
                freed += directory_size(self.path(name))
                self.delete(self.path(name))
        return freed

    def reclaim_files(self) -> int:
        """Remove what dead owners left inside packs; the bytes it took."""
        now = time.time_ns()
        places = filter(os.path.isdir, map(self.path, self.hexes()))
        return sum(reclaim_files(place, now, dry_run=False) for place in places)

    def _temporary(self) -> str:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        with self._lock:
            self._temporaries.add(name)
        return self.path(name)


def directory_size(directory: str) -> int:
    """Bytes allocated for the files of a directory; 0 if it is gone, or none."""
    size = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    size += allocated(entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return size

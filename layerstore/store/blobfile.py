"""Blobs as files: reading one, and writing one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import CorruptError
from layerstore.staging import StagedFile
from layerstore.store.counting import CountedUpload
from layerstore.store.failures import disk_errors
from layerstore.store.locks import FileLock

if TYPE_CHECKING:
    from typing_extensions import Buffer


class BlobFile:
    """An open blob. Raises FileNotFoundError if there is none."""

    def __init__(self, path: str, digest: Digest) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._digest = digest
        self._status = os.fstat(self._file.fileno())

    @property
    def size(self) -> int:
        return self._status.st_size

    @property
    def status(self) -> os.stat_result:
        """As it was when the file was opened."""
        return self._status

    def read_at(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptError(
                f"blob {self._digest} has {self.size} bytes, {length} at {offset} were to be read: publish it again"
            )
        parts = []
        with disk_errors(f"read blob {self._digest}"):
            while length:
                part = os.pread(self._file.fileno(), length, offset)
                if not part:
                    raise CorruptError(f"blob {self._digest} was cut off at {offset} while open: publish it again")
                parts.append(part)
                offset += len(part)
                length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> BlobFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BlobUpload(CountedUpload):
    """A blob on its way into ``directory``, hashed as it is written.

    Any failure removes what was written at once: on a full disk the space is wanted.
    """

    def __init__(self, directory: str, algorithm: str, lock: FileLock) -> None:
        super().__init__(algorithm)
        self._directory = directory
        self._lock = lock
        with disk_errors("start blob"):
            self._staged = StagedFile(directory)

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        try:
            with disk_errors("write blob"):
                self._staged.write(view)
        except BaseException:
            self.discard()
            raise
        self.wrote(view)

    def commit(self, digest: Digest, size: int) -> None:
        try:
            self.check(digest, size)
            with disk_errors(f"write blob {digest}"):
                self._staged.seal()
                # The lock keeps collectors and quarantine from mistaking the new blob for the one it replaces.
                with self._lock.shared():
                    self._staged.publish(os.path.join(self._directory, digest.hex))
        finally:
            self.discard()

    def discard(self) -> None:
        with disk_errors("remove unfinished blob"):
            self._staged.discard()

    def __enter__(self) -> BlobUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

"""A target that is a tar of an OCI layout with this image alone. A file of that name is replaced, by a rename.

It is written from front to back but for the headers of blobs: their names and sizes are known when they are written.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import UsageError, os_errors, printable
from layerstore.export.layouttarget import VERSION
from layerstore.export.target import tagged
from layerstore.export.tarheader import END
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import dump
from layerstore.oci.mediatype import OCI_INDEX
from layerstore.staging import StagedFile
from layerstore.store.counting import CountedUpload
from layerstore.store.protocol import Upload
from layerstore.tar.format import BLOCK, DIRTYPE, MAGIC_GNU, REGTYPE, Header, checksum, padded

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ArchiveTarget:
    """A tar of a layout, written front to back but for the headers of blobs, whose sizes and names come last."""

    def __init__(self, path: str, tag: str | None) -> None:
        self._path = path
        self._tag = tag
        self._staged: StagedFile | None = None
        self._there: set[Digest] = set()
        self._end = 0

    @property
    def scratch(self) -> str:
        return os.path.dirname(self._path)

    def __enter__(self) -> ArchiveTarget:
        with os_errors(f"write {printable(self._path)}"):
            if os.path.isdir(self._path):
                raise UsageError(f"{printable(self._path)} is a directory; write oci:{printable(self._path)}")
            self._staged = StagedFile(self.scratch)
        try:
            self._append(_member(b"oci-layout", REGTYPE, len(VERSION)), VERSION)
            self._append(_member(b"blobs/", DIRTYPE, 0))
            self._append(_member(b"blobs/sha256/", DIRTYPE, 0))
        except BaseException:
            self._discard()
            raise
        return self

    def upload(self) -> Upload:
        return _ArchivedBlob(self)

    def publish(self, manifest: bytes, entry: Descriptor) -> None:
        with self.upload() as upload:
            upload.write(manifest)
            upload.commit(entry.digest, entry.size)
        index = dump({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [tagged(entry, self._tag)]})
        self._append(_member(b"index.json", REGTYPE, len(index)), index)
        with os_errors(f"write {printable(self._path)}"):
            self._file.write(END)
            self._file.seal()
            self._file.publish(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            with os_errors("remove an unfinished archive"):
                staged.discard()

    @property
    def _file(self) -> StagedFile:
        assert self._staged is not None, "outside of its block"
        return self._staged

    def _append(self, head: bytes, body: bytes = b"") -> None:
        with os_errors(f"write {printable(self._path)}"):
            data = head + body.ljust(padded(len(body)), b"\0")
            self._file.write(data)
            self._end += len(data)

    def begin(self) -> None:
        """Leave room for a header."""
        with os_errors(f"write {printable(self._path)}"):
            self._file.write(bytes(BLOCK))

    def write(self, data: Buffer) -> None:
        with os_errors(f"write {printable(self._path)}"):
            self._file.write(data)

    def finish(self, digest: Digest, size: int) -> None:
        """What has been written since :meth:`begin` is this blob."""
        if digest in self._there:
            self.drop()
            return
        with os_errors(f"write {printable(self._path)}"):
            self._file.write(bytes(padded(size) - size))
            os.pwrite(self._file.fileno(), _member(b"blobs/sha256/" + digest.hex.encode(), REGTYPE, size), self._end)
        self._end += BLOCK + padded(size)
        self._there.add(digest)

    def drop(self) -> None:
        """Forget what has been written since :meth:`begin`."""
        with os_errors(f"write {printable(self._path)}"):
            os.ftruncate(self._file.fileno(), self._end)
            os.lseek(self._file.fileno(), self._end, os.SEEK_SET)


class _ArchivedBlob(CountedUpload):
    def __init__(self, archive: ArchiveTarget) -> None:
        super().__init__()
        self._archive = archive
        self._open = True
        archive.begin()

    def write(self, data: Buffer) -> None:
        self._archive.write(data)
        self.wrote(data)

    def commit(self, digest: Digest, size: int) -> None:
        self.check(digest, size)
        self._archive.finish(digest, size)
        self._open = False

    def __enter__(self) -> _ArchivedBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            self._archive.drop()


def _member(name: bytes, flag: bytes, size: int) -> bytes:
    """A header in one block whatever the size: base-256 from 8 GiB on, as GNU writes it."""
    length = b"%011o" % size if size < 8**11 else (1 << 95 | size).to_bytes(12, "big")
    header = Header(
        name=name,
        mode=b"%07o" % (0o755 if flag == DIRTYPE else 0o644),
        uid=b"%07o" % 0,
        gid=b"%07o" % 0,
        size=length,
        mtime=b"%011o" % 0,
        chksum=b"        ",
        typeflag=flag,
        linkname=b"",
        magic=MAGIC_GNU,
        version=b" \0",
        uname=b"",
        gname=b"",
        devmajor=b"",
        devminor=b"",
        prefix=b"",
        pad=b"",
    )
    return header._replace(chksum=b"%06o\0 " % checksum(header.pack())).pack()

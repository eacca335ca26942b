"""A target that is an OCI layout directory.

The tag moves by a rename of ``index.json``, under a lock (flock) of ``blobs``. Whoever writes to the layout holds a
shared lock of the directory, so exports into one layout may run at once. After a failure what was added is removed,
unless somebody else writes there at that moment, and may have found it there already. Blobs of an image whose tag has
moved stay, as no one knows who else has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import MalformedError, UnsupportedError, UsageError, os_errors, printable
from layerstore.export.target import tagged
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import CONFIG_BYTES, dump, parse
from layerstore.oci.layout import LAYOUT_FILE_BYTES, REF_NAME
from layerstore.oci.mediatype import OCI_INDEX
from layerstore.staging import DIRECTORY_MODE, PREFIX, StagedFile, read_file, sync_directory, write_file
from layerstore.store.counting import CountedUpload
from layerstore.store.protocol import Upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = b'{"imageLayoutVersion":"1.0.0"}'
"""What is in ``oci-layout``."""


class _StagedBlob(CountedUpload):
    """A blob on its way into a directory; ``added`` hears of one that wasn't there."""

    def __init__(self, directory: str, added: Callable[[str], None]) -> None:
        super().__init__()
        self._directory = directory
        self._added = added
        with os_errors("write a blob"):
            self._staged = StagedFile(directory)

    def write(self, data: Buffer) -> None:
        with os_errors("write a blob"):
            self._staged.write(data)
        self.wrote(data)

    def commit(self, digest: Digest, size: int) -> None:
        self.check(digest, size)
        path = os.path.join(self._directory, digest.hex)
        with os_errors(f"write blob {digest}"):
            self._staged.seal()
            if not os.path.lexists(path):
                self._added(path)
            self._staged.publish(path)

    def __enter__(self) -> _StagedBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        with os_errors("remove an unfinished blob"):
            self._staged.discard()


class LayoutTarget:
    """An OCI layout directory, made where there is none; its parent has to be there.

    Raises:
        UsageError: entered, and the directory holds something else than a layout.
        MalformedError, UnsupportedError: entered, and the layout isn't one that can be added to.
    """

    def __init__(self, path: str, tag: str | None) -> None:
        self._path = path
        self._tag = tag
        self._blobs = os.path.join(path, "blobs", "sha256")
        self._lock = -1
        self._made: list[str] = []  # what was not there before, in the order of making
        self._published = False

    @property
    def scratch(self) -> str:
        return self._path

    def __enter__(self) -> LayoutTarget:
        try:
            with os_errors(f"make the layout {printable(self._path)}"):
                self._directory(self._path)
                self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                self._check()
                self._directory(os.path.dirname(self._blobs))
                self._directory(self._blobs)
                marker = os.path.join(self._path, "oci-layout")
                if not os.path.lexists(marker):
                    self._made.append(marker)
                    write_file(marker, VERSION)
        except BaseException:
            self._close()
            raise
        return self

    def upload(self) -> Upload:
        return _StagedBlob(self._blobs, self._made.append)

    def publish(self, manifest: bytes, entry: Descriptor) -> None:
        with self.upload() as upload:
            upload.write(manifest)
            upload.commit(entry.digest, entry.size)
        index = os.path.join(self._path, "index.json")
        with os_errors(f"write {printable(index)}"), _locked(os.path.dirname(self._blobs)):
            document = self._index()
            manifests = document["manifests"]
            assert isinstance(manifests, list)
            kept = [other for other in manifests if not _replaced(other, entry, self._tag)]
            document["manifests"] = [*kept, tagged(entry, self._tag)]
            write_file(index, dump(document))
        self._published = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _directory(self, path: str) -> None:
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            return
        os.chmod(path, DIRECTORY_MODE)  # whatever the umask
        self._made.append(path)
        sync_directory(os.path.dirname(path))

    def _check(self) -> None:
        """Whether the directory is a layout, or may become one."""
        marker = os.path.join(self._path, "oci-layout")
        if not os.path.lexists(marker):
            # Another export may have begun a moment ago: then there is its marker by now, or one on its way.
            others = [name for name in os.listdir(self._path) if name not in ("blobs", "index.json", "oci-layout")]
            if not all(name.startswith(PREFIX) for name in others):
                raise UsageError(
                    f"{printable(self._path)} is no OCI layout, and not empty: name another directory, or an empty one"
                )
            self._index()
            return
        what = f"oci-layout of {printable(self._path)}"
        version = parse(read_file(marker, LAYOUT_FILE_BYTES), what, limit=LAYOUT_FILE_BYTES).get("imageLayoutVersion")
        if not isinstance(version, str) or version.split(".")[0] != "1":
            raise UnsupportedError(f"{what} has a layout version that isn't 1.0.0")
        self._index()

    def _index(self) -> dict[str, object]:
        """``index.json`` as it is, unknown fields and all; an empty one where there is none."""
        path = os.path.join(self._path, "index.json")
        what = f"index.json of {printable(self._path)}"
        try:
            data = read_file(path, CONFIG_BYTES)
        except FileNotFoundError:
            return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
        document = parse(data, what, limit=CONFIG_BYTES)
        manifests = document.get("manifests")
        if not isinstance(manifests, list) or not all(isinstance(entry, dict) for entry in manifests):
            raise MalformedError(f"{what} has no list of manifests")
        return document

    def _close(self) -> None:
        try:
            if not self._published and self._made and self._alone():
                self._unmake()
        finally:
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)

    def _alone(self) -> bool:
        if self._lock < 0:
            return True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unmake(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(OSError):  # a directory that somebody has put something into
                (os.rmdir if os.path.isdir(path) else os.unlink)(path)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold an exclusive lock of a directory."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _replaced(other: dict[str, object], entry: Descriptor, tag: str | None) -> bool:
    """Whether an entry of the index makes way: the tag's, or without a tag the same image's that has none."""
    annotations = other.get("annotations")
    name = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    if tag is not None:
        return bool(name == tag)
    return name is None and other.get("digest") == str(entry.digest)

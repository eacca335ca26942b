"""A target that is a repository of a registry.

A blob is written to a file without a name first: its digest is known when all of it is there, and an upload that breaks
off is taken up again. What the repository has already is not sent. The manifest comes last, under its tag.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from types import TracebackType
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, os_errors
from layerstore.export.target import check_blob
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.reference import DEFAULT_TAG, DockerReference
from layerstore.registry.address import RegistryAddress
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import RegistryClient
from layerstore.registry.manifests import Manifests
from layerstore.registry.uploads import Uploads
from layerstore.store.protocol import Upload

if TYPE_CHECKING:
    from typing_extensions import Buffer


class RegistryTarget:
    """The repository and tag of a reference. After a failure the tag is as it was; blobs that were sent stay there."""

    def __init__(self, reference: DockerReference, *, docker_config: str | None = None) -> None:
        self._tag = reference.tag or DEFAULT_TAG
        self._client = RegistryClient(RegistryAddress.of(reference), docker_config=docker_config)
        self._blobs = Blobs(self._client)
        self._uploads = Uploads(self._client, self._blobs)

    @property
    def scratch(self) -> str:
        return tempfile.gettempdir()

    def upload(self) -> Upload:
        return _SpooledBlob(self.scratch, self._blobs, self._uploads)

    def publish(self, manifest: bytes, entry: Descriptor) -> None:
        Manifests(self._client).put(self._tag, manifest, entry.media_type)

    def __enter__(self) -> RegistryTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


class _SpooledBlob:
    def __init__(self, scratch: str, blobs: Blobs, uploads: Uploads) -> None:
        self._blobs = blobs
        self._uploads = uploads
        self._hasher = hashlib.sha256()
        self._size = 0
        with os_errors("write a temporary file"):
            self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115 - __exit__ closes it

    @property
    def size(self) -> int:
        return self._size

    def digest(self) -> Digest:
        return Digest("sha256", self._hasher.hexdigest())

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        self._hasher.update(view)
        self._size += view.nbytes
        with os_errors("write a temporary file"):
            while view:
                view = view[self._file.write(view) :]

    def commit(self, digest: Digest, size: int) -> None:
        check_blob(self, digest, size)
        if not self._is_there(digest, size):
            self._uploads.send(digest, size, self._read)

    def __enter__(self) -> _SpooledBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _is_there(self, digest: Digest, size: int) -> bool:
        try:
            return self._blobs.size(digest) == size
        except NotFoundError:
            return False

    def _read(self, offset: int, length: int) -> bytes:
        data = b""
        with os_errors("read a temporary file"):
            while len(data) < length:
                part = os.pread(self._file.fileno(), length - len(data), offset + len(data))
                if not part:
                    raise CorruptError("a temporary file has become shorter while it was read")
                data += part
        return data

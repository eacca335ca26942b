"""A target that is a repository of a registry.

A blob is written to a file without a name first: its digest is known when all of it is there, and an upload that breaks
off is taken up again. What the repository has already is not sent. The manifest comes last, under its tag.
"""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import BinaryIO

from layerstore.digest import Digest
from layerstore.errors import NotFoundError
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.reference import DEFAULT_TAG, DockerReference
from layerstore.registry.address import RegistryAddress
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import RegistryClient
from layerstore.registry.manifests import Manifests
from layerstore.registry.uploads import Uploads
from layerstore.store.objectblob import ObjectUpload, spooled
from layerstore.store.protocol import Upload


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
        return ObjectUpload(self, "sha256")

    @property
    def spool(self) -> str:
        """As uploads ask for it."""
        return self.scratch

    def arrive(self, digest: Digest, file: BinaryIO, size: int) -> None:
        """The end of an upload, whose bytes have been checked."""
        if not self._is_there(digest, size):
            self._uploads.send(digest, size, spooled(file, self.spool))

    def _is_there(self, digest: Digest, size: int) -> bool:
        try:
            return self._blobs.size(digest) == size
        except NotFoundError:
            return False

    def publish(self, manifest: bytes, entry: Descriptor) -> None:
        Manifests(self._client).put(self._tag, manifest, entry.media_type)

    def __enter__(self) -> RegistryTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

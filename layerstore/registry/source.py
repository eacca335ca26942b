"""An image in a registry as a source of conversions.

Layers are downloaded when the first of them is asked for, several at a time and in the image's order, each to a file of
its own in scratch space. Who wants a layer waits until it is there, verified, while the others go on.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError, NotFoundError, UnavailableError, os_errors, printable
from layerstore.oci import mediatype
from layerstore.oci.blob import verify
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import CONFIG_BYTES, MANIFEST_BYTES
from layerstore.oci.files import FileRange
from layerstore.oci.manifest import Index, Manifest, parse_document
from layerstore.oci.platform import Platform
from layerstore.oci.reference import DockerReference
from layerstore.oci.selection import platform_of, require_manifest, select
from layerstore.oci.source import SourceImage, Warn, assemble
from layerstore.registry.address import RegistryAddress
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import Patience, RegistryClient
from layerstore.registry.manifests import Manifests

DOWNLOADS = 4
"""Layers at a time."""


class RegistrySource:
    """One image in a registry, or what an index there offers. A context manager: scratch files go with it."""

    def __init__(
        self,
        reference: DockerReference,
        *,
        scratch: str,
        warn: Warn,
        docker_config: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Asks nothing yet.

        Args:
            reference: of the image.
            scratch: an existing directory for layers.
            warn: told of oddities.
            docker_config: path of docker's ``config.json``; None for where docker has it.
            patience: with which the registry is asked.
        """
        self._reference = reference
        self._name = f"docker://{reference}"
        self._scratch = scratch
        self._warn = warn
        self._client = RegistryClient(RegistryAddress.of(reference), docker_config=docker_config, patience=patience)
        self._manifests = Manifests(self._client)
        self._blobs = Blobs(self._client)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._downloads: dict[Digest, Future[FileRange]] = {}
        self._layers: Sequence[Descriptor] = ()
        self._documents: dict[Digest, bytes] = {}

    def image(self, platform: Platform | None = None) -> SourceImage:
        """As of every source."""
        stored = self._manifests.get(self._reference.digest or self._reference.identifier)
        descriptor = stored.descriptor
        self._documents[descriptor.digest] = stored.data
        document: Manifest | Index = parse_document(stored.data, descriptor.media_type, self._name)
        if isinstance(document, Index):
            descriptor = select(document, platform, self.read, self._name)
            document = parse_document(self.read(descriptor), descriptor.media_type, self._what(descriptor))
        manifest = require_manifest(document, f"manifest {descriptor.digest}")
        manifest.require_image(self._name)
        config = self.read(manifest.config, limit=CONFIG_BYTES)
        self._layers = manifest.layers
        return assemble(
            name=self._name,
            descriptor=descriptor,
            manifest=manifest,
            config=ImageConfig.parse(config, f"config of {self._name}", warn=self._warn),
            indexed=platform_of(descriptor),
            wanted=platform,
            locate=self.locate,
            warn=self._warn,
        )

    def read(self, descriptor: Descriptor, *, limit: int = MANIFEST_BYTES) -> bytes:
        """A verified document, each read once: the descriptor's own copy, a manifest, or a blob.

        Raises:
            NotFoundError: the registry doesn't have it.
            CorruptError: it is something else.
        """
        what = self._what(descriptor)
        if descriptor.size > limit:
            raise LimitError(f"{what} has {descriptor.size} bytes, more than the limit of {limit}")
        data = descriptor.data or self._documents.get(descriptor.digest)
        if data is None:
            if mediatype.normal(descriptor.media_type) in mediatype.INDEXES | mediatype.MANIFESTS:
                data = self._manifests.get(descriptor.digest, limit=descriptor.size).data
            else:
                size, data = self._blobs.start(self._blobs.place(descriptor.digest), max(1, descriptor.size))
                if size != descriptor.size:
                    raise _wrong_size(what, descriptor, size)
            verify(data, descriptor, what)
            self._documents[descriptor.digest] = data
        if len(data) != descriptor.size:
            raise _wrong_size(what, descriptor, len(data))
        return data

    def locate(self, descriptor: Descriptor, what: str) -> FileRange:
        """A layer's file, once it has been downloaded and verified."""
        with self._lock:
            future = self._downloads.get(descriptor.digest) or self._start(descriptor)
        try:
            return future.result()
        except NotFoundError as error:
            raise NotFoundError(f"{what} is missing: {error}") from error

    def _start(self, wanted: Descriptor) -> Future[FileRange]:
        """Begin to download the layer, and those after it. ``_lock`` is held."""
        if self.is_closed:
            raise UnavailableError(f"{self._name} was closed while its layers were read")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="layer-download")
        layers = [each.digest for each in self._layers]
        following = self._layers[layers.index(wanted.digest) :] if wanted.digest in layers else ()
        for each in (wanted, *following):
            if each.digest not in self._downloads:
                self._downloads[each.digest] = self._pool.submit(self._download, each)
        return self._downloads[wanted.digest]

    def _download(self, descriptor: Descriptor) -> FileRange:
        what = self._what(descriptor)
        with os_errors(f"make a file for {what} in {printable(self._scratch)}"):
            target, path = tempfile.mkstemp(prefix="layer-", dir=self._scratch)
        try:
            self._blobs.download(descriptor, target, what, self._stop)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(target)
        return FileRange(path, 0, descriptor.size)

    def _what(self, descriptor: Descriptor) -> str:
        return f"{descriptor.digest} in {self._client.address}"

    @property
    def is_closed(self) -> bool:
        """Or about to be: downloads are given up."""
        return self._stop.is_set()

    def close(self) -> None:
        self._stop.set()
        with self._lock:  # whoever begins a download has begun it, and nobody begins another
            pool = self._pool
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        for future in self._downloads.values():
            if not future.cancelled() and future.exception() is None:
                try:
                    os.unlink(future.result().path)
                except OSError:
                    pass  # scratch space is its owner's to clear
        self._downloads.clear()
        self._client.close()

    def __enter__(self) -> RegistrySource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _wrong_size(what: str, descriptor: Descriptor, actual: int) -> CorruptError:
    return CorruptError(f"{what} has the wrong size", expected=f"{descriptor.size} bytes", actual=f"{actual}")

"""What ``verify`` looks into once every blob has been compared with its name: packs and metadata images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from layerstore.attachment import Artifact
from layerstore.errors import CorruptError, ImgtoolError, NoSpaceError, UnavailableError
from layerstore.image import Image, Layer, parse_stored, read_document
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.opened import open_layer
from layerstore.pack.chunks import MAX_CHUNK_SIZE, chunk_key
from layerstore.pack.format import BLOCK_SIZE, ChunkRecord, unpack_chunk_list
from layerstore.pack.reader import FrameIndex, read_span
from layerstore.pack.stored import StoredPack
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store
from layerstore.store.verification import Fault, Finding

ArtifactCheck = Callable[[Store, str, Artifact], None]
"""Given the store, the name of the reference, and what it stands for; raises what is wrong with it."""


class ContentCheck:
    """Remembers what it has seen, so that what images share is checked once.

    Args:
        progress: told the bytes read.
        artifacts: by their type, who knows what is in them; of others only the blobs are checked.
    """

    def __init__(self, progress: Progress = SILENT, artifacts: Mapping[str, ArtifactCheck] | None = None) -> None:
        self._progress = progress
        self._artifacts = artifacts or {}
        self._seen: set[StoredPack | Layer] = set()

    def __call__(self, store: Store, name: str, target: Descriptor) -> Iterator[Finding]:
        """Everything that is wrong with an image whose blobs are all there and whole.

        Raises:
            NoSpaceError: there is no room for a temporary copy of a metadata image.
        """
        try:
            image = parse_stored(read_document(store, target, f"manifest of {name!r}"))
            if isinstance(image, Artifact):
                check_artifact = self._artifacts.get(image.artifact_type)
                if check_artifact is not None:
                    check_artifact(store, name, image)
                return
        except ImgtoolError as error:
            yield Finding(Fault.CONTENT, str(error), target.digest, name)
            return
        try:
            _check_config(store, image, name)
        except ImgtoolError as error:
            yield Finding(Fault.CONTENT, str(error), image.config.digest, name)
        for layer in image.layers:
            parts: list[tuple[StoredPack | Layer, Callable[[], None]]] = [
                *((pack, partial(self._check_pack, store, pack)) for pack in layer.packs),
                (layer, partial(_check_layer, store, layer)),
            ]
            for part, check in parts:
                # By all that the manifest says of it: another one may say something else of the same blob.
                if part in self._seen:
                    continue
                self._seen.add(part)
                try:
                    check()
                except NoSpaceError:
                    raise  # for the temporary file: nothing is wrong with the store
                except UnavailableError as error:
                    yield Finding(Fault.UNREADABLE, str(error), part.blob, name)
                except ImgtoolError as error:
                    yield Finding(Fault.CONTENT, str(error), part.blob, name)

    def _check_pack(self, store: Store, pack: StoredPack) -> None:
        """Every frame by its sha256, every chunk by its own, and all of it by the pack's digest."""
        raw_hash = hashlib.sha256()
        with store.open(pack.blob) as blob:
            index = FrameIndex.read(pack, blob)
            records, _ = unpack_chunk_list(read_span(blob, pack.chunk_list, f"chunk list of pack {pack.digest}"))
            chunks = _chunks(pack, records)
            self._progress.start("verify packs", pack.blob_size)
            buffer = bytearray()
            key, blocks = next(chunks, (b"", 0))
            for number in range(len(index)):
                start, length = index.blob_range(range(number, number + 1))
                raw = index.decode(number, blob.read_at(start, length))
                raw_hash.update(raw)
                buffer += raw
                while blocks and len(buffer) >= blocks * BLOCK_SIZE:
                    if chunk_key(memoryview(buffer)[: blocks * BLOCK_SIZE]) != key:
                        raise CorruptError(f"chunk {key.hex()} of pack {pack.digest} is another than its list says")
                    del buffer[: blocks * BLOCK_SIZE]
                    key, blocks = next(chunks, (b"", 0))
                self._progress.advance(length)
        if buffer or blocks:
            raise CorruptError(f"the chunk list of pack {pack.digest} does not cover the pack")
        pack.digest.check(raw_hash, f"raw bytes of pack {pack.digest}")


def _chunks(pack: StoredPack, records: memoryview) -> Iterator[tuple[bytes, int]]:
    """The records of a chunk list; a chunk is in memory while it is checked, so its length is bounded."""
    for key, blocks in ChunkRecord.STRUCT.iter_unpack(records):
        if not 0 < blocks <= MAX_CHUNK_SIZE // BLOCK_SIZE:
            raise CorruptError(f"the chunk list of pack {pack.digest} has a chunk of {blocks} blocks")
        yield key, blocks


def _check_config(store: Store, image: Image, name: str) -> None:
    what = f"config of {name!r}"
    config = ImageConfig.parse(read_document(store, image.config, what), what)
    if list(config.diff_ids) != [digest for layer in image.layers for digest in layer.raw_digests]:
        raise CorruptError(f"{what}, {image.config.digest}, has other diff IDs than its packs and metadata images")


def _check_layer(store: Store, layer: Layer) -> None:
    with open_layer(store, layer):
        pass  # opening checks the digest, the structure, and the device table against the manifest

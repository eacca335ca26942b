"""Benches for stores: what the suites need besides the store itself, one per implementation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from layerstore.digest import Digest
from layerstore.errors import NotFoundError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.clock import FileClock
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import PruneStore, Store, WriteStore
from layerstore.store.reach import Documents, present_target, walk
from layerstore.store.reading import stream_blob

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DAY = 86_400


class SteppedClock:
    """A clock that tests move. It never goes back."""

    def __init__(self, base: Callable[[], int]) -> None:
        self._base = base
        self._offset = 0

    def __call__(self) -> int:
        return self._base() + self._offset

    def advance(self, seconds: float) -> None:
        self._offset += int(seconds * 1_000_000_000)


class Bench(Protocol):
    """A store on a bench."""

    @property
    def store(self) -> PruneStore: ...

    @property
    def clock(self) -> SteppedClock: ...

    def damage(self, digest: Digest, data: bytes) -> None:
        """Put other bytes under the name of a blob."""
        ...

    def stamp(self, digest: Digest) -> None:
        """Date a blob just written by the stepped clock, which a file system doesn't know."""
        ...

    def close(self) -> None: ...


class MemoryBench:
    def __init__(self, lock_seconds: float = 60.0) -> None:
        self.clock = SteppedClock(time.time_ns)
        self.store = MemoryStore(clock=self.clock, lock_seconds=lock_seconds)

    def damage(self, digest: Digest, data: bytes) -> None:
        self.store.content[digest] = (data, self.clock())

    def stamp(self, digest: Digest) -> None:
        pass

    def close(self) -> None:
        pass


class DirectoryBench:
    def __init__(self, path: str, lock_seconds: float = 60.0) -> None:
        self.clock = SteppedClock(FileClock(os.path.join(path, "clock")))
        self.store = DirectoryStore.create(path, clock=self.clock, lock_seconds=lock_seconds)

    def damage(self, digest: Digest, data: bytes) -> None:
        with open(self.path("blobs", digest.algorithm, digest.hex), "wb") as file:
            file.write(data)

    def stamp(self, digest: Digest) -> None:
        now = self.clock()
        os.utime(self.path("blobs", digest.algorithm, digest.hex), ns=(now, now))

    def close(self) -> None:
        pass

    def path(self, *names: str) -> str:
        return os.path.join(self.store.root, *names)

    def leftovers(self) -> list[str]:
        """Temporary names anywhere in the store."""
        return sorted(
            os.path.join(directory, name)
            for directory, directories, files in os.walk(self.store.root)
            for name in (*directories, *files)
            if name.startswith(".tmp-")
        )


@dataclass(frozen=True)
class Sample:
    """An image of a few bytes: its target, and every blob that it reaches."""

    target: Descriptor
    blobs: dict[Digest, bytes] = field(repr=False)


def descriptor(data: bytes, media_type: str = LAYER) -> Descriptor:
    return Descriptor(media_type, Digest.of(data), len(data))


def document(fields: Mapping[str, object], below: Iterable[bytes | Sample], media_type: str = MANIFEST) -> Sample:
    """A manifest or index with these fields, and what it reaches."""
    data = json.dumps({"schemaVersion": 2, "mediaType": media_type, **fields}).encode()
    blobs: dict[Digest, bytes] = {}
    for each in below:
        blobs.update(each.blobs if isinstance(each, Sample) else {Digest.of(each): each})
    blobs[Digest.of(data)] = data
    return Sample(descriptor(data, media_type), blobs)


def image(*layers: bytes, config: bytes = b"{}") -> Sample:
    fields: dict[str, object] = {
        "config": descriptor(config, CONFIG).to_json(),
        "layers": [descriptor(layer).to_json() for layer in layers],
    }
    return document(fields, (config, *layers))


def index(*images: Sample) -> Sample:
    return document({"manifests": [each.target.to_json() for each in images]}, images, INDEX)


def packed(raw: bytes, data: bytes) -> Sample:
    """An image with one pack, whose raw form isn't among its blobs."""
    notes = {
        "org.erofs.role": "device",
        "org.erofs.uncompressed-digest": str(Digest.of(raw)),
        "org.imgtool.uncompressed-size": str(len(raw)),
    }
    return document({"layers": [{**descriptor(data).to_json(), "annotations": notes}]}, [data])


def put(store: WriteStore, data: bytes) -> Digest:
    digest = Digest.of(data)
    with store.upload() as upload:
        upload.write(data)
        upload.commit(digest, len(data))
    return digest


def put_missing(store: WriteStore, sample: Sample) -> None:
    for digest, data in sample.blobs.items():
        try:
            store.stat(digest)
        except NotFoundError:
            put(store, data)


def publish(store: WriteStore, name: str, sample: Sample) -> None:
    """As publishers do: pin, look, upload, refer."""
    with store.lease() as lease:
        lease.pin(sample.blobs)
        put_missing(store, sample)
        expected = present_target(store, name)
        store.set_reference(name, sample.target, expected=expected, lease=lease, reaches=sample.blobs)


def unpublish(store: WriteStore, name: str) -> None:
    store.delete_reference(name, expected=store.resolve(name))


def all_blobs(store: PruneStore) -> set[Digest]:
    return {blob.digest for blob in store.blobs()}


def assert_sound(store: Store) -> set[Digest]:
    """Every reference resolves, and everything it reaches is there and whole; all that is reached."""
    reached: set[Digest] = set()
    for reference in store.references():
        for each in walk(Documents(store), reference.target, reference.name):
            for _ in stream_blob(store, each.digest, each.size):
                pass
            reached.add(each.digest)
    return reached

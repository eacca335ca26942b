"""Stores that fail on demand and count, benches of the wrappers, and families of images."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from layerstore.attachment import Artifact, attachment_name
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, UnavailableError
from layerstore.image import CONFIG_MEDIA_TYPE, Image, Layer, Role
from layerstore.oci.descriptor import Descriptor
from layerstore.pack.stored import Span, StoredPack
from layerstore.store.caching import CachingStore
from layerstore.store.composition import mirrored, steady
from layerstore.store.failover import FailoverStore
from layerstore.store.late import LateStore
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import Blob, PruneStore, Reference, Store, WriteStore
from layerstore.store.retrying import RetryingStore
from layerstore.store.singleflight import SingleFlightStore
from layerstore.store.verified import VerifiedStore
from support.stores import MemoryBench, Sample, publish

Raised = ImgtoolError | type[ImgtoolError]


class Moody:
    """A store that fails when told, and counts what it is asked: by method, reads of blobs as ``read``.

    ``fail(UnavailableError, "read", times=2)`` makes the next two reads fail; without ``times`` all of them.
    """

    def __init__(self, store: Store, location: str = "moody:") -> None:
        self._store = store
        self.location = location
        self.asked: Counter[str] = Counter()
        self.ranges: list[tuple[int, int]] = []
        self.before: Callable[[str], None] = lambda method: None
        self.opened = self.closed = 0
        self._faults: dict[str, list[Any]] = {}
        self._mutex = threading.Lock()

    def fail(self, error: Raised, *methods: str, times: int | None = None, after: int = 0) -> None:
        for method in methods or ("stat", "open", "read", "resolve", "names", "references"):
            self._faults[method] = [error, times, after]

    def mend(self) -> None:
        self._faults.clear()

    def stat(self, digest: Digest) -> int:
        self._ask("stat")
        return self._store.stat(digest)

    def open(self, digest: Digest) -> Blob:
        self._ask("open")
        blob = self._store.open(digest)
        self.opened += 1
        return _MoodyBlob(self, blob)

    def names(self) -> Iterator[str]:
        self._ask("names")
        return self._store.names()

    def resolve(self, name: str) -> Descriptor:
        self._ask("resolve")
        return self._store.resolve(name)

    def references(self) -> Iterator[Reference]:
        self._ask("references")
        return self._store.references()

    def _ask(self, method: str) -> None:
        with self._mutex:
            self.asked[method] += 1
            fault = self._faults.get(method)
            if fault is not None:
                error, times, after = fault
                if after:
                    fault[2] -= 1
                elif times is None or times:
                    fault[1] = None if times is None else times - 1
                    raise error(f"{method} at {self.location}: told to") if isinstance(error, type) else error
        self.before(method)


class _MoodyBlob:
    def __init__(self, store: Moody, blob: Blob) -> None:
        self._store = store
        self._blob = blob
        self._open = True

    @property
    def size(self) -> int:
        return self._blob.size

    def read_at(self, offset: int, length: int) -> bytes:
        assert self._open, "read of a closed blob"
        self._store.ranges.append((offset, length))
        self._store._ask("read")
        return self._blob.read_at(offset, length)

    def close(self) -> None:
        assert self._open, "closed twice"
        self._open = False
        self._store.closed += 1
        self._blob.close()

    def __enter__(self) -> _MoodyBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Pauses:
    """Waits for nothing, and remembers for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return False


class _Wrapped:
    """Written as it is, read through wrappers."""

    def __init__(self, store: PruneStore, reader: Store) -> None:
        self._store = store
        self.reader = reader
        self.location = reader.location
        self.stat = reader.stat
        self.open = reader.open
        self.names = reader.names
        self.resolve = reader.resolve
        self.references = reader.references

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def _flaky(store: Store) -> Store:
    """Every third question fails once."""
    moody = Moody(store)

    def before(method: str) -> None:
        if sum(moody.asked.values()) % 3 == 0:
            raise UnavailableError("every third")

    moody.before = before
    return RetryingStore(moody, wait=Pauses())


WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "retrying": _flaky,
    "verified": VerifiedStore,
    "caching": CachingStore,
    "single-flight": SingleFlightStore,
    "late": lambda store: LateStore("late:", lambda location: store),
    "mirrors": lambda store: FailoverStore([MemoryStore(), store, MemoryStore()]),
    "composed": lambda store: steady(mirrored(["a", "b"], {"a": MemoryStore(), "b": store}.__getitem__)),
}


class WrappedBench:
    """A store with a wrapper around its reading part, on a bench."""

    def __init__(self, wrapper: str, lock_seconds: float = 60.0) -> None:
        below = MemoryBench(lock_seconds)
        self.clock = below.clock
        self.damage = below.damage
        self.stamp = below.stamp
        self.store = cast(PruneStore, _Wrapped(below.store, WRAPPERS[wrapper](below.store)))

    def close(self) -> None:
        pass


# --- families of images

CONFIG = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'


def member(base: bytes, own: bytes, *, config: bytes = CONFIG) -> Sample:
    """An image as we publish it: a pack that its family shares, one of its own, and a metadata image of it."""
    metadata = b"metadata: " + own[:64]
    image = Image((layer_of(base, own),), Descriptor(CONFIG_MEDIA_TYPE, Digest.of(config), len(config)))
    blobs = {Digest.of(data): data for data in (base, own, metadata, config, image.manifest())}
    return Sample(image.descriptor(), blobs)


def layer_of(base: bytes, own: bytes) -> Layer:
    """The layer of a member."""
    metadata = b"metadata: " + own[:64]
    raw = Digest.of(b"raw " + metadata)
    return Layer(Role.BASE, raw, 4096, Digest.of(metadata), len(metadata), (_pack(base), _pack(own)))


def _pack(data: bytes) -> StoredPack:
    size = len(data)
    spans = Span(size - 32, 8, Digest.of(b"frames")), Span(size - 8, 8, Digest.of(b"chunks"))
    return StoredPack(Digest.of(b"raw " + data), 4096, Digest.of(data), size, *spans)


def family(count: int, *, base_bytes: int = 50_000, own_bytes: int = 1_000, seed: int = 0) -> dict[str, Sample]:
    """Images over one base, by name."""
    chance = random.Random(seed)
    base = chance.randbytes(base_bytes)
    return {f"team/repo{number:03}": member(base, chance.randbytes(own_bytes)) for number in range(count)}


def publish_plan(store: WriteStore, layer: Digest, content: bytes = b"a plan") -> Sample:
    """A plan, as far as stores know what one is."""
    described = Descriptor("application/vnd.imgtool.plan.v1", Digest.of(content), len(content))
    artifact = Artifact(described.media_type, layer, (described,))
    data = artifact.manifest()
    sample = Sample(artifact.descriptor(), {Digest.of(each): each for each in (content, b"{}", data)})
    publish(store, attachment_name(layer), sample)
    return sample

"""Layers made ready to be mounted: metadata on the node, data fetched or guarded, and kept so while somebody uses them.

A layer is held once for each sandbox that stands on it. The first to come makes it ready and the others wait for that;
with the last, its packs may be evicted again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.image import Layer
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store
from overlay.direct import raw_devices
from overlay.layerkey import join_key, known_key
from overlay.layers import MountableLayer
from overlay.lazy.guards import Guards
from prefetch.fetcher import Fetched, Fetcher
from prefetch.plan import frames_used, plan_eager

DIRECT = "direct"
"""Variant of mounts whose devices are raw packs of a store."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the data of a sandbox are reached.

    Attributes:
        mode: eager, lazy or direct.
        backend: in words for people: fanotify, fuse, files or raw packs.
        why: one line: why it is this one.
        guards: of a lazy one.
    """

    mode: str
    backend: str
    why: str
    guards: Guards | None = None

    @property
    def variant(self) -> str:
        if self.mode == DIRECT:
            return DIRECT
        return "" if self.guards is None else self.guards.backend.variant


@dataclass
class _Hold:
    """One layer, mounted in one way.

    ``name`` is that of no other hold, not of a former one of the same layer either: what one that ends releases must
    not be what its successor has just taken.
    """

    name: str
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    mountable: MountableLayer | None = None
    packs: tuple[CachedPack, ...] = ()
    guards: Guards | None = None
    whole: bool = False
    """All that the layer refers to is there, and durable."""


class ReadyLayers:
    """The layers that sandboxes of this node stand on. Any thread may call."""

    def __init__(self, cache: Cache, fetcher: Fetcher) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._holds: dict[str, _Hold] = {}
        self._numbers = count(1)

    def take(
        self, layer: Layer, store: Store, way: Way, *, name: str = "IMAGE", progress: Progress = SILENT
    ) -> tuple[MountableLayer, Fetched]:
        """Make the layer ready in this way, and hold it; what had to be fetched for that.

        ``name`` is that of the image, for what an error advises.

        Raises:
            And what fetching raises; the layer isn't held then.
        """
        key = join_key(layer.metadata.hex, way.variant)
        hold = self._enter(key)
        try:
            with hold.lock:
                fetched = self._make_ready(hold, layer, store, way, name, progress)
                assert hold.mountable is not None
                return hold.mountable, fetched
        except BaseException:
            self.give_back(key)
            raise

    def retake(self, key: str, guards: Guards | None) -> MountableLayer:
        """Hold a layer that a sandbox stands on since before this process began, from what the cache has of it.

        Raises:
            NotFoundError, CorruptError: the cache lacks its metadata image or a pack.
        """
        hold = self._enter(key)
        try:
            with hold.lock:
                if hold.mountable is None:
                    digest, variant = known_key(key)
                    packs = self._known_packs(digest) if variant != DIRECT else ()
                    self._cache.use(hold.name, [digest, *(pack.hex for pack in packs)])
                    devices = tuple(pack.data_path for pack in packs)
                    if guards is not None:
                        devices = tuple(guards.device(pack, hold.name) for pack in packs)
                    hold.mountable = MountableLayer(digest, self._cache.metadata.path_of(digest), devices, variant)
                    hold.packs, hold.guards = packs, guards
                return hold.mountable
        except BaseException:
            self.give_back(key)
            raise

    def missing(self, digest: str) -> list[str]:
        """The packs, by hex, of which the cache lacks something that the layer refers to."""
        found = []
        for use in self._cache.metadata.uses_of(digest):
            pack = self._cache.known(use.pack)
            if pack.lacks(frames_used(use, pack.index)):
                found.append(pack.hex)
        return found

    def give_back(self, key: str) -> None:
        """One user less. The layer's mount has to be gone with the last one, or on its way out."""
        with self._lock:
            hold = self._holds[key]
            hold.users -= 1
            if hold.users:
                return
        with hold.lock:
            with self._lock:
                if hold.users:
                    return  # somebody came meanwhile
                del self._holds[key]
            if hold.guards is not None:
                hold.guards.release(hold.packs, hold.name)
            self._cache.release(hold.name)

    def needs_answers(self, keys: Sequence[str]) -> bool:
        """Whether one of these layers is mounted over data that may be missing."""
        with self._lock:
            holds = [self._holds[key] for key in keys if key in self._holds]
        return any(hold.guards is not None and not all(pack.complete for pack in hold.packs) for hold in holds)

    def users(self) -> dict[str, int]:
        """Of each layer that is held, by key."""
        with self._lock:
            return {key: hold.users for key, hold in self._holds.items()}

    def _enter(self, key: str) -> _Hold:
        with self._lock:
            hold = self._holds.get(key)
            if hold is None:
                hold = self._holds[key] = _Hold(f"{key} {next(self._numbers)}")
            hold.users += 1
            return hold

    def _make_ready(self, hold: _Hold, layer: Layer, store: Store, way: Way, name: str, progress: Progress) -> Fetched:
        if hold.whole or (hold.guards is not None and way.mode == "lazy"):
            return Fetched()
        self._cache.use(hold.name, [layer.metadata.hex, *(pack.digest.hex for pack in layer.packs)])
        fetched = Fetched()
        if not self._cache.metadata.has(layer):
            fetched += Fetched(1, layer.blob_size, layer.metadata_size)
        image = self._cache.metadata.ensure(layer, store)
        if way.mode == DIRECT:
            hold.mountable = MountableLayer(layer.metadata.hex, image, raw_devices(layer, store, name=name), DIRECT)
            hold.whole = True
            return fetched
        hold.packs = tuple(self._cache.pack(pack, store) for pack in layer.packs)
        if way.guards is not None:
            devices = tuple(way.guards.device(pack, hold.name) for pack in hold.packs)
            hold.guards = way.guards
        else:
            devices = tuple(pack.data_path for pack in hold.packs)
            fetched += self._fetcher.run(plan_eager([layer], self._cache, store), progress=progress)
            hold.whole = True
        if hold.mountable is None:
            hold.mountable = MountableLayer(layer.metadata.hex, image, devices, way.variant)
        return fetched

    def _known_packs(self, digest: str) -> tuple[CachedPack, ...]:
        return tuple(self._cache.known(hex) for hex in self._cache.metadata.packs_of(digest))

"""Layers made ready to be mounted: metadata on the node, data fetched or guarded, and kept so while somebody uses them.

A layer is held once for each sandbox that stands on it. The first to come makes it ready and the others wait for that,
but not for data: who fetches everything does so on his own. With the last, its packs may be evicted again.

Keys here are plain ones (:mod:`overlay.layerkey`): a mount whose reads are recorded needs what one without that needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.errors import UnavailableError
from layerstore.image import Layer
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store
from overlay.direct import raw_devices
from overlay.layerkey import join_key, known_key, plain_key, recorder_in_path
from overlay.layers import MountableLayer
from overlay.lazy.guards import Guards
from prefetch.fetcher import Fetched, Fetcher
from prefetch.plan import frames_used, plan_eager

DIRECT = "direct"
"""Variant of mounts whose devices are raw packs of a store."""
_OPENED_AT_ONCE = 8
"""Packs of one layer; a layer has up to 33."""


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

    Attributes:
        name: of no other hold, not of a former one of the same layer either: what one that ends releases must not be
            what its successor has just taken.
        users: how many; guarded by the lock of all holds.
        lock: around making it ready and letting it go, and everything below.
        mountable: once it is ready.
        packs: of which it is made.
        guards: that watch its packs; None: nobody does, and it is whole or not ready.
        whole: all that the layer refers to is there, and durable.
        stores: locations that are known as origins of its packs.
    """

    name: str
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    mountable: MountableLayer | None = None
    packs: tuple[CachedPack, ...] = ()
    guards: Guards | None = None
    whole: bool = False
    stores: set[str] = field(default_factory=set)


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
            UnavailableError: its packs can't be guarded.
            And what fetching raises; the layer isn't held then.
        """
        with self._entered(join_key(layer.metadata.hex, way.variant)) as (key, hold):
            with hold.lock:
                fetched = self._prepare(hold, key, layer, store, way, name)
            if way.mode == "eager" and not hold.whole:
                fetched += self._fetcher.run(plan_eager([layer], self._cache, store), progress=progress)
                with hold.lock:
                    hold.whole = True
                    if hold.mountable is None:
                        hold.mountable = self._from_files(key, hold.packs)
            assert hold.mountable is not None
            return hold.mountable, fetched

    def _prepare(self, hold: _Hold, key: str, layer: Layer, store: Store, way: Way, name: str) -> Fetched:
        """All that can be done before the data of an eager one are there; ``hold.lock`` is held."""
        if hold.whole or (hold.mountable is not None and way.guards is not None):
            if store.location not in hold.stores and hold.packs:  # it may have what another store has lost
                for pack in layer.packs:
                    self._cache.pack(pack, store)
                hold.stores.add(store.location)
            return Fetched()
        self._cache.use(hold.name, [layer.metadata.hex, *(pack.digest.hex for pack in layer.packs)])
        fetched = Fetched()
        if not self._cache.metadata.has(layer):
            fetched += Fetched(1, layer.blob_size, layer.metadata_size)
        if way.mode == DIRECT:
            image = self._cache.metadata.ensure(layer, store)
            hold.mountable = MountableLayer(layer.metadata.hex, image, raw_devices(layer, store, name=name), DIRECT)
            hold.whole = True
            return fetched
        hold.packs = self._opened(layer, store, afresh=bool(fetched.requests))
        hold.stores.add(store.location)
        if way.guards is not None:
            hold.mountable = self._guarded(hold, key, way.guards)
        return fetched

    def _opened(self, layer: Layer, store: Store, *, afresh: bool) -> tuple[CachedPack, ...]:
        """The packs of a layer whose metadata image is on the node then.

        ``afresh``: it isn't yet. Then its packs are new here, too, for the most part; each costs turns of the store, so
        they are asked for at the same time.
        """
        if not afresh:
            return tuple(self._cache.pack(pack, store) for pack in layer.packs)
        with ThreadPoolExecutor(1 + min(len(layer.packs), _OPENED_AT_ONCE), "open-layer") as pool:
            metadata = pool.submit(self._cache.metadata.ensure, layer, store)
            packs = [pool.submit(self._cache.pack, pack, store) for pack in layer.packs]
            metadata.result()
            return tuple(each.result() for each in packs)

    def retake(self, key: str, guards: Guards | None) -> MountableLayer:
        """Hold a layer that a sandbox stands on since before this process began, from what the cache has of it.

        Args:
            key: of its mount.
            guards: that watch its packs; None: what it refers to has to be there.

        Raises:
            NotFoundError, CorruptError: the cache lacks its metadata image or a pack.
            UnavailableError: its packs can't be guarded, or nobody would and data are missing.
        """
        digest, variant = known_key(key)
        with self._entered(key) as (_, hold), hold.lock:
            if hold.mountable is None:
                names = [] if variant == DIRECT else self._cache.metadata.packs_of(digest)
                self._cache.use(hold.name, [digest, *names])
                hold.packs = tuple(self._cache.known(hex) for hex in names)
                if variant == DIRECT:
                    hold.mountable = self._from_files(key, ())
                elif guards is not None:
                    hold.mountable = self._guarded(hold, key, guards)
                else:
                    self._require_whole(digest)
                    hold.mountable, hold.whole = self._from_files(key, hold.packs), True
            return hold.mountable

    def _guarded(self, hold: _Hold, key: str, guards: Guards) -> MountableLayer:
        digest, variant = known_key(key)
        hold.guards = guards  # of some of them, should it fail
        devices = tuple(guards.device(pack, hold.name) for pack in hold.packs)
        if guards.backend.variant != variant:
            raise UnavailableError("the FUSE server ended just now; try again")
        return MountableLayer(digest, self._cache.metadata.path_of(digest), devices, variant)

    def _from_files(self, key: str, packs: Sequence[CachedPack]) -> MountableLayer:
        digest, variant = known_key(key)
        devices = tuple(pack.data_path for pack in packs)
        return MountableLayer(digest, self._cache.metadata.path_of(digest), devices, variant)

    def _require_whole(self, digest: str) -> None:
        """Raises UnavailableError unless all that a layer refers to is there, verified and durable."""
        for use in self._cache.metadata.uses_of(digest):
            pack = self._cache.known(use.pack)
            if not all(pack.verify(number) for number in pack.unready(frames_used(use, pack.index))):
                raise UnavailableError(
                    f"layer sha256:{digest} lacks data, and nothing here can load it lazily any more"
                )
            pack.sync()

    def packs(self, key: str) -> tuple[CachedPack, ...]:
        """Of a layer that is held, in the order of its devices; none where its data are not the cache's."""
        with self._lock:
            return self._holds[key].packs

    def missing(self, digest: str) -> list[str]:
        """The packs, by hex, of which the cache lacks something that the layer refers to."""
        found = []
        for use in self._cache.metadata.uses_of(digest):
            pack = self._cache.known(use.pack)
            if pack.lacks(frames_used(use, pack.index)):
                found.append(pack.hex)
        return found

    def give_back(self, key: str) -> None:
        """One user less. The layer's mount has to be gone with the last one, or on its way out. Never raises."""
        with self._lock:
            hold = self._holds[key]
            hold.users -= 1
            if hold.users:
                return
        with hold.lock:
            with self._lock:
                if hold.users or self._holds.get(key) is not hold:
                    return  # somebody has come meanwhile, or has come and gone
                del self._holds[key]
            try:
                if hold.guards is not None:
                    hold.guards.release(hold.packs, hold.name)
            finally:
                self._cache.release(hold.name)

    def needs_answers(self, mounts: Sequence[str]) -> bool:
        """Whether one of these mounts, by key, may be over data that are missing, or reads through a server."""
        if any(map(recorder_in_path, mounts)):
            return True
        with self._lock:
            holds = [(key, self._holds.get(key)) for key in map(plain_key, mounts)]
        return any(
            hold.guards is not None and hold.guards.needs(hold.packs)
            if hold is not None
            else known_key(key)[1] != DIRECT  # it could not be taken again: nobody knows what it lacks
            for key, hold in holds
        )

    def users(self) -> dict[str, int]:
        """Of each layer that is held, by key."""
        with self._lock:
            return {key: hold.users for key, hold in self._holds.items()}

    @contextmanager
    def _entered(self, key: str) -> Iterator[tuple[str, _Hold]]:
        """One user more, unless the block raises."""
        with self._lock:
            hold = self._holds.get(key)
            if hold is None:
                hold = self._holds[key] = _Hold(f"{key} {next(self._numbers)}")
            hold.users += 1
        try:
            yield key, hold
        except BaseException:
            self.give_back(key)
            raise

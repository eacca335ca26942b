"""The cache of a node: who owns it, what is in it, what has to stay, and what goes when room is needed."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from layerstore.cache.directories import PackDirectories
from layerstore.cache.format import CLEAN_BYTES, Origin, dump_clean, is_hex, parse_clean
from layerstore.cache.frames import FramesFile
from layerstore.cache.metadata import MetadataCache
from layerstore.cache.openers import is_path_open
from layerstore.cache.packs import CachedPack, Trust
from layerstore.cache.pins import Pins
from layerstore.cache.status import CacheStatus
from layerstore.errors import ConflictError, CorruptError, ImgtoolError, NotFoundError, os_errors, printable
from layerstore.pack.reader import FrameIndex
from layerstore.pack.stored import StoredPack
from layerstore.staging import make_directory, make_file, read_file, reclaim_files, sync_directory, write_file
from layerstore.store.protocol import Store

HELD = "a process before this one"
"""The user of the packs that were handed over, until somebody says who uses them and releases it."""


@dataclass(frozen=True, slots=True, order=True)
class _Item:
    """A pack or a metadata image as eviction sees it."""

    last_use: int
    hex: str
    is_pack: bool


class Cache:
    """The owner of ``<root>/cache``; one at a time. All methods may be called by any thread.

    What is fetched for somebody is not to be evicted under his hands: :meth:`use` comes first, with names of what need
    not be there yet, then :meth:`pack` and ``metadata.ensure``, and :meth:`release` when the mounts are gone. Names are
    the hex of packs and of metadata images alike.

    Attributes:
        metadata: the metadata images.
        unclean: the last owner did not close the cache: what it recorded of packs is verified before it is read.
    """

    def __init__(
        self,
        root: str,
        *,
        limit: int | None = None,
        held: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take possession of the cache of the node at ``root``.

        Args:
            root: of the node.
            limit: bytes, for :meth:`trim`.
            held: hex of a pack: descriptors of its data and its frame map, of a process before this one. They are
                copied and stay the caller's. Their packs are in use by ``HELD``.
            warn: told in one line what was found damaged and what became of it.

        Raises:
            ConflictError: another process has it.
            CorruptError, UnsupportedError: the pins can't be read.
        """
        self._directory = os.path.join(root, "cache")
        self._places = PackDirectories(self._directory)
        self.metadata = MetadataCache(os.path.join(self._directory, "meta"))
        self._limit = limit
        self._warn = warn
        self._changed = threading.Condition(threading.RLock())
        """Guards everything below; told when a pack has been opened. Nothing waits for a store or an fsync under it."""
        self._evicting = threading.Lock()
        """Held by who makes room. Taken before ``_changed``."""
        self._pinning = threading.Lock()
        """Held by who changes pins. Taken alone."""
        self._packs: dict[str, CachedPack] = {}
        self._opening: set[str] = set()
        self._users: dict[str, set[str]] = {}
        self._uses: Counter[str] = Counter()
        self._held: dict[str, tuple[int, int]] = {}
        """Copies of what was handed over of packs that could not be opened yet."""
        self._doubted: dict[str, int] = {}
        """Packs of which the recorded frames, so many, are to be verified."""
        self._evicted_bytes = self._rejected = self._discarded = 0
        self._closed = False
        with os_errors(f"open cache {printable(self._directory)}"):
            os.makedirs(root, exist_ok=True)
            make_directory(self._directory)
            self._places.create()
            self._lock = self._take_lock()
            try:
                self._start(held)
            except BaseException:
                self._let_go()
                raise

    def _take_lock(self) -> int:
        path = os.path.join(self._directory, "lock")
        make_file(path)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ConflictError(
                f"{printable(self._directory)} is in use by another process: use its service, or stop it "
                f"(fuser {printable(path)} shows which one it is)"
            ) from None
        except BaseException:
            os.close(file)
            raise
        return file

    def _start(self, held: Mapping[str, tuple[int, int]]) -> None:
        self._pins = Pins(os.path.join(self._directory, "pins.json"))
        there = set(self._places.hexes())
        doubted = self._read_clean()
        self.unclean = doubted is None and bool(there)
        for hex in (there if doubted is None else doubted & there) - held.keys():
            self._doubted[hex] = FramesFile.count_recorded(self._places.frames(hex))
        self._remove_clean()
        for hex, (data, frames) in held.items():
            self._held[hex] = os.dup(data), os.dup(frames)
        if held:
            self.use(HELD, held)
        for hex in held:
            try:
                self._reopen(hex, None)
            except ImgtoolError as error:
                self._warn(str(error))

    # -- packs --------------------------------------------------------------------------------------------------------

    def pack(self, pack: StoredPack, store: Store) -> CachedPack:
        """The pack, opened; made, all of it missing, if it isn't in the cache. Remembers that ``store`` has it.

        A damaged one that nobody uses is thrown away and made anew. If somebody uses it, and its data file is whole,
        its frame index is read again and the data stay: what may be there is verified.

        Raises:
            CorruptError: the frame index in the store is not what the manifest says, or the cache has another one of
                the same blob; or the pack was handed over, and its data file isn't the one that is mounted.
            NotFoundError: the store lacks the pack.
        """
        hex = pack.digest.hex
        origin = Origin(store.location, pack)
        with self._open_alone(hex), os_errors(f"cache pack {pack.digest}"):
            cached = self._packs.get(hex) or self._reopen(hex, pack, store)
            if cached is None:
                self._places.make(pack, self._read_index(pack, store), origin)
                cached = self._admit(CachedPack(self._places.path(hex)))
            cached.check(pack)
            cached.add_origin(origin)
            self._touch(hex)
            return cached

    def known(self, hex: str) -> CachedPack:
        """The pack of this name, opened, with no store at hand.

        Raises:
            NotFoundError: it isn't in the cache, or was damaged and is thrown away, since nobody uses it.
            CorruptError: it is damaged, and in use: :meth:`pack` may mend it.
        """
        with self._open_alone(hex), os_errors(f"open cached pack {printable(hex)}"):
            cached = self._packs.get(hex) or (self._reopen(hex, None) if is_hex(hex) else None)
            if cached is None:
                raise NotFoundError(f"pack sha256:{printable(hex)} is not in the cache")
            return cached

    @contextmanager
    def _open_alone(self, hex: str) -> Iterator[None]:
        """One thread at a time opens or makes a pack; others wait for it, and eviction passes it by."""
        with self._changed:
            self._changed.wait_for(lambda: hex not in self._opening)
            self._refuse_closed()
            self._opening.add(hex)
        try:
            yield
        finally:
            with self._changed:
                self._opening.discard(hex)
                self._changed.notify_all()

    def _reopen(self, hex: str, pack: StoredPack | None, store: Store | None = None) -> CachedPack | None:
        """What is on disk; None if there is nothing, or nothing any more."""
        held = self._held.get(hex)
        place = self._places.path(hex)
        if held is None and not os.path.lexists(place):
            return None
        trust = Trust.DOUBT if hex in self._doubted else Trust.RECORD
        try:
            return self._admit(CachedPack(place, trust=trust, held=held, witness=pack))
        except CorruptError as damage:
            if held is not None or self.users(hex):
                if pack is None or store is None:
                    raise
                mended = self._mend(pack, store, held, damage)
                if mended is not None:
                    return mended
                # Whoever has mounted this one keeps the file that he has.
            self._warn(f"{damage}; it is thrown away")
        with self._changed:
            trash = self._take_away(hex)
            self._discarded += 1
        self._places.delete(trash)
        return None

    def _mend(
        self, pack: StoredPack, store: Store, held: tuple[int, int] | None, damage: CorruptError
    ) -> CachedPack | None:
        """Write the frames file of a pack in use anew; None if that is not what is wrong with it."""
        place = self._places.path(pack.digest.hex)
        index = self._read_index(pack, store)
        try:
            write_file(self._places.frames(pack.digest.hex), FramesFile.content(index, pack))
            cached = CachedPack(place, trust=Trust.NOTHING, held=held, witness=pack)
        except (CorruptError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if held is not None:
                raise CorruptError(f"{damage}, and is mounted: end the sandboxes that use it") from error
            return None
        self._warn(f"{damage}; its frames file was written anew")
        return self._admit(cached)

    @staticmethod
    def _read_index(pack: StoredPack, store: Store) -> FrameIndex:
        with store.open(pack.blob) as blob:
            return FrameIndex.read(pack, blob)

    def _admit(self, cached: CachedPack) -> CachedPack:
        with self._changed:
            self._packs[cached.hex] = cached
            cached.in_use = self._uses[cached.hex] > 0
            for file in self._held.pop(cached.hex, ()):
                os.close(file)
        return cached

    # -- who needs what -----------------------------------------------------------------------------------------------

    def use(self, user: str, hexes: Iterable[str]) -> None:
        """Keep these until :meth:`release`, besides what ``user`` has already; they need not be there yet."""
        with self._changed:
            self._refuse_closed()
            names = self._users.setdefault(user, set())
            for hex in set(hexes) - names:
                names.add(hex)
                self._uses[hex] += 1
                if hex in self._packs:
                    self._packs[hex].in_use = True
            listed = list(names)
        for hex in listed:
            self._touch(hex)

    def release(self, user: str) -> None:
        """``user`` needs nothing any more: its mounts are gone. That counts as the last use."""
        with self._changed:
            names = self._users.pop(user, set())
            for hex in names:
                self._uses[hex] -= 1
                if not self._uses[hex]:
                    del self._uses[hex]
                    if hex in self._packs:
                        self._packs[hex].in_use = False
        for hex in names:
            self._touch(hex)

    def users(self, hex: str) -> list[str]:
        """Who uses it, sorted."""
        with self._changed:
            return sorted(user for user, names in self._users.items() if hex in names)

    def pin(self, name: str, hexes: Iterable[str]) -> None:
        """Keep these, over restarts too, until :meth:`unpin`; replaces what the name stood for.

        Raises:
            UsageError: not a name, or not the hex of a sha256.
        """
        with self._pinning:
            self._refuse_closed()
            self._pins.pin(name, hexes)

    def unpin(self, name: str) -> bool:
        """False if there is no such pin."""
        with self._pinning:
            self._refuse_closed()
            return self._pins.unpin(name)

    def pins(self) -> Mapping[str, list[str]]:
        with self._pinning:
            return self._pins.all()

    def _touch(self, hex: str) -> None:
        if not self._places.touch(hex):
            self.metadata.touch(hex)

    # -- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, wanted: int, *, keep: Collection[str] = ()) -> int:
        """Evict what nobody uses or has pinned, least recently used first, until ``wanted`` bytes are free.

        Passes by what is in ``keep``, packs that somebody is busy with, and those that a mount has open which nobody
        has told of. Never waits for a fetch; it does wait for another call, and counts what that has freed meanwhile.

        Returns:
            Bytes freed, which may be fewer.
        """
        with self._changed:
            before = self._evicted_bytes
        with self._evicting, os_errors(f"make room in {printable(self._directory)}"):
            freed = self._evicted_bytes - before
            if freed < wanted:
                freed += self._places.reclaim()
            for item in self._candidates() if freed < wanted else ():
                if freed >= wanted:
                    break
                if item.hex not in keep:
                    freed += self._evict(item)
            return freed

    def trim(self) -> int:
        """Evict down to the limit, as far as that goes; the bytes freed."""
        if self._limit is None:
            return 0
        excess = sum(self._sizes().values()) - self._limit
        return self.make_room(excess) if excess > 0 else 0

    def status(self) -> CacheStatus:
        """Answers whatever else is going on."""
        sizes = self._sizes()
        with self._changed:
            cached = list(self._packs.values())
            used, pinned = set(self._uses), self._pins.pinned()
            rejected = self._rejected + sum(pack.rejected for pack in cached)
            closed = sum(frames for hex, frames in self._doubted.items() if hex not in self._packs)
        return CacheStatus(
            bytes=sum(sizes.values()),
            limit=self._limit,
            packs=sum(is_pack for _, is_pack in sizes),
            metadata_images=sum(not is_pack for _, is_pack in sizes),
            in_use_bytes=sum(size for (hex, _), size in sizes.items() if hex in used),
            pinned_bytes=sum(size for (hex, _), size in sizes.items() if hex in pinned),
            evicted_bytes=self._evicted_bytes,
            unverified_frames=sum(pack.unverified for pack in cached) + closed,
            rejected_frames=rejected,
            discarded_packs=self._discarded,
        )

    def _sizes(self) -> dict[tuple[str, bool], int]:
        """(hex, whether it is a pack): bytes on disk."""
        with os_errors(f"look through {printable(self._directory)}"):
            sizes = {(hex, True): self._places.size(hex) for hex in self._places.hexes()}
            sizes.update({(hex, False): self.metadata.size(hex) for hex in self.metadata.hexes()})
        return sizes

    def _candidates(self) -> list[_Item]:
        packs = [_Item(self._places.last_use(hex), hex, True) for hex in self._places.hexes()]
        images = [_Item(self.metadata.last_use(hex), hex, False) for hex in self.metadata.hexes()]
        return sorted(packs + images)

    def _evict(self, item: _Item) -> int:
        """Bytes freed; 0 if it has to stay, or is gone."""
        hex = item.hex
        with self._changed:
            if self._closed or hex in self._opening or self._uses[hex] or hex in self._pins.pinned():
                return 0
            if not item.is_pack:
                freed = 0 if is_path_open(self.metadata.path_of(hex)) else self.metadata.remove(hex)
                self._evicted_bytes += freed
                return freed
            cached = self._packs.get(hex)
            if cached is None:
                if is_path_open(os.path.join(self._places.path(hex), "data")):
                    return 0
            elif cached.is_open_elsewhere() or not cached.retire():
                return 0
            freed = self._places.size(hex)
            trash = self._take_away(hex)
        self._places.delete(trash)
        with self._changed:
            self._evicted_bytes += freed
        return freed

    def _take_away(self, hex: str) -> str:
        """Forget a pack, and rename its directory, so that no crash leaves half a pack. Under the lock."""
        cached = self._packs.pop(hex, None)
        if cached is not None:
            self._rejected += cached.rejected
            cached.close()
        try:
            trash = self._places.take_away(hex)
        except BaseException:
            self._doubted.setdefault(hex, 0)  # what it knew of its states is lost
            raise
        self._doubted.pop(hex, None)
        return trash

    def reclaim(self) -> int:
        """Remove what dead owners left unfinished; the bytes it took."""
        with os_errors(f"clear {printable(self._directory)}"):
            freed = reclaim_files(self._directory, time.time_ns(), dry_run=False)
            return freed + self.metadata.reclaim() + self._places.reclaim() + self._places.reclaim_files()

    # -- the mark of an orderly stop ----------------------------------------------------------------------------------

    @property
    def _clean(self) -> str:
        return os.path.join(self._directory, "clean")

    def _read_clean(self) -> set[str] | None:
        """The packs that are to be verified though the last owner closed the cache; None if it didn't."""
        try:
            return parse_clean(read_file(self._clean, CLEAN_BYTES))
        except (FileNotFoundError, ImgtoolError):
            return None

    def _remove_clean(self) -> None:
        """Durable before anything is served: a crash from now on is seen."""
        try:
            os.unlink(self._clean)
        except FileNotFoundError:
            return
        sync_directory(self._directory)

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self, *, clean: bool = True) -> None:
        """Sync and record everything, say that it was closed, and let go of it. Idempotent.

        Args:
            clean: without it nothing is synced or said, as if the process ended here.

        Raises:
            NoSpaceError, UnavailableError: something could not be made durable. Everything is closed nonetheless; it is
                verified when the cache is opened next.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._opening)
        with self._evicting:
            try:
                if clean:
                    self._settle()
            finally:
                self._let_go()

    def _settle(self) -> None:
        """Make everything durable, and say so."""
        failure: ImgtoolError | None = None
        for pack in self._packs.values():
            try:
                pack.sync()
            except ImgtoolError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        doubted = (self._doubted.keys() - self._packs.keys()) | self._held.keys()
        doubted |= {pack.hex for pack in self._packs.values() if not pack.sound}
        with os_errors(f"close cache {printable(self._directory)}"):
            write_file(self._clean, dump_clean(doubted))

    def _let_go(self) -> None:
        for pack in self._packs.values():
            pack.close()
        self._packs.clear()
        for files in self._held.values():
            for file in files:
                os.close(file)
        self._held.clear()
        self._closed = True
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may share the description, so closing isn't enough
        os.close(self._lock)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConflictError(f"cache {printable(self._directory)} is closed")

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""Where frames come from: which place is asked, and the blobs that are open there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Condition

from layerstore.cache.format import Origin
from layerstore.cache.packs import CachedPack
from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, NotFoundError, UnavailableError
from layerstore.pack.reader import FrameIndex
from layerstore.store.failures import disk_errors
from layerstore.store.protocol import Blob, SizedStore, Store
from prefetch.attempts import Attempts
from prefetch.clock import Clock

OPEN_BLOBS = 64
"""Blobs that stay open: a file descriptor each, for the packs of a dozen images."""
IDLE_SECONDS = 30.0
"""A blob that nobody reads for so long is closed, so that a store can be unmounted."""
AVOID_SECONDS = 5.0
"""So long a place that failed is asked after the others: they need not wait for its time-out each time."""

_Key = tuple[str, Digest]


class OpenBlob:
    """A blob of some pack, open, and the frame index that tells where the frames are in it."""

    __slots__ = ("blob", "index", "kept", "key", "used", "users")

    def __init__(self, key: _Key, blob: Blob, index: FrameIndex) -> None:
        self.key = key
        self.blob = blob
        self.index = index
        self.users = 1
        self.used = 0.0
        self.kept = True


class Origins:
    """Chooses places and opens blobs; for any thread. What is open is shared, and opened once."""

    def __init__(self, stores: Callable[[str], Store], clock: Clock, *, patience: float) -> None:
        """``patience``: seconds that a thread waits for another that opens the same blob, before it opens its own."""
        self._stores = stores
        self._clock = clock
        self._patience = patience
        self._changed = Condition()
        self._open: OrderedDict[_Key, OpenBlob] = OrderedDict()
        self._opening: set[_Key] = set()
        self._avoided: dict[str, float] = {}
        self._closed = False

    # --- which place

    def choose(self, origins: Sequence[Origin], attempts: Attempts | None) -> Origin | None:
        """The place to ask next for a frame; None if there is none."""
        candidates = origins if attempts is None else attempts.open_to(origins)
        if not self._avoided or len(candidates) < 2:
            return candidates[0] if candidates else None
        now = self._clock.now()
        return min(candidates, key=lambda origin: self._avoided.get(origin.location, now) > now)

    def avoid(self, location: str) -> None:
        """This place failed just now."""
        self._avoided[location] = self._clock.now() + AVOID_SECONDS

    def stalled(self, origin: Origin) -> None:
        """This place has not answered for so long that whoever comes next opens the blob anew."""
        self.avoid(origin.location)
        key = origin.location, origin.pack.blob
        with self._changed:
            self._opening.discard(key)
            opened = self._open.get(key)
            if opened is not None and opened.users:
                self._drop(opened)
            self._changed.notify_all()

    # --- open blobs

    def acquire(self, pack: CachedPack, origin: Origin) -> OpenBlob:
        """The open blob of a pack at a place; give it back with :meth:`release`.

        Raises:
            NotFoundError: it isn't there.
            CorruptError: it has another size, or another frame index, than it should, or is cut in other frames.
            UnavailableError: and what else the store raises.
        """
        key = origin.location, origin.pack.blob
        with self._changed:
            until = self._clock.now() + self._patience
            while (found := self._open.get(key)) is None and key in self._opening and self._clock.now() < until:
                self._clock.wait(self._changed, until)
            if found is not None:
                found.users += 1
                self._open.move_to_end(key)
                return found
            first = key not in self._opening
            self._opening.add(key)
        opened = None
        try:
            opened = self._opened(key, pack, origin)
        finally:
            with self._changed:
                if first:
                    self._opening.discard(key)
                if opened is not None:
                    dropped = self._keep(opened)
                self._changed.notify_all()
        close(dropped)
        return opened

    def _opened(self, key: _Key, pack: CachedPack, origin: Origin) -> OpenBlob:
        with disk_errors(f"open blob {origin.pack.blob}"):
            store = self._store(origin.location)
            if isinstance(store, SizedStore):
                blob = store.open_sized(origin.pack.blob, origin.pack.blob_size)
            else:
                blob = store.open(origin.pack.blob)
        try:
            if blob.size != origin.pack.blob_size:
                raise CorruptError(
                    f"blob {origin.pack.blob} in {origin.location} has a wrong size",
                    expected=str(origin.pack.blob_size),
                    actual=str(blob.size),
                )
            with disk_errors(f"read blob {origin.pack.blob}"):
                index = pack.index_for(origin.pack, blob)
            return OpenBlob(key, blob, index)
        except BaseException:
            blob.close()
            raise

    def _store(self, location: str) -> Store:
        try:
            return self._stores(location)
        except NotFoundError as error:  # the pack was there once: unmounted, or not reachable under this name now
            raise UnavailableError(f"{error}: is the store still mounted?") from error

    def _keep(self, opened: OpenBlob) -> list[OpenBlob]:
        """Share what was opened unless somebody else has done so meanwhile; returns what is to be closed."""
        if self._closed or opened.key in self._open:
            opened.kept = False
            return []
        self._open[opened.key] = opened
        idle = [each for each in self._open.values() if not each.users]
        return [self._drop(each) for each in idle[: max(0, len(self._open) - OPEN_BLOBS)]]

    def spoil(self, opened: OpenBlob) -> None:
        """The next one to ask opens it anew: what was read of this one was wrong, or didn't come."""
        with self._changed:
            if opened.kept:
                self._drop(opened)

    def release(self, opened: OpenBlob) -> None:
        """Give back what :meth:`acquire` gave."""
        with self._changed:
            opened.users -= 1
            opened.used = self._clock.now()
            dropped = [] if opened.users or opened.kept else [opened]
        close(dropped)

    def _drop(self, opened: OpenBlob) -> OpenBlob:
        opened.kept = False
        del self._open[opened.key]
        return opened

    def close_idle(self) -> float | None:
        """Close what nobody has read for a while; returns when there may be more of it."""
        with self._changed:
            now = self._clock.now()
            idle = [each for each in self._open.values() if not each.users]
            dropped = [self._drop(each) for each in idle if each.used + IDLE_SECONDS <= now]
            left = [each.used for each in idle if each.kept]
        close(dropped)
        return min(left) + IDLE_SECONDS if left else None

    def close(self) -> None:
        """Close all that nobody reads, and the rest when it is given back."""
        with self._changed:
            self._closed = True
            dropped = [self._drop(each) for each in list(self._open.values())]
        close([each for each in dropped if not each.users])


def close(blobs: Sequence[OpenBlob]) -> None:
    """Close them; a store that fails at that has nothing more to tell."""
    for each in blobs:
        try:
            with disk_errors("close a blob"):
                each.blob.close()
        except ImgtoolError:
            pass

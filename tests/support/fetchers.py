"""A cache, fetchers over it, and stores that a test owns: the bench of the fetcher's tests."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from layerstore.cache.cache import Cache
from layerstore.cache.packs import CachedPack
from layerstore.errors import (
    ImgtoolError,
    NotFoundError,
)
from layerstore.store.protocol import Store
from prefetch.fetcher import Fetcher, Priority
from prefetch.plan import FrameRange, PackFetch
from support.faults import fsync_for_free
from support.fetching import (
    Answer,
    FaultyStore,
    SmallPack,
    SteppedClock,
    Watching,
    small_pack,
    until,
)


class Bench:
    """A cache, and a fetcher over it whose stores are the test's."""

    def __init__(self, path: Path) -> None:
        self.cache = Cache(str(path))
        self.stores: dict[str, FaultyStore] = {}
        self.clock = SteppedClock()
        self.watching = Watching()
        self.room: Callable[[int, str], int] = lambda wanted, hex: 0
        self._fetchers: list[Fetcher] = []

    def open_store(self, location: str) -> Store:
        try:
            return self.stores[location]
        except KeyError:
            raise NotFoundError(f"no store at {location}") from None

    def store(self, *packs: SmallPack, location: str = "here") -> FaultyStore:
        self.stores[location] = FaultyStore(*packs, location=location)
        return self.stores[location]

    def pack(self, small: SmallPack, *stores: FaultyStore) -> CachedPack:
        """The pack in the cache; the first store is its first origin."""
        for store in reversed(stores):
            cached = self.cache.pack(small.stored, store)
        for store in stores:
            store.opened = store.closed = 0
        return cached

    def fetcher(self, *, stepped: bool = False, **fields: Any) -> Fetcher:
        """``stepped``: time goes by only by :meth:`elapse`."""
        fetcher = Fetcher(
            self.open_store,
            lambda wanted, hex: self.room(wanted, hex),
            observer=self.watching,
            clock=self.clock if stepped else None,
            **fields,
        )
        self._fetchers.append(fetcher)
        return fetcher

    def elapse(self, condition: Callable[[], object], step: float = 0.1) -> None:
        """Let time go by until something holds."""

        def then() -> bool:
            if condition():
                return True
            self.clock.advance(step)
            return False

        until(then)

    def close(self) -> None:
        for fetcher in self._fetchers:
            closing = threading.Thread(target=fetcher.close)
            closing.start()
            self.elapse(lambda thread=closing: not thread.is_alive())  # type: ignore[misc]
        until(lambda: not any(thread.name.startswith("fetch") for thread in threading.enumerate()))
        for store in self.stores.values():
            assert store.opened == store.closed, "a blob stays open"
        self.cache.close()


@contextmanager
def a_bench(path: Path) -> Iterator[Bench]:
    """A bench at ``path``; at its end every thread and every blob has to be gone."""
    with pytest.MonkeyPatch.context() as patch, fsync_for_free():
        patch.setattr(os, "fdatasync", lambda file: None)
        bench = Bench(path)
        yield bench
        bench.close()


SMALL = small_pack(40)
FRAME = len(SMALL.frames[0])
OTHER = small_pack(40, seed=1)


def want(fetcher: Fetcher, pack: CachedPack, *numbers: int, **fields: Any) -> Answer:
    answer = Answer()
    fetcher.want(pack, numbers, answer, **fields)
    return answer


def background(fetcher: Fetcher, pack: CachedPack, *numbers: int) -> Answer:
    return want(fetcher, pack, *numbers, priority=Priority.BACKGROUND)


def all_of(pack: CachedPack) -> list[PackFetch]:
    return [PackFetch(pack, (FrameRange(0, len(pack.index)),))]


def numbers_read(store: FaultyStore, pack: CachedPack) -> list[list[int]]:
    """The frames of each read, by offset."""
    starts = {pack.index.blob_range(range(n, n + 1))[0]: n for n in range(len(pack.index))}
    found = []
    for _, offset, length in store.reads:
        found.append([n for at, n in sorted(starts.items()) if offset <= at < offset + length])
    return found


def raised(answer: Answer, kind: type[ImgtoolError]) -> str:
    error = answer.wait()
    assert type(error) is kind, repr(error)
    text = str(error)
    assert text.isprintable()
    return text


def recorded(pack: CachedPack) -> list[int]:
    return [number for number, there in enumerate(pack._file.recorded) if there]


class Disk:
    """Takes so many more bytes of a pack's data; ``failing``: what the next syncs of it raise."""

    def __init__(self, patch: pytest.MonkeyPatch, pack: CachedPack, free: int) -> None:
        self.free = free
        self.failing: list[int] = []
        real = os.pwrite

        def pwrite(file: int, data: Any, offset: int) -> int:
            if file == pack.data_fd:
                if len(data) > self.free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.free -= len(data)
            return real(file, data, offset)

        def fdatasync(file: int) -> None:
            if file == pack.data_fd and self.failing:
                number = self.failing.pop(0)
                raise OSError(number, os.strerror(number))

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", fdatasync)

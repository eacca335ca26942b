"""Fetching: ranges of frames from a store into the cache, verified."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from layerstore.cache.packs import CachedPack, PackCache
from layerstore.pack.reader import FrameIndex
from layerstore.progress import Progress
from layerstore.store.protocol import Blob, Store
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch, ranges

READS_PER_SYNC = 64
"""A crash loses at most this many reads of work."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch took from the store: requests, and bytes compressed and raw."""

    requests: int = 0
    compressed: int = 0
    raw: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.requests + other.requests, self.compressed + other.compressed, self.raw + other.raw)


def fetch(plan: Sequence[PackFetch], store: Store, packs: PackCache, *, jobs: int, progress: Progress) -> Fetched:
    """Run a plan.

    Raises:
        CorruptError: a frame isn't what the index says; it is not in the cache then.
        NotFoundError: the store lacks a pack.
    """
    total = Fetched()
    progress.start("fetch", sum(_compressed_size(item, store, packs) for item in plan))
    with ThreadPoolExecutor(jobs, thread_name_prefix="fetch") as pool:
        for item in plan:
            with packs.open(item.pack, store) as cached, store.open(item.pack.blob) as blob, cached.filling():
                index = cached.index_for(blob)
                wanted = cached.missing(number for span in item.ranges for number in span.numbers)
                spans = ranges(wanted, most=FRAMES_PER_READ)
                for start in range(0, len(spans), READS_PER_SYNC):
                    group = spans[start : start + READS_PER_SYNC]
                    try:
                        for part in pool.map(partial(_read, index, blob, cached, progress), group):
                            total += part
                    except BaseException:
                        pool.shutdown(wait=True, cancel_futures=True)
                        raise
                    cached.record(number for span in group for number in span.numbers)
    return total


def _compressed_size(item: PackFetch, store: Store, packs: PackCache) -> int:
    with packs.open(item.pack, store) as cached:
        return sum(cached.index.blob_range(span.numbers)[1] for span in item.ranges)


def _read(index: FrameIndex, blob: Blob, cached: CachedPack, progress: Progress, span: FrameRange) -> Fetched:
    start, length = index.blob_range(span.numbers)
    data = memoryview(blob.read_at(start, length))
    raw_size = 0
    for number in span.numbers:
        offset, size = index.blob_range(range(number, number + 1))
        raw = index.decode(number, data[offset - start : offset - start + size])
        cached.write(number, raw)
        raw_size += len(raw)
    progress.advance(length)
    return Fetched(1, length, raw_size)

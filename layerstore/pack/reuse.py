"""Finds chunks that a store already has, and chooses the packs to refer to."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError, NotFoundError, UnsupportedError
from layerstore.pack.chunks import ChunkTable
from layerstore.pack.format import BLOCK_SIZE, ChunkRecord, unpack_chunk_list
from layerstore.pack.reader import read_span
from layerstore.pack.stored import StoredPack
from layerstore.store.protocol import Store

MAX_FOREIGN_PACKS = 32
"""Packs of other layers that one layer may use, besides its base's. Each is a device to mount and a file to fetch
from; ``docs/measurements.md`` has what the bound costs."""

MIN_SAVING = 16 * BLOCK_SIZE
"""Bytes for which another pack is not worth its requests, nor that copying the layer copies that pack."""


@dataclass(slots=True)
class Candidate:
    """A pack of the store with those of its chunks that are wanted: chunk number → block in the pack."""

    pack: StoredPack
    found: dict[int, int]


@dataclass(frozen=True, slots=True)
class Reuse:
    """The packs chosen, and for each chunk (pack position in ``packs``, block), or -1 for a new one.

    Attributes:
        packs: in the order chosen.
        source: position of the pack by chunk number.
        block: first block in that pack.
    """

    packs: tuple[StoredPack, ...]
    source: array[int]
    block: array[int]


def find(table: ChunkTable, packs: Iterable[StoredPack], store: Store, warn: Callable[[str], None]) -> list[Candidate]:
    """Look the wanted chunks up in the chunk lists of ``packs``; a pack that can't be read is no candidate."""
    candidates = []
    for pack in packs:
        try:
            found = _lookup(table.keys, pack, store)
        except (NotFoundError, CorruptError, MalformedError, UnsupportedError) as error:
            warn(f"not reusing pack {pack.digest}: {error}")
            continue
        if found:
            candidates.append(Candidate(pack, found))
    return candidates


def _lookup(keys: Mapping[bytes, int], pack: StoredPack, store: Store) -> dict[int, int]:
    with store.open(pack.blob) as blob:
        if blob.size != pack.blob_size:
            raise CorruptError(f"blob {pack.blob}", expected=f"{pack.blob_size} bytes", actual=f"{blob.size}")
        records, _ = unpack_chunk_list(read_span(blob, pack.chunk_list, f"chunk list of pack {pack.digest}"))
    found: dict[int, int] = {}
    block = 0
    for key, blocks in ChunkRecord.STRUCT.iter_unpack(records):
        number = keys.get(key)
        if number is not None:
            found[number] = block
        block += blocks
    if block != pack.blocks:
        raise CorruptError(f"chunk list of pack {pack.digest}", expected=f"{pack.blocks} blocks", actual=f"{block}")
    return found


def choose(
    table: ChunkTable,
    candidates: Sequence[Candidate],
    *,
    preferred: frozenset[Digest] = frozenset(),
    verify: Callable[[StoredPack], None],
    warn: Callable[[str], None],
    limit: int = MAX_FOREIGN_PACKS,
) -> Reuse:
    """Greedily take the pack that saves most, until ``limit`` or nothing is worth it.

    Ties go to the lower digest, so the choice depends on the store's content alone. ``preferred`` are the raw digests
    of packs that are on the node anyway (the base's): they come first and outside the limit. ``verify`` raises unless
    the stored blob still is what its digest says; such a pack isn't taken.
    """
    source = array("i", [-1]) * len(table.blocks)
    block = array("Q", [0]) * len(table.blocks)
    chosen: list[StoredPack] = []

    def saving(candidate: Candidate) -> int:
        return sum(table.blocks[number] for number in candidate.found if source[number] < 0)

    def rank(candidate: Candidate) -> tuple[bool, int, str]:
        digest = candidate.pack.digest
        return digest not in preferred, -saving(candidate), digest.hex

    # What a pack saves only shrinks as others are taken, so a stale rank is a bound: recount only the first.
    by_digest = {candidate.pack.digest: candidate for candidate in candidates}
    heap = [(*rank(candidate), candidate.pack.digest) for candidate in by_digest.values()]
    heapq.heapify(heap)
    foreign = 0
    while heap:
        candidate = by_digest[heapq.heappop(heap)[3]]
        current = rank(candidate)
        if heap and current > heap[0][:3]:
            heapq.heappush(heap, (*current, candidate.pack.digest))
            continue
        is_foreign, saved = current[0], -current[1] * BLOCK_SIZE
        if is_foreign and (foreign == limit or saved < MIN_SAVING):
            break
        if saved < MIN_SAVING:
            continue
        try:
            verify(candidate.pack)
        except (NotFoundError, CorruptError) as error:
            warn(f"not reusing pack {candidate.pack.digest}: {error}")
            continue
        foreign += is_foreign
        for number, where in candidate.found.items():
            if source[number] < 0:
                source[number] = len(chosen)
                block[number] = where
        chosen.append(candidate.pack)
    return Reuse(tuple(chosen), source, block)

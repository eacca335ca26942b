"""How files are cut into chunks, and which chunks are found again."""

from __future__ import annotations

import hashlib
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from layerstore.digest import Digest
from layerstore.errors import CorruptError
from layerstore.pack.chunks import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    ChunkTable,
    Sizes,
    chunk_bits,
    chunk_files,
    chunk_key,
    is_inline,
    pieces,
    read_pieces,
    runs,
)
from layerstore.pack.reuse import Candidate, choose
from layerstore.pack.stored import Span, StoredPack
from layerstore.progress import SILENT
from layerstore.tree.inode import Attrs, Extent, File

ATTRS = Attrs(stat.S_IFREG | 0o644, 0, 0, 0, 0)


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_at(self, offset: int, length: int) -> bytes:
        assert offset + length <= len(self.data)
        return self.data[offset : offset + length]


def dense(data: bytes) -> File:
    return File(ATTRS, len(data), (Extent(0, len(data), Bytes(data), 0),) if data else ())


def sparse(size: int, *runs: tuple[int, bytes]) -> File:
    return File(ATTRS, size, tuple(Extent(offset, len(data), Bytes(data), 0) for offset, data in runs))


def table_of(*files: File, sizes: Sizes | None = None, jobs: int = 2) -> ChunkTable:
    with ThreadPoolExecutor(jobs) as pool:
        return chunk_files(files, sizes or Sizes(), pool, jobs, SILENT)


def test_a_small_file_is_one_chunk_and_a_large_one_is_cut() -> None:
    assert chunk_bits(dense(b"x" * 5000), Sizes()) == 1
    assert BLOCK_SIZE << chunk_bits(dense(b"x" * CHUNK_SIZE), Sizes()) == CHUNK_SIZE
    assert BLOCK_SIZE << chunk_bits(dense(b"x" * (CHUNK_SIZE + 1)), Sizes()) == CHUNK_SIZE


def test_a_huge_dense_file_has_a_small_index_and_bounded_chunks() -> None:
    huge = File(ATTRS, 10 << 40, (Extent(0, 10 << 40, Bytes(b""), 0),))
    assert BLOCK_SIZE << chunk_bits(huge, Sizes()) == 4 << 20


@pytest.mark.case("T46")
def test_a_sparse_giant_with_512_bytes_costs_little() -> None:
    size = 300 << 30
    file = sparse(size, (size - 512, b"d" * 512))
    bits = chunk_bits(file, Sizes())
    index = -(-size // (BLOCK_SIZE << bits)) * 8
    data = sum(len(read_pieces(file, bits, piece, 1)) for piece in pieces(file, bits))
    assert index + data < 4 << 20
    [last] = pieces(file, bits)
    assert read_pieces(file, bits, last, 1).rstrip(b"\0").lstrip(b"\0") == b"d" * 512


@pytest.mark.case("T64")
def test_holes_of_a_block_survive_where_that_is_cheap() -> None:
    file = sparse(3 * BLOCK_SIZE + 2, (0, b"a" * BLOCK_SIZE), (2 * BLOCK_SIZE, b"b" * (BLOCK_SIZE + 2)))
    bits = chunk_bits(file, Sizes())
    assert bits == 0
    assert list(pieces(file, bits)) == [0, 2, 3]


def test_pieces_are_padded_and_holes_inside_are_zeros() -> None:
    file = sparse(10_000, (100, b"x" * 50), (9_000, b"y" * 1000))
    assert read_pieces(file, 2, 0, 1) == bytes(100) + b"x" * 50 + bytes(8850) + b"y" * 1000 + bytes(2288)


def test_neighbours_are_read_together() -> None:
    assert list(runs([0, 1, 2, 5, 7, 8], 2)) == [(0, 2), (2, 1), (5, 1), (7, 2)]
    assert list(runs([], 2)) == []
    data = bytes(range(256)) * 100
    assert read_pieces(dense(data), 0, 1, 3) == data[4096 : 4 * 4096]
    assert read_pieces(dense(data), 0, 5, 2) == data[5 * 4096 :].ljust(2 * 4096, b"\0")


def test_equal_chunks_are_one_and_order_is_that_of_first_use() -> None:
    one, two = b"1" * CHUNK_SIZE, b"2" * CHUNK_SIZE
    table = table_of(dense(one + two), dense(two), dense(two + one + b"tail"))
    assert [list(file.chunks) for file in table.files] == [[0, 1], [1], [1, 0, 2]]
    assert list(table.keys) == [chunk_key(data) for data in (one, two, b"tail" + bytes(BLOCK_SIZE - 4))]
    assert [blocks * BLOCK_SIZE for blocks in table.blocks] == [CHUNK_SIZE, CHUNK_SIZE, BLOCK_SIZE]


@pytest.mark.case("Z11")
def test_the_result_does_not_depend_on_jobs() -> None:
    files = [dense(bytes([n % 7]) * (n * 997 % 300_000)) for n in range(200)]
    tables = [table_of(*files, jobs=jobs) for jobs in (1, 2, 7)]
    assert tables[0].keys == tables[1].keys == tables[2].keys
    for other in tables[1:]:
        assert [file.chunks for file in other.files] == [file.chunks for file in tables[0].files]


def test_inline_is_for_small_dense_files_and_empty_ones() -> None:
    assert is_inline(dense(b""), Sizes())
    assert is_inline(dense(b"x" * Sizes().inline), Sizes())
    assert not is_inline(dense(b"x" * (Sizes().inline + 1)), Sizes())
    assert not is_inline(sparse(10, (0, b"x")), Sizes())


def test_a_file_of_one_hole_has_no_chunks() -> None:
    table = table_of(sparse(1 << 40))
    assert [len(file.chunks) for file in table.files] == [0]
    assert not table.keys


def pack(name: str, blocks: int = 100) -> StoredPack:
    digest = Digest.of(name.encode())
    span = Span(100, 10, digest)
    return StoredPack(digest, blocks * BLOCK_SIZE, digest, 1000, span, span)


def wanted(count: int, blocks: int = 16) -> ChunkTable:
    table = ChunkTable()
    for number in range(count):
        table.keys[hashlib.sha256(bytes([number])).digest()] = number
        table.blocks.append(blocks)
    return table


def choose_from(table: ChunkTable, candidates: list[Candidate], **more: object) -> list[StoredPack]:
    options = {"verify": lambda pack: None, "warn": lambda text: None, **more}
    return list(choose(table, candidates, **options).packs)


def test_the_pack_that_saves_most_comes_first_and_useless_ones_never() -> None:
    a, b, c = pack("a"), pack("b"), pack("c")
    candidates = [
        Candidate(a, {0: 0, 1: 16}),
        Candidate(b, {0: 0, 1: 16, 2: 32}),
        Candidate(c, {3: 0}),
    ]
    assert choose_from(wanted(5), candidates) == [b, c]


def test_a_base_is_preferred_and_the_number_of_others_is_bounded() -> None:
    base = pack("base")
    others = [pack(f"p{n}") for n in range(40)]
    candidates = [Candidate(other, {n: 0}) for n, other in enumerate(others)] + [Candidate(base, {0: 0})]
    chosen = choose_from(wanted(40), candidates, preferred=frozenset({base.digest}), limit=3)
    assert chosen[0] == base
    assert len(chosen) == 4


def test_what_saves_less_than_its_requests_cost_is_left() -> None:
    assert choose_from(wanted(1, blocks=15), [Candidate(pack("a"), {0: 0})]) == []
    assert choose_from(wanted(1, blocks=16), [Candidate(pack("a"), {0: 0})]) == [pack("a")]


@pytest.mark.case("C05")
def test_a_pack_whose_blob_is_corrupt_is_not_chosen_and_named() -> None:
    bad, good = pack("bad"), pack("good")
    told: list[str] = []

    def verify(candidate: StoredPack) -> None:
        if candidate == bad:
            raise CorruptError("blob", expected="1", actual="2")

    candidates = [Candidate(bad, {0: 0, 1: 0}), Candidate(good, {0: 5})]
    reuse = choose(wanted(2), candidates, verify=verify, warn=told.append)
    assert reuse.packs == (good,)
    assert list(reuse.source) == [0, -1]
    assert [str(bad.digest) in text for text in told] == [True]


def test_the_choice_depends_on_content_and_not_on_order() -> None:
    candidates = [Candidate(pack(f"p{n}"), {n % 5: 0}) for n in range(20)]
    assert choose_from(wanted(5), candidates) == choose_from(wanted(5), candidates[::-1])

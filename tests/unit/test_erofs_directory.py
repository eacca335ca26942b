from __future__ import annotations

import struct

import pytest

from layerstore.erofs.directory import (
    Entry,
    decode_block,
    encode_blocks,
    is_name,
    measure,
    search_block,
    split_blocks,
)
from layerstore.erofs.format import BLOCK_SIZE, DIRENT_SIZE
from layerstore.errors import MalformedError


def entries_of(names: list[bytes]) -> list[Entry]:
    return [Entry(name, number, 1) for number, name in enumerate(sorted(names), 5)]


def test_one_block_byte_for_byte() -> None:
    [block] = encode_blocks([Entry(b"!", 7, 1), Entry(b".", 5, 2), Entry(b"..", 5, 2)])
    dirents = [struct.pack("<QHBB", nid, at, kind, 0) for nid, at, kind in ((7, 36, 1), (5, 37, 2), (5, 38, 2))]
    assert block == b"".join(dirents) + b"!..."


@pytest.mark.parametrize("count", [2, 169, 170, 171, 1000])
def test_blocks_are_filled_and_come_back(count: int) -> None:
    entries = entries_of([b"name-%07d" % number for number in range(count)])
    blocks = list(encode_blocks(entries))
    assert [entry for block in blocks for entry in decode_block(block)] == entries
    full, used = measure([entry.name for entry in entries])
    assert (full, used) == (len(blocks) - 1, len(blocks[-1]))
    for block in blocks[:-1]:
        assert BLOCK_SIZE - 24 < len(block) <= BLOCK_SIZE
    assert all(decode_block(block.ljust(BLOCK_SIZE, b"\0")) == decode_block(block) for block in blocks)


def test_longest_names() -> None:
    names = [bytes([65 + number]) * 255 for number in range(26)]
    assert [(end - first, used) for first, end, used in split_blocks(names)] == [(15, 4005), (11, 2937)]


def test_search() -> None:
    [block] = encode_blocks(entries_of([b"b", b"d", b"f"]))
    for name, nid in ((b"b", 5), (b"d", 6), (b"f", 7)):
        assert search_block(block, name) == Entry(name, nid, 1)
    assert [search_block(block, name) for name in (b"a", b"c", b"e", b"g", b"da")] == [-1, 0, 0, 1, 0]


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/", b"a\0", b"n" * 256])
def test_what_is_no_name(name: bytes) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("name", [b"...", b"\xff", b"\n", b"n" * 255, b" "])
def test_what_is_a_name(name: bytes) -> None:
    assert is_name(name)


def block_of(*dirents: tuple[int, int], names: bytes) -> bytes:
    return b"".join(struct.pack("<QHBB", nid, at, 1, 0) for nid, at in dirents) + names


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\0" * 11,
        bytes(12),
        block_of((1, 6), names=b"abc"),
        block_of((1, 13), names=b"abc"),
        block_of((1, 12), names=b""),
        block_of((1, 60000), names=b"abc"),
        block_of((1, 24), (2, 23), names=b"abcd"),
        block_of((1, 24), (2, 24), names=b"abcd"),
        block_of((1, 24), (2, 60000), names=b"abcd"),
        block_of((1, 24), (2, 28), names=b"abcd"),
        block_of((1, 12), names=b"a/b"),
        block_of((1, 12), names=b"\0abc"),
        block_of((1, 24), (2, 27), names=b"a\0bc"),
        block_of((1, 12), names=b"n" * 256),
    ],
    ids=[
        "empty",
        "shorter than a dirent",
        "first name at 0",
        "first name within the dirent",
        "first name at no multiple",
        "no names",
        "first name beyond the block",
        "names backwards",
        "empty name",
        "name beyond the block",
        "last name at the end",
        "slash",
        "empty last name",
        "NUL within",
        "too long",
    ],
)
def test_hostile_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_block(block)
    if len(block) >= DIRENT_SIZE:
        with pytest.raises(MalformedError):
            for name in (b"\0", b"z" * 300):
                search_block(block, name)

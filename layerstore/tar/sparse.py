"""Sparse maps: the old GNU header and PAX formats 0.0, 0.1 and 1.0 ("Storing Sparse Files" in GNU tar's manual).

In all of them the pieces of data lie one after the other in the body, and the map tells their places in the file.
ValueError for what is malformed; the reader adds whose it is, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from layerstore.errors import LimitError, UnsupportedError, printable
from layerstore.tar.format import (
    BLOCK,
    SPARSE_PAIR,
    SPARSE_RUNS,
    SparseExtension,
    SparseHeader,
    parse_number,
)
from layerstore.tar.member import Run
from layerstore.tar.pax import Records, decimal

Read = Callable[[int, int], bytes]
"""(offset, length) to bytes of the decompressed layer; fewer only at its end."""

Pair = tuple[int, int]
"""(offset in the file, number of bytes)."""

_MAP = b"GNU.sparse.map"
_NUMBLOCKS = b"GNU.sparse.numblocks"
_OFFSET = b"GNU.sparse.offset"
_NUMBYTES = b"GNU.sparse.numbytes"
_SIZES = (b"GNU.sparse.realsize", b"GNU.sparse.size")  # 1.0, and 0.x
_DIGITS = 20  # of a 64-bit number


def runs_of(pairs: Iterable[Pair], *, size: int, at: int, stored: int) -> tuple[Run, ...]:
    """Check a map against the file's logical size and the bytes its body has, and place the pieces.

    Args:
        pairs: the map.
        size: logical size of the file.
        at: where the first piece lies in the decompressed layer.
        stored: how many bytes the pieces have together.
    """
    runs: list[Run] = []
    end = 0
    start = at
    for offset, length in pairs:
        if offset < end or length < 0 or offset + length > size:
            raise ValueError(f"sparse map out of order or beyond the end: {length} bytes at {offset}")
        end = offset + length
        if not length:
            continue
        if runs and runs[-1].offset + runs[-1].length == offset:
            last = runs.pop()
            runs.append(Run(last.offset, last.length + length, last.at))
        else:
            runs.append(Run(offset, length, at))
        at += length
    if at - start != stored:
        raise ValueError(f"sparse map covers {at - start} bytes, the body has {stored}")
    return tuple(runs)


def gnu_map(block: bytes, at: int, read: Read) -> tuple[list[Pair], int, int]:
    """The map of an old GNU sparse member whose header block this is.

    Args:
        block: the header.
        at: offset of what follows it: extension headers, then data.
        read: access to the layer.

    Returns:
        The map, the logical size, and the offset of the data.

    Raises:
        EOFError: the layer ends inside the extension headers.
    """
    header = SparseHeader.unpack(block)
    size = parse_number(header.realsize)
    pairs = list(_gnu_pairs(header.sp))
    more = header.isextended
    while more:
        block = read(at, BLOCK)
        if len(block) < BLOCK:
            raise EOFError
        extension = SparseExtension.unpack(block)
        pairs.extend(_gnu_pairs(extension.sp))
        _check_count(len(pairs))
        more = extension.isextended
        at += BLOCK
    return pairs, size, at


def _gnu_pairs(table: bytes) -> Iterator[Pair]:
    for offset, numbytes in SPARSE_PAIR.iter_unpack(table):
        if not numbytes[0]:  # unused, and so are those behind it
            return
        yield parse_number(offset), parse_number(numbytes)


def pax_map(records: Records, at: int, stored: int, read: Read) -> tuple[list[Pair], int, int]:
    """The map of a regular member that has ``GNU.sparse.*`` keywords.

    Args:
        records: those keywords, in order.
        at: offset of the body.
        stored: size of the body.
        read: access to the layer.

    Returns:
        The map, the logical size, and the offset of the data.

    Raises:
        EOFError: the layer ends inside the map.
        UnsupportedError: a version that does not exist yet.
    """
    keywords = dict(records)
    text = next((keywords[key] for key in _SIZES if key in keywords), None)
    if text is None:
        raise ValueError("sparse file without a size")
    size = decimal(b"GNU.sparse.size", text)
    version = (keywords.get(b"GNU.sparse.major", b"0"), keywords.get(b"GNU.sparse.minor", b"0"))
    if version == (b"1", b"0"):
        pairs, used = _map_in_body(at, stored, read)
        return pairs, size, at + used
    if version not in ((b"0", b"0"), (b"0", b"1")):
        raise UnsupportedError(f"GNU sparse format {printable(version[0][:8])}.{printable(version[1][:8])}")
    if _MAP in keywords:
        _check_count(keywords[_MAP].count(b",") // 2)
        pairs = _pairs(_MAP, keywords[_MAP].split(b","))
    else:
        pairs = _repeated(records)
    if _NUMBLOCKS not in keywords or decimal(_NUMBLOCKS, keywords[_NUMBLOCKS]) != len(pairs):
        raise ValueError("GNU.sparse.numblocks disagrees with the sparse map")
    return pairs, size, at


def _repeated(records: Records) -> list[Pair]:
    """Format 0.0: ``offset`` and ``numbytes`` alternate."""
    numbers = [(key, value) for key, value in records if key in (_OFFSET, _NUMBYTES)]
    if [key for key, _ in numbers] != [_OFFSET, _NUMBYTES] * (len(numbers) // 2):
        raise ValueError("GNU.sparse.offset and GNU.sparse.numbytes don't alternate")
    return _pairs(_OFFSET, [value for _, value in numbers])


def _pairs(keyword: bytes, texts: list[bytes]) -> list[Pair]:
    if len(texts) % 2:
        raise ValueError("sparse map with half a pair")
    numbers = [decimal(keyword, text) for text in texts]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _map_in_body(at: int, stored: int, read: Read) -> tuple[list[Pair], int]:
    """Format 1.0: decimal lines in front of the data, padded to whole blocks; the first is the number of pairs."""
    text = b""
    used = 0

    def number() -> int:
        nonlocal text, used
        while (end := text.find(b"\n", 0, _DIGITS + 1)) < 0:
            if len(text) > _DIGITS:
                raise ValueError("sparse map in the body is not made of numbers")
            if used + BLOCK > stored:
                raise ValueError("sparse map is longer than the body")
            block = read(at + used, BLOCK)
            if len(block) < BLOCK:
                raise EOFError
            text += block
            used += BLOCK
        line, text = text[:end], text[end + 1 :]
        return decimal(b"sparse map", line)

    count = number()
    _check_count(count)
    return [(number(), number()) for _ in range(count)], used


def _check_count(count: int) -> None:
    if count > SPARSE_RUNS:
        raise LimitError(f"sparse map with {count} pieces; {SPARSE_RUNS} are the limit")

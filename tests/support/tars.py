"""Tar archives byte by byte, right and wrong ones.

An archive is a concatenation of parts: ``tar(directory("etc/"), file("etc/a", b"x"), hardlink("etc/b", "etc/a"))``.
Every part takes the header's fields as keywords; ``raw`` replaces fields by bytes as they are, and ``pax`` puts an
extended header in front::

    file("f", b"x", mode=0o4755, uid=10, mtime=-5)
    file("f", pax={"uid": "4294967296"})
    file("f", raw={"size": b"garbage     "})
    file("f", checksum=0)

Names are str (UTF-8) or bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

BLOCK = 512
END = bytes(2 * BLOCK)
POSIX = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)

Text = str | bytes
PaxRecords = Mapping[str, Text] | Sequence[tuple[Text, Text]]

FIELDS = {
    "name": (0, 100), "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12),
    "chksum": (148, 8), "typeflag": (156, 1), "linkname": (157, 100), "magic": (257, 8), "uname": (265, 32),
    "gname": (297, 32), "devmajor": (329, 8), "devminor": (337, 8), "prefix": (345, 155), "pad": (500, 12),
    "sp": (386, 96), "isextended": (482, 1), "realsize": (483, 12),
}  # fmt: skip
"""Offset and length of each field; the last three are those of an old GNU sparse header."""


def raw_bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text


def padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % BLOCK)


def octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int) -> bytes:
    """GNU's two's complement, whose first bit is always set."""
    field = bytearray(value.to_bytes(width, "big", signed=True))
    field[0] |= 0x80
    return bytes(field)


def number(value: int, width: int) -> bytes:
    """Octal where it fits, else base-256."""
    return octal(value, width) if 0 <= value < 8 ** (width - 1) else base256(value, width)


def header(
    name: Text = b"",
    *,
    typeflag: bytes = b"0",
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    linkname: Text = b"",
    magic: bytes = POSIX,
    major: int = 0,
    minor: int = 0,
    prefix: Text = b"",
    checksum: int | None = None,
    raw: Mapping[str, bytes] | None = None,
) -> bytes:
    """One header block; strings are cut to their fields."""
    block = bytearray(BLOCK)

    def put(field: str, value: bytes) -> None:
        at, width = FIELDS[field]
        block[at : at + width] = value[:width].ljust(width, b"\0")

    put("name", raw_bytes(name))
    put("mode", number(mode, 8))
    put("uid", number(uid, 8))
    put("gid", number(gid, 8))
    put("size", number(size, 12))
    put("mtime", number(mtime, 12))
    put("typeflag", typeflag)
    put("linkname", raw_bytes(linkname))
    put("magic", magic)
    if typeflag in b"34":
        put("devmajor", number(major, 8))
        put("devminor", number(minor, 8))
    if prefix:
        put("prefix", raw_bytes(prefix))
    for field, value in (raw or {}).items():
        put(field, value)
    put("chksum", b" " * 8)
    put("chksum", b"%06o\0 " % (sum(block) if checksum is None else checksum))
    if raw and "chksum" in raw:
        put("chksum", raw["chksum"])
    return bytes(block)


def record(keyword: Text, value: Text) -> bytes:
    """One PAX record, its length right."""
    body = b" " + raw_bytes(keyword) + b"=" + raw_bytes(value) + b"\n"
    length = len(body)
    while len(body) + len(str(length)) != length:
        length = len(body) + len(str(length))
    return b"%d%s" % (length, body)


def pax_raw(body: bytes, *, typeflag: bytes = b"x", name: Text = "PaxHeaders/x") -> bytes:
    """An extended header with this body, whatever it is."""
    return header(name, typeflag=typeflag, size=len(body)) + padded(body)


def pax(records: PaxRecords, *, typeflag: bytes = b"x", name: Text = "PaxHeaders/x") -> bytes:
    pairs = records.items() if isinstance(records, Mapping) else records
    return pax_raw(b"".join(record(key, value) for key, value in pairs), typeflag=typeflag, name=name)


def global_pax(records: PaxRecords) -> bytes:
    return pax(records, typeflag=b"g", name="pax_global_header")


def longname(name: Text) -> bytes:
    """GNU 'L': the next member's name."""
    body = raw_bytes(name) + b"\0"
    return header("././@LongLink", typeflag=b"L", size=len(body), magic=GNU) + padded(body)


def longlink(target: Text) -> bytes:
    """GNU 'K': the next member's link target."""
    body = raw_bytes(target) + b"\0"
    return header("././@LongLink", typeflag=b"K", size=len(body), magic=GNU) + padded(body)


def member(
    name: Text,
    body: bytes = b"",
    *,
    typeflag: bytes = b"0",
    pax: PaxRecords | None = None,
    size: int | None = None,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 0,
    linkname: Text = b"",
    magic: bytes = POSIX,
    major: int = 0,
    minor: int = 0,
    prefix: Text = b"",
    checksum: int | None = None,
    raw: Mapping[str, bytes] | None = None,
) -> bytes:
    """Header and padded body; ``size`` is the body's unless given."""
    front = _pax(pax) if pax is not None else b""
    size = len(body) if size is None else size
    block = header(
        name, typeflag=typeflag, mode=mode, uid=uid, gid=gid, size=size, mtime=mtime, linkname=linkname,
        magic=magic, major=major, minor=minor, prefix=prefix, checksum=checksum, raw=raw,
    )  # fmt: skip
    return front + block + padded(body)


_pax = pax  # the parameter of member() hides it


def file(name: Text, body: bytes = b"", **fields: object) -> bytes:
    return member(name, body, **fields)  # type: ignore[arg-type]


def directory(name: Text, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"5", "mode": 0o755, **fields})  # type: ignore[arg-type]


def symlink(name: Text, target: Text, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"2", "mode": 0o777, "linkname": target, **fields})  # type: ignore[arg-type]


def hardlink(name: Text, target: Text, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"1", "linkname": target, **fields})  # type: ignore[arg-type]


def char(name: Text, major: int, minor: int, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"3", "major": major, "minor": minor, **fields})  # type: ignore[arg-type]


def block(name: Text, major: int, minor: int, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"4", "major": major, "minor": minor, **fields})  # type: ignore[arg-type]


def fifo(name: Text, **fields: object) -> bytes:
    return member(name, **{"typeflag": b"6", **fields})  # type: ignore[arg-type]


def whiteout(path: str) -> bytes:
    """The OCI whiteout of a path: an empty file ``.wh.NAME`` beside it."""
    parent, slash, name = path.rpartition("/")
    return file(f"{parent}{slash}.wh.{name}")


def opaque(path: str) -> bytes:
    """The marker that makes a directory opaque."""
    return file(f"{path}/.wh..wh..opq")


def tar(*parts: bytes, end: bytes = END) -> bytes:
    return b"".join(parts) + end


Pieces = Sequence[tuple[int, bytes]]
"""(offset, data) of a sparse file, sorted."""


def sparse_gnu(name: Text, size: int, pieces: Pieces, **fields: object) -> bytes:
    """Old GNU format: four pairs in the header, 21 in each extension block."""
    pairs = [number(offset, 12) + number(len(data), 12) for offset, data in pieces]
    if not pieces or pieces[-1][0] + len(pieces[-1][1]) < size:
        pairs.append(number(size, 12) + octal(0, 12))
    first, rest = pairs[:4], pairs[4:]
    stored = b"".join(data for _, data in pieces)
    raw = {"sp": b"".join(first), "isextended": b"\1" if rest else b"\0", "realsize": number(size, 12)}
    out = [header(name, typeflag=b"S", size=len(stored), magic=GNU, raw=raw, **fields)]  # type: ignore[arg-type]
    while rest:
        now, rest = rest[:21], rest[21:]
        out.append(b"".join(now).ljust(504, b"\0") + (b"\1" if rest else b"\0") + bytes(7))
    return b"".join(out) + padded(stored)


def sparse_pax(name: Text, size: int, pieces: Pieces, version: str, **fields: object) -> bytes:
    """PAX format "0.0", "0.1" or "1.0"."""
    pairs = [(offset, len(data)) for offset, data in pieces]
    if not pieces or pieces[-1][0] + len(pieces[-1][1]) < size:
        pairs.append((size, 0))
    stored = b"".join(data for _, data in pieces)
    flat = [number for pair in pairs for number in pair]
    records: list[tuple[Text, Text]] = []
    if version == "1.0":
        records += [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")]
        records += [("GNU.sparse.name", name), ("GNU.sparse.realsize", str(size))]
        stored = padded(b"".join(b"%d\n" % value for value in [len(pairs), *flat])) + stored
    else:
        records += [("GNU.sparse.size", str(size)), ("GNU.sparse.numblocks", str(len(pairs)))]
        if version == "0.1":
            records += [("GNU.sparse.name", name), ("GNU.sparse.map", ",".join(map(str, flat)))]
        else:
            records += [("path", name)]
            for offset, length in pairs:
                records += [("GNU.sparse.offset", str(offset)), ("GNU.sparse.numbytes", str(length))]
    return member("./GNUSparseFile.0/f", stored, pax=records, **fields)  # type: ignore[arg-type]


class Trickle(io.RawIOBase):
    """A stream that gives its bytes in pieces of these sizes, over and over, whatever is asked for."""

    def __init__(self, data: bytes, sizes: Iterable[int] = (1,)) -> None:
        self._data = data
        self._sizes = list(sizes)
        self._at = 0
        self._turn = 0

    def read(self, size: int = -1, /) -> bytes:
        step = self._sizes[self._turn % len(self._sizes)]
        self._turn += 1
        piece = self._data[self._at : self._at + (step if size < 0 else min(size, step))]
        self._at += len(piece)
        return piece

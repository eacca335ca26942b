"""Whatever bytes a layer is made of: members, or one of our errors."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tars
from support.tars import directory, file, global_pax, hardlink, pax, sparse_gnu, sparse_pax, symlink, tar

from layerstore.errors import ImgtoolError
from layerstore.limits import Limits
from layerstore.tar.archive import LayerArchive
from layerstore.tar.compression import OUTPUT, SNIFFED, decompress, sniff
from layerstore.tar.format import Header
from layerstore.tar.member import Member
from layerstore.tar.reader import MemberReader

LIMITS = Limits(layer_bytes=1 << 24, entries=10_000, file_bytes=1 << 40, decoder_memory=1 << 26)
BOUNDED = settings(deadline=None, max_examples=100)

PARTS = [
    directory("d/", mtime=-5),
    file("d/f", b"body" * 200, uid=3_000_000),
    file("v7", b"x", magic=tars.V7, typeflag=b"\0"),
    symlink("l", "d/f"),
    hardlink("h", "d/f", size=700),
    tars.char("c", 5, 1),
    file("p", b"y" * 513, pax={"mtime": "1.5", "uid": "7", "SCHILY.xattr.user.a": b"\0\n", "path": "p" * 120}),
    pax({"LIBARCHIVE.xattr.user.b": "YWJj", "size": "3"}) + file("q", b"abc"),
    global_pax({"comment": "c", "gid": "12"}),
    tars.longname("n" * 150) + tars.longlink("t" * 150) + symlink("cut", "cut", magic=tars.GNU),
    sparse_gnu("s", 100_000, [(i * 4096, b"%02d" % i) for i in range(9)]),
    *(sparse_pax("s" + version, 9000, [(0, b"a"), (5000, b"b" * 600)], version) for version in ("0.0", "0.1", "1.0")),
    file("z", b"?" * 600, typeflag=b"Z"),
]
TAR = tar(*PARTS)
OFFSETS = st.integers(0, len(TAR) - 1)


def read(data: bytes) -> list[Member]:
    """Members, each with its data within the archive's bounds."""

    def at(offset: int, length: int) -> bytes:
        assert 0 <= offset <= 1 << 64
        assert 0 <= length <= 1 << 23
        return data[offset : offset + length]

    def one_line(text: str) -> None:
        assert len(text.splitlines()) == 1

    found = []
    for member in MemberReader(at, limits=LIMITS, warn=one_line):
        end = 0
        for run in member.data:
            assert run.length > 0
            assert run.offset >= end
            end = run.offset + run.length
        assert end <= member.size
        assert b"\0" not in member.path + member.target
        found.append(member)
    return found


def survives(data: bytes) -> None:
    try:
        read(data)
    except ImgtoolError as error:
        assert len(str(error).splitlines()) == 1


def mended(data: bytes) -> bytes:
    """With right checksums in every block that has the magic, so that the damage gets past them."""
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    return b"".join(_mended(block) if block[257:262] == b"ustar" and len(block) == 512 else block for block in blocks)


def _mended(block: bytes) -> bytes:
    total = sum(block[:148] + b" " * 8 + block[156:])
    return Header.unpack(block)._replace(chksum=b"%06o\0 " % total).pack()


def test_the_archive_is_good_as_it_is() -> None:
    found = read(TAR)
    assert [m.path[:2] for m in found] == [
        b"d/", b"d/", b"v7", b"l", b"h", b"c", b"pp", b"q", b"nn", b"s", b"s0", b"s0", b"s1",
    ]  # fmt: skip
    assert found == read(mended(TAR))


@BOUNDED
@given(st.lists(st.tuples(OFFSETS, st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_changed_bytes(changes: list[tuple[int, int]], mend: bool) -> None:
    data = bytearray(TAR)
    for at, value in changes:
        data[at] = value
    survives(mended(bytes(data)) if mend else bytes(data))


FIELD = st.one_of(
    st.binary(min_size=1, max_size=32),
    st.integers(-(2**62), 2**62).map(lambda value: tars.base256(value, 12)),
    st.integers(0, 2**40).map(lambda value: b"%o " % value),
)


@BOUNDED
@given(st.integers(0, len(TAR) // 512 - 3), st.sampled_from(sorted(tars.FIELDS)), FIELD)
def test_changed_fields(number: int, field: str, value: bytes) -> None:
    at, width = tars.FIELDS[field]
    data = bytearray(TAR)
    at += 512 * number
    data[at : at + min(width, len(value))] = value[:width]
    survives(mended(bytes(data)))


@BOUNDED
@given(st.lists(st.tuples(OFFSETS, OFFSETS), max_size=8), st.integers(0, len(TAR)), st.booleans())
def test_shuffled_and_cut_pieces(pieces: list[tuple[int, int]], cut: int, aligned: bool) -> None:
    data = b"".join(TAR[a // 512 * 512 if aligned else a :][:b] for a, b in pieces)
    survives(data + TAR[:cut])


@BOUNDED
@given(st.permutations(PARTS), st.integers(0, 2048))
def test_parts_in_any_order(parts: list[bytes], end: int) -> None:
    survives(tar(*parts, end=bytes(end)))


@BOUNDED
@given(
    st.lists(st.tuples(st.sampled_from(b"0123567LKxgXSDMVZ\0".decode("latin-1")), st.binary(max_size=1100)), max_size=6)
)
def test_headers_of_any_type_with_any_body(parts: list[tuple[str, bytes]]) -> None:
    survives(tar(*(tars.member(f"m{i}", body, typeflag=kind.encode()) for i, (kind, body) in enumerate(parts))))


KEYWORDS = st.sampled_from(
    ["path", "linkpath", "size", "uid", "gid", "mtime", "SCHILY.devmajor", "SCHILY.xattr.user.a", "SCHILY.acl.access",
     "LIBARCHIVE.xattr.%61%00", "SCHILY.xattr.security.capability", "GNU.sparse.map", "GNU.sparse.size",
     "GNU.sparse.realsize", "GNU.sparse.numblocks", "GNU.sparse.offset", "GNU.sparse.numbytes", "GNU.sparse.major",
     "GNU.sparse.minor",
     "GNU.sparse.name", "comment"]
)  # fmt: skip
VALUES = st.one_of(
    st.binary(max_size=40),
    st.integers(-5, 2**65).map(lambda value: str(value).encode()),
    st.sampled_from([b"", b"0", b"1", b"0,1", b"0,1,2,3", b"1.5", b"-1", b"a\0b", b"9" * 5000]),
)


@BOUNDED
@given(
    st.lists(st.tuples(KEYWORDS, VALUES), max_size=8),
    st.sampled_from([b"0", b"1", b"2", b"3", b"5", b"S"]),
    st.booleans(),
)
def test_extended_headers_of_any_content(records: list[tuple[str, bytes]], typeflag: bytes, everywhere: bool) -> None:
    front = pax(records, typeflag=b"g" if everywhere else b"x")
    survives(
        tar(front, tars.member("m", b"1\n0\n1\n".ljust(512, b"\0") + b"d", typeflag=typeflag, linkname="t"), file("f"))
    )


@BOUNDED
@given(st.binary(max_size=3000))
def test_any_bytes(data: bytes) -> None:
    survives(data)
    survives(mended(data[:257] + b"ustar\x0000" + data[265:]))


COMPRESSORS: list[Callable[[bytes], bytes]] = [
    gzip.compress,
    zstandard.ZstdCompressor(write_checksum=True).compress,
    lzma.compress,
    bz2.compress,
]


def blobs() -> list[bytes]:
    parts = [TAR[:5000], TAR[5000:]]
    return [b"".join(compress(part) for part in parts) for compress in COMPRESSORS]


BLOBS = blobs()


MOST = 32 << 20


def decoded(blob: bytes, step: int) -> bytes:
    """The decompressed bytes; MOST of them are enough."""
    stream = io.BytesIO(blob)
    out = bytearray()
    for piece in decompress(lambda: stream.read(step), sniff(blob[:SNIFFED]), memory=LIMITS.decoder_memory):
        assert 0 < len(piece) <= OUTPUT
        out += piece
        if len(out) > MOST:
            break
    return bytes(out)


@pytest.mark.parametrize("blob", BLOBS, ids=["gzip", "zstd", "xz", "bzip2"])
@BOUNDED
@given(data=st.data())
def test_damaged_blobs(blob: bytes, data: st.DataObject) -> None:
    changes = data.draw(st.lists(st.tuples(st.integers(0, len(blob) - 1), st.integers(0, 255)), max_size=4))
    cut = data.draw(st.integers(0, len(blob)))
    step = data.draw(st.sampled_from([1, 7, 512, 1 << 18]))
    damaged = bytearray(blob)
    for at, value in changes:
        damaged[at] = value
    try:
        got = decoded(bytes(damaged[: len(blob) - cut // 3]), step)
    except ImgtoolError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert (got == TAR) or changes or cut >= 3


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), index=st.integers(0, len(BLOBS)))
def test_damaged_blobs_through_the_whole_archive(
    seed: int, index: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = _scratch(tmp_path_factory)
    blob = bytearray([*BLOBS, TAR][index])
    chance = random.Random(seed)
    for _ in range(chance.randrange(3)):
        blob[chance.randrange(len(blob))] = chance.randrange(256)
    try:
        with LayerArchive(io.BytesIO(blob), scratch=str(scratch), warn=lambda _: None, limits=LIMITS) as layer:
            for member in layer.members():
                for _, length, at in member.data:
                    assert len(layer.source.read_at(at, length)) == length
            assert layer.finish().blob_size == len(blob)
    except ImgtoolError as error:
        assert len(str(error).splitlines()) == 1
    assert list(scratch.iterdir()) == []


def _scratch(factory: pytest.TempPathFactory) -> Path:
    path = factory.getbasetemp() / "hostile"
    path.mkdir(exist_ok=True)
    return path

"""What was put in comes out: by our builders, by Python's writer, through every compression."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tars

from layerstore.limits import DEFAULT_LIMITS
from layerstore.tar import format as fmt
from layerstore.tar.compression import SNIFFED, decompress, sniff
from layerstore.tar.member import Member
from layerstore.tar.pax import parse_records, timestamp
from layerstore.tar.reader import MemberReader

BOUNDED = settings(deadline=None, max_examples=100)


def read(data: bytes) -> list[Member]:
    def at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return list(MemberReader(at, limits=DEFAULT_LIMITS, warn=pytest.fail))


def content(data: bytes, member: Member) -> bytes:
    out = bytearray(member.size)
    for offset, length, at in member.data:
        out[offset : offset + length] = data[at : at + length]
    return bytes(out)


# Python's writer


class Entry(NamedTuple):
    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    mtime: int
    body: bytes
    link: bytes


def names(longest: int) -> st.SearchStrategy[bytes]:
    part = st.binary(min_size=1, max_size=40).map(lambda b: b.translate(None, b"\0/") or b"x")
    return st.lists(part, min_size=1, max_size=6).map(b"/".join).filter(lambda name: len(name) <= longest)


def entries(*, longest: int, ids: int, times: st.SearchStrategy[int]) -> st.SearchStrategy[list[Entry]]:
    kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
    ident = st.integers(0, ids)
    entry = st.builds(
        Entry,
        names(longest),
        kinds,
        st.integers(0, 0o7777),
        ident,
        ident,
        times,
        st.binary(max_size=1600),
        names(longest),
    )
    return st.lists(entry, max_size=6)


def written(found: list[Entry], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for entry in found:
            info = tarfile.TarInfo(entry.name.decode("utf-8", "surrogateescape"))
            info.type, info.mode, info.uid, info.gid, info.mtime = entry[1:6]
            if entry.kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = entry.link.decode("utf-8", "surrogateescape")
            if entry.kind == tarfile.REGTYPE:
                info.size = len(entry.body)
            archive.addfile(info, io.BytesIO(entry.body))
    return out.getvalue()


def same(found: list[Entry], data: bytes) -> None:
    members = read(data)
    assert len(members) == len(found)
    for entry, member in zip(found, members, strict=True):
        attrs = member.attrs
        # Python puts a slash behind directories' names
        assert member.path == entry.name + (b"/" if entry.kind == tarfile.DIRTYPE else b"")
        assert (attrs.uid, attrs.gid, attrs.mtime, attrs.nsec) == (entry.uid, entry.gid, entry.mtime, 0)
        expected = 0o777 if entry.kind == tarfile.SYMTYPE else entry.mode
        assert stat.S_IMODE(attrs.mode) == expected
        assert member.kind == stat.S_IFMT(attrs.mode)
        assert content(data, member) == (entry.body if entry.kind == tarfile.REGTYPE else b"")
        assert member.target == (entry.link if entry.kind == tarfile.SYMTYPE else b"")
        assert member.hardlink == (entry.link if entry.kind == tarfile.LNKTYPE else None)


@BOUNDED
@given(entries(longest=99, ids=0o7777777, times=st.integers(0, 8**11 - 1)))
def test_ustar_by_python(found: list[Entry]) -> None:
    same(found, written(found, tarfile.USTAR_FORMAT))


@BOUNDED
@given(entries(longest=240, ids=fmt.ID_MAX, times=st.integers(-(2**63), 2**63 - 1)))
def test_gnu_by_python(found: list[Entry]) -> None:
    same(found, written(found, tarfile.GNU_FORMAT))


@BOUNDED
@given(entries(longest=240, ids=fmt.ID_MAX, times=st.integers(-(2**63), 2**63 - 1)))
def test_pax_by_python(found: list[Entry]) -> None:
    same(found, written(found, tarfile.PAX_FORMAT))


# extended headers


TEXTS = st.binary(min_size=1, max_size=60).map(lambda b: b.translate(None, b"\0=") or b"k")


@BOUNDED
@given(st.lists(st.tuples(TEXTS, st.binary(max_size=1100))))
def test_records(records: list[tuple[bytes, bytes]]) -> None:
    assert parse_records(b"".join(tars.record(key, value) for key, value in records)) == records


@BOUNDED
@given(st.booleans(), st.integers(0, 2**62), st.text("0123456789", max_size=14))
def test_times_are_rounded_down(negative: bool, seconds: int, fraction: str) -> None:
    text = f"{'-' * negative}{seconds}.{fraction}"
    exact = Fraction(text if fraction else text + "0")
    whole, nanoseconds = timestamp(text.encode())
    assert 0 <= nanoseconds < 10**9
    assert whole * 10**9 + nanoseconds == exact * 10**9 // 1


@BOUNDED
@given(
    st.dictionaries(
        # A malformed security.capability is kept with a warning: tests/unit/test_tar_pax.py.
        TEXTS.filter(lambda name: len(name) < 50 and name != b"security.capability"),
        st.binary(max_size=3000),
        max_size=8,
    )
)
def test_extended_attributes(xattrs: dict[bytes, bytes]) -> None:
    (member,) = read(tars.tar(tars.file("f", pax=[(b"SCHILY.xattr." + name, value) for name, value in xattrs.items()])))
    assert dict(member.attrs.xattrs) == xattrs
    assert [name for name, _ in member.attrs.xattrs] == sorted(xattrs)


# sparse files


@BOUNDED
@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.binary(min_size=1, max_size=600)), max_size=60),
    st.integers(0, 5000),
    st.sampled_from(["gnu", "0.0", "0.1", "1.0"]),
)
def test_sparse_files(gaps: list[tuple[int, bytes]], tail: int, form: str) -> None:
    pieces, end = [], 0
    for gap, piece in gaps:
        pieces.append((end + gap, piece))
        end += gap + len(piece)
    size = end + tail
    part = tars.sparse_gnu("f", size, pieces) if form == "gnu" else tars.sparse_pax("f", size, pieces, form)
    data = tars.tar(part, tars.file("next", b"n"))
    found, following = read(data)
    assert found.size == size
    assert (following.path, content(data, following)) == (b"next", b"n")
    stored = b"".join(data[run.at : run.at + run.length] for run in found.data)
    assert stored == b"".join(piece for _, piece in pieces)
    places = [offset + i for offset, piece in pieces for i in range(len(piece))]
    assert [run.offset + i for run in found.data for i in range(run.length)] == places


# compression


COMPRESSORS: list[Callable[[bytes], bytes]] = [
    gzip.compress,
    zstandard.ZstdCompressor(write_checksum=True).compress,
    zstandard.ZstdCompressor(level=19, write_content_size=False).compress,
    lzma.compress,
    bz2.compress,
]


@BOUNDED
@given(
    st.lists(st.binary(max_size=3000), min_size=1, max_size=5),
    st.sampled_from(COMPRESSORS),
    st.integers(1, 4000),
)
def test_concatenated_streams(parts: list[bytes], compress: Callable[[bytes], bytes], step: int) -> None:
    blob = b"".join(compress(part) for part in parts)
    stream = io.BytesIO(blob)
    pieces = decompress(lambda: stream.read(step), sniff(blob[:SNIFFED]), memory=1 << 30)
    assert b"".join(pieces) == b"".join(parts)

"""Tar layers: headers byte by byte, and what a tar layer can't say."""

from __future__ import annotations

import stat

import pytest
from support.erofs_images import ACL, CAPABILITY, Packs, attrs, directory, inline, symlink
from support.exports import tar_of, tree_of_tars
from support.trees import Bytes, Row, at, content, manifest, names

from layerstore.errors import LimitError, UnsupportedError
from layerstore.export import tarlayer
from layerstore.export.tarheader import LNKTYPE, REGTYPE, SYMTYPE, Entry, headers
from layerstore.limits import DEFAULT_LIMITS
from layerstore.tar import pax
from layerstore.tar.format import BLOCK, Header, parse_number, string
from layerstore.tar.reader import MemberReader
from layerstore.tree.inode import Attrs, Directory, Inode, Special, Whiteout

FILE = stat.S_IFREG | 0o644


def parsed(blocks: bytes) -> tuple[list[tuple[bytes, bytes]], Header]:
    """The records of the extended header, if there is one, and the header of the member."""
    header = Header.unpack(blocks[:BLOCK])
    records: list[tuple[bytes, bytes]] = []
    if header.typeflag == b"x":
        size = parse_number(header.size)
        records = pax.parse_records(blocks[BLOCK : BLOCK + size])
        header = Header.unpack(blocks[-BLOCK:])
    return records, header


def header_of(path: bytes = b"f", flag: bytes = REGTYPE, made: Attrs | None = None, **fields: object) -> bytes:
    return headers(Entry(path, flag, made or Attrs(FILE, 0, 0, 0, 0), **fields))  # type: ignore[arg-type]


def test_what_fits_has_one_block() -> None:
    blocks = header_of(b"usr/bin/x", made=Attrs(stat.S_IFREG | 0o4755, 0o7777777, 7, 8**11 - 1, 0), size=8**11 - 1)
    assert len(blocks) == BLOCK
    _, header = parsed(blocks)
    assert (header.mode, header.uid, header.gid) == (b"0004755\0", b"7777777\0", b"0000007\0")
    assert (header.size, header.mtime) == (b"77777777777\0", b"77777777777\0")
    assert (header.magic, header.version, header.uname, header.gname) == (b"ustar\0", b"00", bytes(32), bytes(32))


@pytest.mark.parametrize(
    ("path", "prefix", "name"),
    [
        (b"n" * 100, b"", b"n" * 100),
        (b"d/" + b"n" * 100, b"d", b"n" * 100),
        (b"p" * 155 + b"/" + b"n" * 100, b"p" * 155, b"n" * 100),
        (b"a/" * 60 + b"f", None, None),
        (b"p" * 120 + b"/d/", b"p" * 120, b"d/"),
        (b"caf\xe9", b"", b"caf\xe9"),
    ],
)
def test_names_that_fit_ustar(path: bytes, prefix: bytes | None, name: bytes | None) -> None:
    records, header = parsed(header_of(path))
    assert records == []
    if name is not None:
        assert (string(header.prefix), string(header.name)) == (prefix, name)
    assert b"/".join(filter(None, (string(header.prefix), string(header.name)))) == path


@pytest.mark.parametrize("path", [b"n" * 101, b"p" * 156 + b"/n", b"d/" + b"n" * 101, b"a/" * 200 + b"f"])
def test_names_that_do_not_fit_ustar(path: bytes) -> None:
    records, _ = parsed(header_of(path))
    assert records == [(b"path", path)]


def test_a_long_name_that_is_no_text_says_so() -> None:
    records, _ = parsed(header_of(b"\xff" * 200))
    assert records == [(b"hdrcharset", b"BINARY"), (b"path", b"\xff" * 200)]


def test_long_targets() -> None:
    for flag in (SYMTYPE, LNKTYPE):
        assert parsed(header_of(flag=flag, link=b"t" * 100))[0] == []
        assert parsed(header_of(flag=flag, link=b"t" * 101))[0] == [(b"linkpath", b"t" * 101)]


@pytest.mark.parametrize(
    ("seconds", "nsec", "text"),
    [
        (1_635_528_968, 103_142_160, b"1635528968.103142160"),
        (0, 5, b"0.000000005"),
        (-1, 0, b"-1"),
        (-1, 500_000_000, b"-0.500000000"),
        (-2, 500_000_000, b"-1.500000000"),
        (8**11, 0, b"8589934592"),
        (-(1 << 63), 0, b"-9223372036854775808"),
        ((1 << 63) - 1, 999_999_999, b"9223372036854775807.999999999"),
    ],
)
def test_times_beyond_ustar(seconds: int, nsec: int, text: bytes) -> None:
    """With nine digits, for readers that count them."""
    assert parsed(header_of(made=Attrs(FILE, 0, 0, seconds, nsec)))[0] == [(b"mtime", text)]
    assert pax.timestamp(text) == (seconds, nsec)


def test_numbers_beyond_ustar() -> None:
    records, header = parsed(header_of(made=Attrs(FILE, 8**7, 4294967294, 0, 0), size=8**11))
    assert records == [(b"uid", b"2097152"), (b"gid", b"4294967294"), (b"size", b"8589934592")]
    assert parse_number(header.uid) == parse_number(header.gid) == parse_number(header.size) == 0


def test_lengths_of_records_count_themselves() -> None:
    for size in (*range(60, 130), *range(950, 1010), 9970, 9990):
        records, _ = parsed(header_of(made=Attrs(FILE, 0, 0, 0, 0, ((b"user.a", b"v" * size),))))
        assert records == [(b"SCHILY.xattr.user.a", b"v" * size)]


def test_attributes() -> None:
    pairs = (
        (b"security.capability", CAPABILITY),
        (b"system.posix_acl_access", ACL),
        (b"user.a=b%", bytes(range(256))),
        (b"user.empty", b""),
        (b"user.\xff", b"\0\n="),
    )
    records, _ = parsed(header_of(made=Attrs(FILE, 0, 0, 0, 0, pairs)))
    assert records[0] == (b"SCHILY.xattr.security.capability", CAPABILITY)
    assert records[2][0] == b"LIBARCHIVE.xattr.user.a%3Db%25"  # "=" has no place in a keyword
    root = directory({b"f": inline(b"x", xattrs=pairs)})
    assert at(tree_of_tars(tar_of(root)), b"f").attrs.xattrs == tuple(sorted(pairs))


def test_overlays_own_attributes_get_their_names_back() -> None:
    """An image has them escaped, and a mount shows them under the names that they came with."""
    root = directory({b"d": directory(xattrs=((b"trusted.overlay.overlay.opaque", b"y"),))})
    layer = tar_of(root)
    assert b"SCHILY.xattr.trusted.overlay.opaque=y\n" in layer
    assert manifest(tree_of_tars(layer)) == manifest(root)


def base() -> tuple[Directory, Packs]:
    packs = Packs(2)
    one = inline(b"one inode")
    tree = directory(
        {
            b"a": directory({b"z": one, b"link": symlink(b"../f")}, 0o750),
            b"b": one,
            b"big": packs.file(attrs(stat.S_IFREG), [b"1" * 8192, None, b"2" * 5000], bits=1, spread=True),
            b"dev": directory({b"null": Special(attrs(stat.S_IFCHR, 0o666), 1, 3), b"sda": block()}),
            b"pipe": Special(attrs(stat.S_IFIFO)),
            b"f": inline(b""),
        },
        0o711,
    )
    return tree, packs


def block() -> Special:
    return Special(attrs(stat.S_IFBLK, 0o660), 4095, 1048575)


def paths(layer: bytes) -> list[bytes]:
    """Names of members as they stand."""
    source = Bytes(layer)
    reader = MemberReader(
        lambda offset, length: source.data[offset : offset + length], limits=DEFAULT_LIMITS, warn=[].append
    )
    return [member.path for member in reader]


def test_the_order_of_members() -> None:
    tree, packs = base()
    layer = tar_of(tree, packs)
    wanted = [b"./", b"a/", b"a/link", b"a/z", b"b", b"big", b"dev/", b"dev/null", b"dev/sda", b"f", b"pipe"]
    assert paths(layer) == wanted
    assert len(layer) % BLOCK == 0
    assert layer.endswith(bytes(2 * BLOCK))


def test_holes_become_zeros() -> None:
    tree, packs = base()
    back = tree_of_tars(tar_of(tree, packs))
    assert content(at(back, b"big")) == b"1" * 8192 + bytes(8192) + b"2" * 5000
    assert manifest(back) == manifest(tree)


def test_large_holes_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarlayer, "_LARGE_HOLE", 8192)
    tree, packs = base()
    warnings: list[str] = []
    tar_of(tree, packs, warnings=warnings)
    assert warnings == ["/big: 8192 bytes of holes become zeros, tar layers have none"]


def test_a_file_beyond_every_disk_is_refused_before_it_is_begun() -> None:
    packs = Packs(1)
    vast = packs.file(attrs(stat.S_IFREG), [None] * 2, bits=31)
    vast.size = 1 << 44 | 1
    with pytest.raises(LimitError, match=r"^/vast: 17592186044417 bytes, which a tar layer has in full"):
        tar_of(directory({b"vast": vast}), packs)


def test_whiteouts_and_opaque_directories() -> None:
    tree, packs = base()
    gone = Whiteout(Attrs(stat.S_IFCHR, 5, 5, 5, 5))
    over = directory({b"a": directory({b"new": inline(b"n")}), b"f": gone, b"dev": directory({b"sda": gone})})
    opaque = over.entries[b"a"]
    assert isinstance(opaque, Directory)
    opaque.opaque = True
    layer = tar_of(over, bottom=False)
    assert paths(layer) == [b"./", b"a/", b"a/.wh..wh..opq", b"a/new", b"dev/", b"dev/.wh.sda", b".wh.f"]
    shown = names(tree_of_tars(tar_of(tree, packs), layer))
    assert shown == [b"a", b"a/new", b"b", b"big", b"dev", b"dev/null", b"pipe"]
    # Owner and time of a whiteout are nobody's, so the layer doesn't depend on them.
    over.entries[b"f"] = Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0))
    assert tar_of(over, bottom=False) == layer


def test_sockets_are_left_out_and_still_hide() -> None:
    tree = directory({b"s": Special(attrs(stat.S_IFSOCK)), b"t": inline(b"t")})
    warnings: list[str] = []
    assert paths(tar_of(tree, warnings=warnings)) == [b"./", b"t"]
    assert warnings == ["/s: left out, tar has no sockets"]
    assert paths(tar_of(tree, bottom=False, warnings=warnings)) == [b"./", b".wh.s", b"t"]


@pytest.mark.parametrize(
    ("name", "inode", "text"),
    [
        (b".wh.gone", inline(b""), "/d/.wh.gone: in a tar layer a name that begins with .wh. deletes another"),
        (b".wh..wh..opq", directory(), "begins with .wh."),
        (b"n" * 252, Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0)), "the whiteout of so long a name"),
    ],
)
def test_what_would_mean_something_else_is_refused(name: bytes, inode: Inode, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        tar_of(directory({b"d": directory({name: inode})}), bottom=False)


def test_hard_links_have_the_attributes_of_their_file() -> None:
    """Some readers apply what a link's header says to the file that both are."""
    one = inline(b"x", mode=0o4711, xattrs=((b"user.a", b"1"),))
    one.attrs = one.attrs._replace(uid=5_000_000, nsec=7)
    layer = tar_of(directory({b"a": one, b"b": one}))
    rows: dict[bytes, Row] = manifest(tree_of_tars(layer))
    assert rows[b"b"].links == {b"a", b"b"}
    assert layer.count(b"uid=5000000\n") == layer.count(b"SCHILY.xattr.user.a=1\n") == 2


def test_nothing_depends_on_the_order_of_entries() -> None:
    tree, packs = base()
    layer = tar_of(tree, packs)
    tree.entries = dict(reversed(tree.entries.items()))
    assert tar_of(tree, packs) == layer

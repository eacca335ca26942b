"""Random trees with their packs, for hypothesis."""

from __future__ import annotations

import stat

from hypothesis import strategies as st

from layerstore.erofs.directory import is_name
from layerstore.erofs.format import BLOCK_SIZE, MAX_ID, MAX_INLINE
from layerstore.tree.inode import Attrs, Directory, Extent, File, Inode, Special, Symlink, Whiteout, Xattrs
from support.erofs_images import Packs
from support.trees import Bytes

_ids = st.sampled_from([0, 1, 65535, 65536, MAX_ID]) | st.integers(0, MAX_ID)
_seconds = st.integers(-(1 << 63), (1 << 63) - 1)
_times = st.sampled_from([0, -1, 1 << 31, 1 << 32, -(1 << 63), (1 << 63) - 1]) | _seconds
_names = (st.sampled_from([b"a", b"!", b"-", b"...", b"\xff"]) | st.binary(min_size=1, max_size=255)).filter(is_name)
_suffixes = st.binary(min_size=1, max_size=240).filter(lambda suffix: b"\0" not in suffix)
_xattr_names = st.sampled_from([b"system.posix_acl_access", b"system.posix_acl_default", b"user.a"]) | st.tuples(
    st.sampled_from([b"security.", b"trusted.", b"user."]), _suffixes
).map(b"".join)
_xattrs: st.SearchStrategy[Xattrs] = st.just(()) | st.dictionaries(
    _xattr_names, st.binary(max_size=300) | st.integers(0, 9000).map(bytes), max_size=6
).map(lambda pairs: tuple(sorted(pairs.items())))


@st.composite
def attributes(draw: st.DrawFn, kind: int) -> Attrs:
    mode = kind | draw(st.integers(0, 0o7777))
    return Attrs(mode, draw(_ids), draw(_ids), draw(_times), draw(st.integers(0, 999_999_999)), draw(_xattrs))


@st.composite
def _file(draw: st.DrawFn, packs: Packs) -> File:
    made = draw(attributes(stat.S_IFREG))
    if draw(st.booleans()):
        data = draw(st.binary(max_size=40) | st.integers(0, MAX_INLINE).map(lambda size: b"i" * size))
        return File(made, len(data), (Extent(0, len(data), Bytes(data), 0),) if data else ())
    bits = draw(st.integers(0, 3))
    pieces: list[bytes | None] = []
    for fill in draw(st.binary(min_size=1, max_size=6)):
        pieces.append(None if fill < 60 else bytes([fill]) * (BLOCK_SIZE << bits))
    if pieces[-1] is not None:
        pieces[-1] = pieces[-1][: draw(st.integers(1, BLOCK_SIZE << bits))]
    return packs.file(made, pieces, bits=bits, spread=draw(st.booleans()))


@st.composite
def _leaf(draw: st.DrawFn, packs: Packs) -> Inode:
    kind = draw(st.sampled_from([File, File, Symlink, Special, Whiteout]))
    if kind is File:
        return draw(_file(packs))
    if kind is Symlink:
        size = draw(st.sampled_from([1, 30, 4031, 4032, 4033, 4095]))
        return Symlink(draw(attributes(stat.S_IFLNK)), b"t" * size)
    if kind is Whiteout:
        return Whiteout(draw(attributes(stat.S_IFCHR)))
    special = draw(st.sampled_from([stat.S_IFBLK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK]))
    if special in (stat.S_IFIFO, stat.S_IFSOCK):
        return Special(draw(attributes(special)))
    major, minor = draw(st.tuples(st.integers(0, 4095), st.integers(1, (1 << 20) - 1)))
    return Special(draw(attributes(special)), major, minor)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Directory, Packs]:
    """A tree of up to 30 entries, hard links among them, with one to three packs."""
    packs = Packs(draw(st.integers(1, 3)))
    root = Directory(draw(attributes(stat.S_IFDIR)))
    directories = [root]
    leaves: list[Inode] = []
    for _ in range(draw(st.integers(0, 30))):
        parent = draw(st.sampled_from(directories))
        name = draw(_names)
        if name in parent.entries:
            continue
        what = draw(st.integers(0, 9))
        if what < 3:
            child = Directory(draw(attributes(stat.S_IFDIR)))
            child.opaque = draw(st.booleans())
            directories.append(child)
            parent.entries[name] = child
        elif what == 3 and leaves:
            parent.entries[name] = draw(st.sampled_from(leaves))
        elif what == 4:
            empty = File(draw(attributes(stat.S_IFREG)), 0, ())
            for number in range(draw(st.sampled_from([3, 200, 400]))):
                parent.entries.setdefault(b"%s-%d" % (name[:200], number), empty)
        else:
            leaves.append(draw(_leaf(packs)))
            parent.entries[name] = leaves[-1]
    return root, packs

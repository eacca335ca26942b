"""Random trees as tar layers: our own reader makes the same tree of them, and a stack of them what overlayfs shows."""

from __future__ import annotations

import gzip
import io
import random
import stat
import tarfile
from concurrent.futures import ThreadPoolExecutor

import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.erofs_images import Packs
from support.erofs_strategies import trees
from support.exports import tar_of, tree_of_tars
from support.trees import Row, manifest

from layerstore.export.compress import Compression, compressor
from layerstore.tree.attributes import escape
from layerstore.tree.inode import Attrs, Directory, Inode, Special, Whiteout
from layerstore.tree.union import merge_overlay

SETTINGS = settings(deadline=None, max_examples=50)
_NOTHING = Attrs(0, 0, 0, 0, 0)


def _sayable(tree: Directory, *, whole: bool) -> Directory:
    """The tree without what no tar layer can say; as a whole one, without whiteouts and opaque marks too."""
    stack = [tree]
    tree.opaque = False
    while stack:
        directory = stack.pop()
        if whole:
            directory.opaque = False
        _escape(directory)
        for name, inode in list(directory.entries.items()):
            unsayable = (
                name.startswith(b".wh.")
                or (isinstance(inode, Special) and stat.S_ISSOCK(inode.kind))
                or (isinstance(inode, Whiteout) and (whole or len(name) > 251))
            )
            if unsayable:
                del directory.entries[name]
            elif isinstance(inode, Directory):
                stack.append(inode)
            else:
                if stat.S_ISLNK(inode.kind):
                    inode.attrs = inode.attrs._replace(mode=stat.S_IFLNK | 0o777)
                _escape(inode)
    return tree


def _escape(inode: Inode) -> None:
    """Trees in images have overlayfs's own xattrs escaped."""
    escaped = escape(inode.attrs, b"", [].append)
    if all(len(name) <= 255 for name, _ in escaped.xattrs):
        inode.attrs = escaped


def _rows(tree: Directory) -> dict[bytes, Row]:
    """Nothing of a whiteout but that it is there."""
    return {
        path: row._replace(attrs=_NOTHING) if row.type == "Whiteout" else row for path, row in manifest(tree).items()
    }


@given(trees())
@SETTINGS
def test_a_whole_tree_comes_back(made: tuple[Directory, Packs]) -> None:
    tree, packs = made
    _sayable(tree, whole=True)
    layer = tar_of(tree, packs)
    assert _rows(tree_of_tars(layer)) == _rows(tree)
    assert tar_of(tree_of_tars(layer)) == layer  # from the bytes of a layer, not from packs


@given(trees(), trees())
@SETTINGS
def test_a_stack_of_layers_is_what_overlayfs_shows(low: tuple[Directory, Packs], high: tuple[Directory, Packs]) -> None:
    lower, upper = _sayable(low[0], whole=True), _sayable(high[0], whole=False)
    layers = tar_of(lower, low[1]), tar_of(upper, high[1], bottom=False)
    assert _rows(tree_of_tars(*layers)) == _rows(merge_overlay([lower, upper]))


@given(trees())
@settings(deadline=None, max_examples=25)
def test_the_standard_library_reads_it(made: tuple[Directory, Packs]) -> None:
    """Every member is there, with the size and the numbers that it has; an independent reader of the same bytes."""
    tree, packs = made
    _sayable(tree, whole=True)
    with tarfile.open(fileobj=io.BytesIO(tar_of(tree, packs)), errors="surrogateescape") as archive:
        members = {member.name.encode(errors="surrogateescape"): member for member in archive}
    expected = _rows(tree)
    assert {name for name in members if name not in (b".", b"")} == expected.keys() - {b""}
    for path, row in expected.items():
        member = members[path or b"."]
        attrs = row.attrs
        assert (member.mode, member.uid, member.gid) == (attrs.mode & 0o7777, attrs.uid, attrs.gid)
        if member.isreg():
            assert isinstance(row.value, bytes)
            assert member.size == len(row.value)


@given(st.binary(max_size=64), st.integers(0, 5 << 20), st.integers(1, 1 << 20), st.integers(1, 3))
@settings(deadline=None, max_examples=8)
def test_compressed_bytes_depend_on_the_input_alone(head: bytes, size: int, step: int, jobs: int) -> None:
    """Whatever the number of threads and the pieces it comes in, and any decoder gives it back."""
    data = head + random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
    for compression in (Compression.GZIP, Compression.ZSTD):
        packed = []
        for threads, piece in ((jobs, step), (1, len(data) or 1)):
            out = bytearray()
            with ThreadPoolExecutor(threads) as pool:
                stream = compressor(compression, out.extend, pool, jobs=threads)
                for at in range(0, len(data), piece):
                    stream.write(data[at : at + piece])
                stream.close()
            packed.append(bytes(out))
        assert packed[0] == packed[1]
        if compression is Compression.GZIP:
            assert gzip.decompress(packed[0]) == data
        else:
            with zstandard.ZstdDecompressor().stream_reader(packed[0], read_across_frames=True) as reader:
                assert reader.read(len(data) + 1) == data

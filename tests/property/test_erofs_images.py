"""Random trees survive an image, and no image, however broken, does more than raise our errors."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.erofs_images import Packs, Source, image_bytes, listing, sealed, zoo
from support.erofs_strategies import trees
from support.tools import need_tool

from layerstore.erofs.checker import check
from layerstore.erofs.directory import decode_block
from layerstore.erofs.dump import dump
from layerstore.erofs.format import BLOCK_SIZE, EROFS_SUPER_OFFSET, SUPER_SIZE
from layerstore.erofs.reader import Image
from layerstore.erofs.tree import load_tree
from layerstore.erofs.xattrs import decode_xattrs
from layerstore.errors import ImgtoolError, MalformedError
from layerstore.tree.inode import Directory, File, walk

slow = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


@slow
@given(trees())
def test_a_tree_comes_back(made: tuple[Directory, Packs]) -> None:
    root, packs = made
    data = image_bytes(root, packs.devices)
    image = Image(Source(data))
    assert check(image) == []
    tree = load_tree(image, packs)
    assert listing(tree) == listing(root)
    assert image_bytes(tree, packs.devices) == data
    assert listing(load_tree(Image(Source(data + b"".join(packs.data))))) == listing(root)
    for path, inode in walk(root):
        node = image.resolve(path, follow=False)
        assert node.kind == (inode.attrs.mode & 0o170000)


@pytest.mark.compat
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(made=trees())
def test_fsck_finds_nothing(made: tuple[Directory, Packs], tmp_path_factory: pytest.TempPathFactory) -> None:
    root, packs = made
    directory = tmp_path_factory.mktemp("fsck")
    (directory / "image").write_bytes(image_bytes(root, packs.devices))
    devices = [f"--device={path}" for path in packs.save(directory)]
    command = [need_tool("fsck.erofs", "1.8"), *devices, str(directory / "image")]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<E>" not in done.stdout + done.stderr


class Zeros:
    """Devices of any number and length."""

    def read_device(self, index: int, offset: int, length: int) -> bytes:
        return bytes(min(length, 1 << 16))


@cache
def original() -> bytes:
    root, packs = zoo()
    many = root.entries[b"many"]
    assert isinstance(many, Directory)
    for number in range(300, 1000):  # still more than one block
        del many.entries[b"entry-%04d" % number]
    return image_bytes(root, packs.devices)


@cache
def interesting() -> int:
    """Where superblock, device table and inodes end."""
    image = Image(Source(original()))
    many = image.resolve(b"/many")
    return next(image.runs(many)).at


def exercise(data: bytes) -> None:
    """All that can be done with an image. What was found sound can be read to its end."""
    try:
        image = Image(Source(data), verify=False)
    except ImgtoolError:
        return
    sound = check(image) == []
    try:
        for _ in dump(image):
            pass
        for _, inode in walk(load_tree(image, Zeros())):
            if isinstance(inode, File):
                for extent in inode.extents[:3]:
                    extent.source.read_at(extent.at, min(extent.length, 5000))
    except ImgtoolError as error:
        assert not sound, error
    for path in (b"/files/spread", b"/symlinks/up", b"/many/entry-0250", b"/xattrs/binary"):
        try:
            node = image.resolve(path)
            image.read(node, 3, 10_000, Zeros())
        except ImgtoolError:
            pass


flips = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(flips)
@example([(EROFS_SUPER_OFFSET + 12, 9)])
def test_flipped_bytes_anywhere(changes: list[tuple[int, int]]) -> None:
    data = bytearray(original())
    for where, mask in changes:
        data[EROFS_SUPER_OFFSET + where % (interesting() - EROFS_SUPER_OFFSET)] ^= mask
    exercise(sealed(data))


@slow
@given(st.integers(0, SUPER_SIZE // 4 - 1), st.integers(0, 0xFFFF_FFFF) | st.sampled_from([0, 1, 0xFFFF_FFFF]))
def test_any_value_in_the_superblock(field: int, value: int) -> None:
    data = bytearray(original())
    data[EROFS_SUPER_OFFSET + 4 * field : EROFS_SUPER_OFFSET + 4 * field + 4] = value.to_bytes(4, "little")
    exercise(bytes(data))


@slow
@given(st.integers(0, 1 << 20))
def test_cut_anywhere(length: int) -> None:
    data = original()
    exercise(data[: length % len(data)])


@slow
@given(st.binary(max_size=3 * BLOCK_SIZE))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(ImgtoolError):
        Image(Source(data)).root.is_directory  # noqa: B018


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_any_directory_block(block: bytes) -> None:
    try:
        entries = decode_block(block)
    except MalformedError:
        return
    assert all(0 < len(entry.name) <= 255 and b"/" not in entry.name for entry in entries)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_any_xattr_body(body: bytes) -> None:
    try:
        xattrs, _ = decode_xattrs(body, lambda number: (b"user.%d" % number, b""))
    except ImgtoolError:
        return
    assert len(dict(xattrs)) == len(xattrs)


def test_fixtures_are_in_reach(tmp_path: Path) -> None:
    assert 4 * BLOCK_SIZE < interesting() <= len(original())
    exercise(original())
    assert check(Image(Source(original()))) == []

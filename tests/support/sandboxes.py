"""Small real layers, and roots to mount them under."""

from __future__ import annotations

import os
import stat
import subprocess
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from layerstore.digest import Digest
from layerstore.erofs.format import BLOCK_SIZE, MAX_INLINE
from layerstore.erofs.layout import Chunked, Device, address
from layerstore.erofs.writer import write_image
from layerstore.tree.inode import Attrs, Directory, Extent, File, Inode, Special, Symlink, Whiteout, Xattrs, walk
from overlay import mountinfo
from overlay.layers import MountableLayer
from overlay.mountapi import filesystem_name
from support.tools import need_root, need_tool
from support.trees import Bytes, content

CHUNK_BITS = 2
"""Chunks of 16 KiB: a few blocks, so that a file takes several."""


def node_root(path: Path) -> str:
    """A root for layers and sandboxes; the test fails where the kernel could not mount from it."""
    need_root()
    kind = filesystem_name(str(path))
    if kind in ("tmpfs", "overlayfs", "ramfs"):
        pytest.fail(
            f"these tests mount EROFS from files, which {kind} at {path} can't do: use --basetemp", pytrace=False
        )
    root = path / "node"
    root.mkdir(exist_ok=True)
    return str(root)


@pytest.fixture(scope="session")
def mounts_unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is mounted after the tests is what was before, where this run of them may mount: other runs are theirs."""
    base = str(tmp_path_factory.getbasetemp().resolve())
    before = list(mountinfo.below(base, mountinfo.read()))
    yield
    assert list(mountinfo.below(base, mountinfo.read())) == before


def write_layer(path: Path, root: Directory, *, packs: int = 1) -> MountableLayer:
    """Write ``root`` as a metadata image and, if it has larger files, ``packs`` packs that take them in turns."""
    path.mkdir(parents=True, exist_ok=True)
    data = [bytearray() for _ in range(packs)]
    number = 0
    for _, inode in walk(root):
        if isinstance(inode, File) and inode.size > MAX_INLINE and inode.chunks is None:
            raw = content(inode)
            addresses = array("Q")
            for start in range(0, len(raw), BLOCK_SIZE << CHUNK_BITS):
                piece = raw[start : start + (BLOCK_SIZE << CHUNK_BITS)]
                pack = data[number % packs]
                addresses.append(address(number % packs + 1, len(pack) // BLOCK_SIZE))
                pack += piece + bytes(-len(piece) % BLOCK_SIZE)
                number += 1
            inode.chunks = Chunked(CHUNK_BITS, addresses)
    devices, paths = [], []
    for pack in data:
        if pack:
            digest = Digest.of(pack)
            target = path / f"pack-{digest.hex}"
            target.write_bytes(pack)
            paths.append(str(target))
            devices.append(Device(digest, len(pack) // BLOCK_SIZE))
    temporary = path / "image.new"
    with temporary.open("w+b") as stream:
        digest = write_image(root, devices, stream).digest
    image = path / digest.hex
    os.rename(temporary, image)
    return MountableLayer(digest.hex, str(image), tuple(paths))


def directory(mode: int = 0o755, *, uid: int = 0, gid: int = 0, mtime: int = 1000, xattrs: Xattrs = ()) -> Directory:
    return Directory(Attrs(stat.S_IFDIR | mode, uid, gid, mtime, 0, xattrs))


def file(data: bytes, mode: int = 0o644, *, uid: int = 0, xattrs: Xattrs = ()) -> File:
    extents = (Extent(0, len(data), Bytes(data), 0),) if data else ()
    return File(Attrs(stat.S_IFREG | mode, uid, 0, 1000, 0, xattrs), len(data), extents)


def symlink(target: bytes) -> Symlink:
    return Symlink(Attrs(stat.S_IFLNK | 0o777, 0, 0, 1000, 0), target)


def device(kind: int, major: int, minor: int) -> Special:
    return Special(Attrs(kind | 0o666, 0, 0, 1000, 0), major, minor)


def whiteout() -> Whiteout:
    return Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0))


def tree(entries: Mapping[bytes, Inode | bytes], *, root: Directory | None = None) -> Directory:
    """A tree of these paths; bytes stand for a regular file, and parents that aren't named are plain directories."""
    top = root or directory()
    for path, inode in entries.items():
        here = top
        *parents, name = path.split(b"/")
        for parent in parents:
            below = here.entries.setdefault(parent, directory())
            assert isinstance(below, Directory)
            here = below
        here.entries[name] = file(inode) if isinstance(inode, bytes) else inode
    return top


def layer_with(path: Path, entries: Mapping[bytes, Inode | bytes], *, packs: int = 1) -> MountableLayer:
    """A layer with these entries, see :func:`tree`."""
    return write_layer(path, tree(entries), packs=packs)


def three_layers(path: Path) -> list[MountableLayer]:
    """Base, workspace and toolkit: each has a file of its own and one that the next one replaces."""
    return [
        layer_with(path, {b"etc/base": b"base\n", b"etc/top": b"base\n", b"data": os.urandom(100_000)}),
        layer_with(path, {b"src/work": b"work\n", b"etc/top": b"work\n"}),
        layer_with(path, {b"opt/tool": b"tool\n", b"etc/top": b"tool\n"}),
    ]


PROGRAMS = ("sh", "cat", "id", "env", "pwd", "sleep", "ls", "touch", "dd", "hostname", "mount", "rm")


def shell_layer(path: Path, extra: Mapping[bytes, Inode | bytes] | None = None) -> MountableLayer:
    """A root filesystem of this machine's shell and a few programs, with the libraries that they load."""
    wanted = {Path(need_tool(name)) for name in PROGRAMS}
    for program in sorted(wanted):
        said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        wanted |= {Path(word) for word in said.split() if word.startswith("/")}
    entries: dict[bytes, Inode | bytes] = {
        os.fsencode(found)[1:]: file(found.read_bytes(), 0o755) for found in sorted(wanted)
    }
    entries[b"bin/sh"] = file(Path("/bin/sh").read_bytes(), 0o755)
    for name in (b"proc", b"sys", b"dev", b"tmp"):
        entries[name] = directory(0o1777 if name == b"tmp" else 0o755)
    entries[b"etc/passwd"] = b"root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n"
    entries[b"etc/group"] = b"root:x:0:\napp:x:1001:\nstaff:x:50:app\n"
    return layer_with(path, {**entries, **(extra or {})})

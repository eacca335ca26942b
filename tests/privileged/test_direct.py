"""Mode direct on the kernel: raw packs read where they lie, and what happens when they change there."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import sandboxes
from support.conversions import Site, noise
from support.sharedfs import KINDS, Shared, shared
from support.tars import directory, file, hardlink, symlink, tar
from support.trees import Row, manifest

from imgtool.cli import run
from layerstore.cache.metadata import MetadataCache
from layerstore.errors import CorruptError, NotFoundError, UnavailableError, UnsupportedError
from layerstore.image import Image, Layer, Role, load_image
from layerstore.pack.reader import PackReader
from layerstore.rawpacks import packs_of, plan_removal, publish_raw, remove_raw
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.memory import MemoryStore
from layerstore.store.verification import verify
from layerstore.tree.local import scan
from overlay import direct, mountinfo
from overlay.erofs import mount_erofs
from overlay.layers import MountableLayer
from overlay.mountapi import MNT_DETACH, umount
from overlay.sandbox import Sandboxes

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

BLOCK = 4096
DATA = noise(96 * BLOCK, 5)
BASE = tar(
    directory("lib"),
    *(file(f"lib/{number}", noise(9_000 * number + 1, number)) for number in range(1, 9)),
    file("small", b"inline"),
    symlink("link", "lib/1"),
    hardlink("hard", "lib/2"),
)
WORK = tar(file("lib/3", noise(70_000, 30)), file("src/data", DATA), hardlink("src/again", "src/data"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """A node's root. At the end nothing may be mounted in it; what is, is unmounted and fails the test."""
    made = sandboxes.node_root(tmp_path)
    yield made
    left = list(mountinfo.below(made, mountinfo.read()))
    for mounted in left:
        umount(mounted.target, MNT_DETACH)
    assert left == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    """A base and a workspace that uses packs of its own and of the base, as ``work``."""
    site = Site(tmp_path_factory.mktemp("source"))
    site.convert(site.image([BASE]), tag="base")
    site.convert(site.image([BASE, WORK]), Role.WORKSPACE, base="base", tag="work")
    site.convert(site.image([BASE, WORK]), tag="both")
    assert len(load_image(site.store, "both").layers[0].packs) > 1, "it is to have several devices"
    return site.store


@pytest.fixture(params=KINDS)
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    with shared(request.param, tmp_path / "fs") as found:
        yield found


def publish(source: DirectoryStore, path: Path, *names: str) -> DirectoryStore:
    store = DirectoryStore.create(str(path / "store"))
    for name in names:
        copy(name, source, store)
    publish_raw(store, names)
    return store


def devices_of(store: DirectoryStore, layer: Layer, path: Path) -> tuple[str, ...]:
    """The packs as the eager mode has them: whole files on the node's own file system."""
    found = []
    for number, pack in enumerate(layer.packs):
        with store.open(pack.blob) as blob:
            found.append(str(path / f"pack{number}-{pack.digest.hex}"))
            Path(found[-1]).write_bytes(PackReader(pack, blob).read_at(0, pack.raw_size))
    return tuple(found)


def metadata(root: str, image: Image, store: DirectoryStore) -> list[str]:
    cache = MetadataCache(os.path.join(root, "cache", "meta"))
    return [cache.ensure(layer, store) for layer in image.layers]


def direct_layers(root: str, store: DirectoryStore, name: str, **options: bool) -> list[MountableLayer]:
    image = load_image(store, name)
    paths = metadata(root, image, store)
    return [
        direct.mountable(layer, store, path, name=name, **options)
        for layer, path in zip(image.layers, paths, strict=True)
    ]


def seen(path: str) -> dict[bytes, Row]:
    """All that a program sees below ``path``, content included."""
    return manifest(scan(path, warn=[].append))


# ---- the same bytes


@pytest.mark.parametrize("name", ["both", "work"])
def test_every_byte_is_that_of_the_eager_mode(
    root: str, source: DirectoryStore, on: Shared, tmp_path: Path, name: str
) -> None:
    store = publish(source, on.path, name)
    image = load_image(store, name)
    eager = [
        MountableLayer(layer.metadata.hex, path, devices_of(store, layer, tmp_path))
        for layer, path in zip(image.layers, metadata(root, image, store), strict=True)
    ]
    node = Sandboxes(root)
    there = node.create(direct_layers(root, store, name), image={}, mode="direct")
    here = node.create(eager, image={}, mode="eager")
    assert there.state.mounts == tuple(f"{digest}.direct" for digest in there.state.layers)
    assert sorted(node.layers.mounted()) == sorted({*there.state.mounts, *here.state.mounts})
    assert seen(there.rootfs) == seen(here.rootfs)
    assert Path(there.rootfs, "src/data").read_bytes() == DATA
    Path(there.rootfs, "src/data").write_bytes(b"copied up")
    assert Path(there.rootfs, "src/data").read_bytes() == b"copied up"
    assert Path(here.rootfs, "src/data").read_bytes() == DATA
    for sandbox in (there, here):
        node.remove(sandbox.id)
    assert list(verify(store)) == []


def test_packs_are_not_copied_to_the_node(root: str, source: DirectoryStore, tmp_path: Path) -> None:
    store = publish(source, tmp_path, "both")
    (layer,) = direct_layers(root, store, "both")
    packs = packs_of(store, ["both"])
    assert layer.devices == tuple(store.local_path(pack.digest) for pack in packs)
    on_the_node = [path for path in Path(root).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in on_the_node) < sum(pack.raw_size for pack in packs) / 4


# ---- refused before the mount


def test_what_is_not_stored_raw_is_named_with_the_command_that_does_it(
    root: str, source: DirectoryStore, tmp_path: Path
) -> None:
    store = DirectoryStore.create(str(tmp_path / "store"))
    copy("both", source, store)
    packs = packs_of(store, ["both"])
    with pytest.raises(NotFoundError) as caught:
        direct_layers(root, store, "both")
    message = str(caught.value)
    assert message.startswith(f"{len(packs)} of {len(packs)} packs of layer ")
    assert all(pack.digest.hex[:12] in message for pack in packs)
    command = message.partition("run `imgtool ")[2].removesuffix("`").split()
    assert command == ["raw", "both", "--store", str(tmp_path / "store")]
    assert run(command) == 0
    node = Sandboxes(root)
    sandbox = node.create(direct_layers(root, store, "both"), image={}, mode="direct")
    assert Path(sandbox.rootfs, "src/data").read_bytes() == DATA
    node.remove(sandbox.id)
    os.unlink(store.local_path(packs[0].digest))
    with pytest.raises(NotFoundError, match=rf"^1 of {len(packs)} packs.*{packs[0].digest.hex[:12]}"):
        direct_layers(root, store, "both")


def test_a_store_that_is_no_directory(root: str, source: DirectoryStore) -> None:
    memory = MemoryStore()
    copy("both", source, memory)
    (layer,) = load_image(memory, "both").layers
    with pytest.raises(UnsupportedError, match="memory: is no directory"):
        direct.raw_devices(layer, memory)


def test_a_store_that_is_gone_is_unavailable(root: str, source: DirectoryStore, tmp_path: Path) -> None:
    store = publish(source, tmp_path, "both")
    (layer,) = load_image(store, "both").layers
    os.rename(store.root, tmp_path / "unmounted")
    with pytest.raises(UnavailableError, match="is it mounted"):
        direct.raw_devices(layer, store)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - BLOCK)


def extended(path: Path) -> None:
    os.truncate(path, path.stat().st_size + BLOCK)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def made_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (truncated, CorruptError),
        (extended, CorruptError),
        (emptied, CorruptError),
        (made_a_directory, UnsupportedError),
        (made_a_fifo, UnsupportedError),
    ],
)
def test_what_is_wrong_is_refused_before_the_mount(
    root: str,
    source: DirectoryStore,
    on: Shared,
    damage: Callable[[Path], None],
    error: type[Exception],
) -> None:
    store = publish(source, on.path, "both")
    pack = packs_of(store, ["both"])[-1]
    path = Path(store.local_path(pack.digest))
    damage(path)
    with pytest.raises(error, match=r"raw pack .*run `imgtool raw both"):
        direct_layers(root, store, "both")
    assert list(mountinfo.below(root, mountinfo.read())) == []
    if path.is_file():
        publish_raw(store, ["both"])
        assert direct_layers(root, store, "both", verify=True)


def test_the_mount_looks_once_more(root: str, source: DirectoryStore, tmp_path: Path) -> None:
    store = publish(source, tmp_path, "both")
    layers = direct_layers(root, store, "both")
    truncated(Path(layers[0].devices[0]))
    with pytest.raises(CorruptError, match="too short"):
        Sandboxes(root).create(layers, image={}, mode="direct")


@pytest.mark.case("C05")
def test_bytes_are_verified_when_that_is_asked_for(root: str, source: DirectoryStore, tmp_path: Path) -> None:
    store = publish(source, tmp_path, "both")
    assert direct_layers(root, store, "both", verify=True)
    pack = packs_of(store, ["both"])[0]
    path = Path(store.local_path(pack.digest))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"raw pack {pack.digest} is damaged.*run `imgtool raw both"):
        direct_layers(root, store, "both", verify=True)
    assert direct_layers(root, store, "both"), "a size says nothing of bytes"
    assert "nothing when it is read" in direct.verification(False)
    assert "sha256" in direct.verification(True)
    assert "sha256" not in direct.verification(False)


# ---- what happens under a mount


@pytest.fixture
def mounted(root: str, source: DirectoryStore, on: Shared, tmp_path: Path) -> Iterator[tuple[Shared, Path, Path]]:
    """The file system, the raw pack of one file of ``DATA`` as its owner sees it, and the file as programs do."""
    layer = sandboxes.layer_with(tmp_path / "one", {b"data": DATA})
    for name in ("store", "mnt"):
        (tmp_path / name).mkdir()
    pack = on.backing / "pack"
    pack.write_bytes(Path(layer.devices[0]).read_bytes())
    assert pack.stat().st_size == len(DATA)
    mount_erofs(layer.image, [str(on.path / "pack")], str(tmp_path / "mnt"))
    try:
        yield on, pack, tmp_path / "mnt" / "data"
    finally:
        umount(str(tmp_path / "mnt"), MNT_DETACH)


def forget_pages() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def blocks(path: Path) -> list[bytes | None]:
    """Each block of a file alone, without read-ahead; None for EIO."""
    found: list[bytes | None] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, len(DATA), BLOCK):
            try:
                found.append(os.pread(fd, BLOCK, at))
            except OSError as error:
                assert error.errno == errno.EIO, error
                found.append(None)
    finally:
        os.close(fd)
    return found


RIGHT = [DATA[at : at + BLOCK] for at in range(0, len(DATA), BLOCK)]
ZERO_FILLS = tuple(int(part) for part in platform.release().split(".")[:2]) >= (7, 0)
"""Whether the kernel fills up the block in which a device ends: before Linux 7.0 it gives EIO."""


@pytest.mark.case("D01")
@pytest.mark.parametrize("left", [0, 1, BLOCK - 1, 40 * BLOCK, 40 * BLOCK + 1, 41 * BLOCK - 1])
def test_what_is_cut_off_is_an_error_and_never_zeros(mounted: tuple[Shared, Path, Path], left: int) -> None:
    _, pack, path = mounted
    os.truncate(pack, left)
    forget_pages()
    found = blocks(path)
    whole, part = divmod(left, BLOCK)
    for number, block in enumerate(found):
        if number == whole and part and ZERO_FILLS:
            continue
        assert block in ((RIGHT[number], None) if number < whole else (None,)), number
    with pytest.raises(OSError, match="Input/output error"):
        path.read_bytes()


@pytest.mark.case("D01")
def test_what_was_read_before_stays_readable(mounted: tuple[Shared, Path, Path]) -> None:
    _, pack, path = mounted
    assert path.read_bytes() == DATA
    os.truncate(pack, 0)
    assert all(block in (right, None) for block, right in zip(blocks(path), RIGHT, strict=True))


def test_another_file_under_the_name_changes_nothing(mounted: tuple[Shared, Path, Path]) -> None:
    _, pack, path = mounted
    new = pack.with_name("new")
    new.write_bytes(b"x" * len(DATA))
    os.rename(new, pack)
    forget_pages()
    assert blocks(path) == RIGHT
    os.unlink(pack)
    forget_pages()
    assert blocks(path) == RIGHT


def test_what_is_written_into_a_pack_is_read(mounted: tuple[Shared, Path, Path]) -> None:
    """Why raw packs are trusted to their file system: here zeros are read, and nothing can notice."""
    _, pack, path = mounted
    os.truncate(pack, 40 * BLOCK)
    os.truncate(pack, len(DATA))
    forget_pages()
    assert blocks(path) == RIGHT[:40] + [bytes(BLOCK)] * 56


@pytest.mark.case("D01")
@pytest.mark.parametrize("on", ["fuse"], indirect=True)
def test_a_file_system_whose_server_dies_is_an_error(mounted: tuple[Shared, Path, Path]) -> None:
    on, _, path = mounted
    assert blocks(path)[:8] == RIGHT[:8]
    forget_pages()
    on.kill()
    assert blocks(path) == [None] * len(RIGHT)


def test_a_mount_outlives_removal_collection_and_quarantine(root: str, source: DirectoryStore, tmp_path: Path) -> None:
    """On a local file system, which keeps what is open."""
    node = Sandboxes(root)
    goes: list[Callable[[DirectoryStore], object]] = [
        lambda store: remove_raw(store, plan_removal(store, ["both"])),
        lambda store: (
            store.delete_reference("both", expected=store.resolve("both")),
            collect(store, plan_collection(store, grace=0, force=True)),
        ),
    ]
    for number, go in enumerate(goes):
        store = publish(source, tmp_path / str(number), "both")
        packs = packs_of(store, ["both"])
        sandbox = node.create(direct_layers(root, store, "both"), image={}, mode="direct")
        go(store)
        assert not any(os.path.exists(store.local_path(pack.digest)) for pack in packs)
        forget_pages()
        assert Path(sandbox.rootfs, "src/data").read_bytes() == DATA
        node.remove(sandbox.id)

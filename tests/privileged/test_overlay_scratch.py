from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sandboxes
from support.sandboxes import layer_with
from support.tools import need_tool

from layerstore.errors import UnavailableError, UnsupportedError
from overlay import mountinfo
from overlay import scratch as scratch_module
from overlay.layers import MountableLayer
from overlay.mountapi import MNT_DETACH, umount
from overlay.sandbox import Sandboxes
from overlay.scratch import MINIMUM, create_scratch, remove_scratch, stray_loops

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

SIZE = 16 << 20


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    need_tool("mkfs.ext4")
    made = sandboxes.node_root(tmp_path)
    yield made
    left = list(mountinfo.below(made, mountinfo.read()))
    for mounted in left:
        umount(mounted.target, MNT_DETACH)
    assert left == []
    assert bound_below(made) == []


@pytest.fixture
def layer(tmp_path: Path) -> MountableLayer:
    return layer_with(tmp_path / "images", {b"a": b"a"})


def bound_below(directory: str) -> list[str]:
    """Backing files of loop devices below ``directory``."""
    found = []
    for device in os.listdir("/sys/block"):
        try:
            backing = Path(f"/sys/block/{device}/loop/backing_file").read_bytes()
        except OSError:
            continue
        if backing.startswith(os.fsencode(directory) + b"/"):
            found.append(device)
    return found


def fill(path: Path) -> int:
    """Write until the filesystem is full; returns how many bytes it took."""
    written = 0
    with path.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left") as caught:
        while True:
            written += stream.write(bytes(1 << 20)) or 0
    assert caught.value.errno == errno.ENOSPC
    return written


def test_the_sandbox_sees_the_limit(root: str, layer: MountableLayer) -> None:
    node = Sandboxes(root)
    sandbox = node.create([layer], image={}, mode="eager", scratch=SIZE)
    assert sandbox.to_json()["scratch"] == SIZE
    taken = fill(Path(sandbox.rootfs, "full"))
    assert SIZE * 0.7 < taken < SIZE
    assert sandbox.upper is not None
    assert os.listdir(sandbox.upper) == ["full"]
    Path(sandbox.rootfs, "full").unlink()
    Path(sandbox.rootfs, "small").write_text("fits again")
    assert bound_below(root) != []
    node.remove(sandbox.id)
    assert os.listdir(f"{root}/sandboxes") == []


def test_the_file_is_sparse(root: str, layer: MountableLayer) -> None:
    node = Sandboxes(root)
    sandbox = node.create([layer], image={}, mode="eager", scratch=1 << 30)
    status = os.stat(sandbox.directory + "/scratch.img")
    assert status.st_size == 1 << 30
    assert status.st_blocks * 512 < 16 << 20
    node.remove(sandbox.id)


def test_many_small_files_fit(root: str, layer: MountableLayer) -> None:
    node = Sandboxes(root)
    sandbox = node.create([layer], image={}, mode="eager", scratch=SIZE)
    for number in range(1500):
        Path(sandbox.rootfs, f"file{number}").write_bytes(b"x")
    node.remove(sandbox.id)


def test_a_scratch_whose_sandbox_died_is_recovered(root: str, layer: MountableLayer) -> None:
    node = Sandboxes(root)
    sandbox = node.create([layer], image={}, mode="eager", scratch=SIZE)
    os.unlink(sandbox.directory + "/state.json")
    assert [found.kind for found in node.recover()] == ["part of a sandbox"]
    assert os.listdir(f"{root}/sandboxes") == []


def test_a_loop_device_without_a_mount_is_freed(root: str) -> None:
    losetup = need_tool("losetup")
    os.makedirs(f"{root}/sandboxes")
    image = f"{root}/sandboxes/scratch.img"
    with open(image, "wb") as stream:
        stream.truncate(SIZE)
    assert os.spawnl(os.P_WAIT, losetup, losetup, "-f", image) == 0
    mounted = {mount.device for mount in mountinfo.read()}
    (device,) = bound_below(root)
    assert list(stray_loops(f"{root}/sandboxes", mounted)) == [f"/dev/{device}"]
    assert bound_below(root) == []


def test_loop_devices_of_standing_sandboxes_are_left_alone(root: str, layer: MountableLayer) -> None:
    node = Sandboxes(root)
    sandbox = node.create([layer], image={}, mode="eager", scratch=SIZE)
    assert node.recover() == []
    Path(sandbox.rootfs, "works").write_text("x")
    node.remove(sandbox.id)


def test_a_missing_program_is_named_and_nothing_stays(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(UnsupportedError, match="install e2fsprogs"):
        create_scratch(root, SIZE)
    assert os.listdir(root) == []


def test_a_failing_program_is_quoted_and_nothing_stays(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "_MOUNT_OPTIONS", "loop,nonsense=1")
    with pytest.raises(UnavailableError, match=r"mount for --scratch failed.*nonsense|wrong fs type"):
        create_scratch(root, MINIMUM)
    assert os.listdir(root) == []


def test_removing_what_is_not_there(root: str) -> None:
    remove_scratch(root)
    assert os.listdir(root) == []

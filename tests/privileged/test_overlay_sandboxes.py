"""Layers and sandboxes from creation to removal, and every way to be interrupted between."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import sandboxes
from support.sandboxes import directory, layer_with, three_layers, tree, write_layer

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnsupportedError,
    UsageError,
)
from overlay import detached, mountinfo
from overlay import layers as layers_module
from overlay import sandbox as sandbox_module
from overlay import scratch as scratch_module
from overlay.layers import LayerMounts, Leftover, MountableLayer
from overlay.mountapi import MNT_DETACH, FsContext, mount, umount
from overlay.sandbox import Sandbox, Sandboxes

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """A node's root. At the end nothing may be mounted in it; what is, is unmounted and fails the test."""
    made = sandboxes.node_root(tmp_path)
    yield made
    left = list(mountinfo.below(made, mountinfo.read()))
    for mounted in left:
        umount(mounted.target, MNT_DETACH)
    assert left == []


@pytest.fixture
def layers(tmp_path: Path) -> list[MountableLayer]:
    return three_layers(tmp_path / "images")


def create(node: Sandboxes, layers: list[MountableLayer], **options: object) -> Sandbox:
    arguments: dict[str, object] = {"image": {"name": "test"}, "mode": "eager", **options}
    return node.create(layers, **arguments)  # type: ignore[arg-type]


def left_in(root: str) -> list[str]:
    """What there is below the directories of layers and sandboxes, and what is mounted there."""
    found = [os.fsdecode(mounted.target) for mounted in mountinfo.below(root, mountinfo.read())]
    for name in ("layers", "sandboxes"):
        if os.path.isdir(f"{root}/{name}"):
            found += [f"{name}/{entry}" for entry in os.listdir(f"{root}/{name}")]
    return found


# ---- a life


def test_from_creation_to_removal(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box", receipt={"manifest": "sha256:00"})
    assert Path(sandbox.rootfs, "etc/top").read_text() == "tool\n"
    assert Path(sandbox.rootfs, "etc/base").read_text() == "base\n"
    Path(sandbox.rootfs, "written").write_text("x")
    assert sandbox.upper is not None
    assert os.listdir(sandbox.upper) == ["written"]
    assert node.list() == [node.get("box")] == [sandbox]
    assert node.stands(sandbox)
    assert sorted(layer.digest for layer in layers) == node.layers.mounted()
    removal = node.remove("box")
    assert (removal.existed, removal.stopped, removal.holders) == (True, (), ())
    assert left_in(root) == []
    assert node.remove("box").existed is False
    assert node.list() == []


def test_json_of_a_sandbox(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, receipt={"a": 1})
    document = json.loads(json.dumps(sandbox.to_json()))
    assert document["id"] == sandbox.id
    assert document["rootfs"] == f"{root}/sandboxes/{sandbox.id}/rootfs"
    assert (document["mode"], document["receipt"], document["image"]) == ("eager", {"a": 1}, {"name": "test"})
    assert document["layers"] == [f"sha256:{layer.digest}" for layer in layers]
    node.remove(sandbox.id)


def test_layers_are_shared_and_go_with_the_last(root: str, layers: list[MountableLayer]) -> None:
    node, other = Sandboxes(root), Sandboxes(root)
    first = create(node, layers)
    second = create(other, layers[:1])
    mounts = [mounted for mounted in mountinfo.below(root, mountinfo.read()) if mounted.fs_type == b"erofs"]
    assert len(mounts) == 3
    assert node.layers.users(layers[0].digest) == sorted([first.id, second.id])
    node.remove(first.id)
    assert other.layers.mounted() == [layers[0].digest]
    assert Path(second.rootfs, "etc/base").read_text() == "base\n"
    other.remove(second.id)
    assert left_in(root) == []


@pytest.mark.case("T12")
@pytest.mark.parametrize("count", [1, 3])
def test_read_only(root: str, layers: list[MountableLayer], count: int) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers[:count], read_only=True)
    assert sandbox.upper is None
    assert Path(sandbox.rootfs, "etc/base").read_text() == "base\n"
    with pytest.raises(OSError, match="Read-only"):
        Path(sandbox.rootfs, "etc/base").write_text("x")
    node.remove(sandbox.id)
    assert left_in(root) == []


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_root_directory_looks_as_the_topmost_layer_says(
    root: str, tmp_path: Path, read_only: bool, mask: int
) -> None:
    base = layer_with(tmp_path / "images", {b"a": b"a"})
    attributes = directory(0o1775, uid=12, gid=34, mtime=99, xattrs=((b"user.note", b"n"),))
    top = write_layer(tmp_path / "images", tree({b"b": b"b"}, root=attributes))
    node = Sandboxes(root)
    before = os.umask(mask)
    try:
        sandbox = create(node, [base, top], read_only=read_only)
    finally:
        os.umask(before)
    status = os.stat(sandbox.rootfs)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime) == (0o1775, 12, 34, 99)
    assert os.getxattr(sandbox.rootfs, "user.note") == b"n"
    node.remove(sandbox.id)


def test_others_than_root_can_not_look_in(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers)
    for name in ("layers", "sandboxes", f"sandboxes/{sandbox.id}"):
        assert stat.S_IMODE(os.stat(f"{root}/{name}").st_mode) == 0o700
    node.remove(sandbox.id)


@pytest.mark.parametrize("id", ["", "a/b", "..", ".hidden", "-rf", "A", "a" * 64, "a\n", "é", "a b"])
def test_ids_are_no_paths(root: str, layers: list[MountableLayer], id: str) -> None:
    node = Sandboxes(root)
    for call in (lambda: create(node, layers, id=id), lambda: node.get(id), lambda: node.remove(id)):
        with pytest.raises(UsageError, match="not a sandbox id"):
            call()
    assert left_in(root) == []


def test_an_id_is_taken_once(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="a" * 63)
    with pytest.raises(ConflictError, match="exists"):
        create(node, layers, id="a" * 63)
    assert node.stands(sandbox)
    node.remove("a" * 63)


@pytest.mark.parametrize(
    ("options", "count", "error"),
    [({}, 0, UsageError), ({"read_only": True, "scratch": 1 << 24}, 1, UsageError), ({"scratch": 1}, 1, UsageError)],
)
def test_requests_that_make_no_sense(
    root: str, layers: list[MountableLayer], options: dict[str, object], count: int, error: type[ImgtoolError]
) -> None:
    with pytest.raises(error):
        create(Sandboxes(root), layers[:count], **options)
    assert left_in(root) == []


def test_a_layer_named_twice(root: str, layers: list[MountableLayer]) -> None:
    with pytest.raises(UsageError, match="twice"):
        create(Sandboxes(root), [layers[0], layers[0]])


@pytest.mark.case("O01")
def test_a_hundred_and_twenty_eight_layers_under_a_long_root(tmp_path: Path) -> None:
    far = tmp_path / ("p" * 200)
    far.mkdir()
    root = sandboxes.node_root(far)
    layers = [
        layer_with(tmp_path / "images", {b"file%d" % number: b"%d" % number, b"same": b"%d" % number})
        for number in range(128)
    ]
    node = Sandboxes(root)
    sandbox = create(node, layers)
    assert len(os.listdir(sandbox.rootfs)) == 129
    assert Path(sandbox.rootfs, "same").read_text() == "127"
    node.remove(sandbox.id)
    assert left_in(root) == []


@pytest.mark.case("O01")
def test_what_was_mounted_before_a_failure_is_unmounted(root: str, layers: list[MountableLayer]) -> None:
    os.unlink(layers[2].image)
    node = Sandboxes(root)
    with pytest.raises(NotFoundError, match="No such file"):
        create(node, layers, id="box")
    assert left_in(root) == []
    standing = create(node, layers[:1])
    with pytest.raises(NotFoundError):
        create(node, layers)
    assert node.layers.mounted() == [layers[0].digest]
    node.remove(standing.id)


@pytest.mark.case("O04")
def test_a_root_of_any_name(tmp_path: Path, layers: list[MountableLayer]) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/a:b,c\\d e\nf\xff%s")
    os.mkdir(odd)
    node = Sandboxes(odd)
    sandbox = create(node, layers)
    Path(sandbox.rootfs, "written").write_text("x")
    assert Path(sandbox.rootfs, "etc/top").read_text() == "tool\n"
    assert json.loads(json.dumps(sandbox.to_json()))["rootfs"] == sandbox.rootfs
    os.unlink(f"{sandbox.directory}/state.json")
    assert [found.kind for found in node.recover()] == ["part of a sandbox"]
    assert left_in(odd) == []


def test_set_user_id_programs_work_in_a_sandbox_and_not_on_the_layers(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers)
    options = {mounted.fs_type: set(mounted.options.split(b",")) for mounted in mountinfo.below(root, mountinfo.read())}
    assert b"nosuid" in options[b"erofs"]
    assert b"nosuid" not in options[b"overlay"]
    assert b"nodev" in options[b"erofs"] & options[b"overlay"]
    node.remove(sandbox.id)


# ---- an upper belongs to its layers


@pytest.mark.case("O06")
def test_an_upper_is_mounted_again_over_its_own_layers_only(root: str, tmp_path: Path) -> None:
    base = layer_with(tmp_path / "images", {b"a": b"a", b"b": b"b"})
    rebuilt = layer_with(tmp_path / "images", {b"a": b"a", b"b": b"b", b"c": b"c"})
    node = Sandboxes(root)
    sandbox = create(node, [base])
    Path(sandbox.rootfs, "a").write_text("changed")
    umount(sandbox.rootfs)
    assert not node.stands(sandbox)
    for other in ([rebuilt], [base, rebuilt], []):
        with pytest.raises(ConflictError, match="was written over layers"):
            node.resume(sandbox.id, other)
        assert not node.stands(sandbox)
    assert node.resume(sandbox.id, [base]) == sandbox
    assert node.resume(sandbox.id, [base]) == sandbox  # standing already
    assert Path(sandbox.rootfs, "a").read_text() == "changed"
    node.remove(sandbox.id)
    assert left_in(root) == []


@pytest.mark.case("O06")
def test_an_upper_from_before_a_restart_is_not_trusted(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers)
    umount(sandbox.rootfs)
    path = Path(sandbox.directory, "state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    with pytest.raises(ConflictError, match="last start"):
        node.resume(sandbox.id, layers)
    node.remove(sandbox.id)


@pytest.mark.parametrize("options", [{}, {"read_only": True}, {"scratch": 8 << 20}])
def test_suspended_and_resumed(root: str, layers: list[MountableLayer], options: dict[str, object]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box", **options)
    if sandbox.upper is not None:
        Path(sandbox.rootfs, "written").write_text("x")
    for _ in range(2):
        assert node.suspend("box") == []
        assert not sandbox.stands
        assert node.layers.mounted() == []
        assert node.get("box") == sandbox
    assert node.resume("box", layers) == sandbox
    assert Path(sandbox.rootfs, "etc/top").read_text() == "tool\n"
    if sandbox.upper is not None:
        assert Path(sandbox.rootfs, "written").read_text() == "x"
    node.suspend("box")
    assert node.remove("box").existed
    assert left_in(root) == []


def test_only_the_last_to_leave_takes_the_layers_along(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    create(node, layers, id="one")
    other = create(node, layers[:1], id="two")
    node.suspend("one")
    assert node.layers.mounted() == [layers[0].digest]
    assert Path(other.rootfs, "etc/base").read_text() == "base\n"
    node.suspend("two")
    assert node.layers.mounted() == []
    for name in ("one", "two"):
        node.remove(name)
    assert left_in(root) == []


def test_resumed_in_another_variant(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    create(node, layers, id="box", mode="lazy")
    other = [replace(layer, variant="fuse-2") for layer in layers[:2]] + layers[2:]
    node.suspend("box")
    sandbox = node.resume("box", other)
    assert sandbox.state.mounts == tuple(layer.key for layer in other)
    assert node.get("box") == sandbox
    assert node.layers.mounted() == sorted(layer.key for layer in other)
    assert Path(sandbox.rootfs, "etc/top").read_text() == "tool\n"
    umount(sandbox.rootfs)  # not by suspend: it has not left its layers
    assert node.resume("box", layers).state.mounts == tuple(layer.digest for layer in layers)
    assert node.layers.mounted() == sorted(layer.digest for layer in layers)
    node.remove("box")
    assert left_in(root) == []


def test_what_is_in_use_is_not_suspended(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    idle = create(node, layers, id="idle")
    with subprocess.Popen(["sleep", "600"], cwd=sandbox.rootfs) as process:
        try:
            assert list(node.busy(["box", "idle", "nothing"])) == ["box"]
            with pytest.raises(ConflictError, match=rf"sandbox box is in use by sleep \(pid {process.pid}, cwd\)"):
                node.suspend("box")
            with pytest.raises(ConflictError, match=rf"in use by sleep \(pid {process.pid}"):
                node.suspend("box", holders=[])  # the kernel knows better than who was asked before
            assert sandbox.stands
            assert node.layers.users(layers[0].digest) == ["box", "idle"]
            assert [holder.pid for holder in node.suspend("box", force=True)] == [process.pid]
            assert not sandbox.stands
        finally:
            process.kill()
    assert idle.stands
    assert node.busy(["box", "idle"]) == {}
    for name in ("box", "idle"):
        node.remove(name)
    assert left_in(root) == []


def test_a_program_in_another_mount_namespace_is_in_the_way(root: str, layers: list[MountableLayer]) -> None:
    """The kernel would let go of our mount, and a second one would share the upper with the one it has."""
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    command = ["unshare", "--mount", "sh", "-c", f"cd {sandbox.rootfs} && echo there && exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            with pytest.raises(ConflictError, match=f"pid {process.pid}"):
                node.suspend("box")
            assert sandbox.stands
        finally:
            process.kill()
    node.remove("box")
    assert left_in(root) == []


def test_a_mount_inside_is_in_the_way(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    mount("tmpfs", sandbox.rootfs + "/src", "tmpfs", 0)
    with pytest.raises(ConflictError, match="mounted in it"):
        node.suspend("box")
    assert sandbox.stands
    assert node.suspend("box", force=True) == []
    node.remove("box")
    assert left_in(root) == []


def test_a_receipt_is_replaced_as_a_whole(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box", receipt={"a": 1})
    Path(sandbox.directory, "state.new").write_text("left by a killed writer, and longer than what comes" * 100)
    changed = node.update_receipt("box", {"b": [2]})
    assert changed.state == replace(sandbox.state, receipt={"b": [2]})
    assert node.get("box") == changed
    assert os.listdir(sandbox.directory).count("state.new") == 0
    with pytest.raises(UsageError, match="more than"):
        node.update_receipt("box", {"b": "x" * (1 << 20)})
    assert node.get("box") == changed
    node.remove("box")
    for call in (lambda: node.update_receipt("box", {}), lambda: node.suspend("box")):
        with pytest.raises(NotFoundError, match="no sandbox box"):
            call()
    assert left_in(root) == []


def test_a_receipt_that_can_not_be_written_leaves_the_old_one(
    root: str, layers: list[MountableLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box", receipt={"a": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: len(data) - 1)
        with pytest.raises(NoSpaceError):
            node.update_receipt("box", {"b": 2})
    assert node.get("box") == sandbox
    assert not Path(sandbox.directory, "state.new").exists()
    node.remove("box")


def test_resuming_what_is_not_there(root: str, layers: list[MountableLayer]) -> None:
    with pytest.raises(NotFoundError, match="no sandbox"):
        Sandboxes(root).resume("box", layers)


# ---- removal


def test_who_is_in_the_way_is_named_and_does_not_stop_it(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers)
    with subprocess.Popen(["sleep", "600"], cwd=sandbox.rootfs) as process:
        try:
            removal = node.remove(sandbox.id)
        finally:
            process.kill()
    assert [(holder.pid, holder.how) for holder in removal.holders] == [(process.pid, "cwd")]
    assert left_in(root) == []


def test_a_layer_that_somebody_looks_at_is_detached(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers[:1])
    with subprocess.Popen(["sleep", "600"], cwd=f"{root}/layers/{layers[0].digest}/mnt/etc") as process:
        try:
            node.remove(sandbox.id)
            again = create(node, layers[:1])
            assert Path(again.rootfs, "etc/base").read_text() == "base\n"
            node.remove(again.id)
        finally:
            process.kill()
    assert left_in(root) == []


def test_an_upper_of_any_content_is_deleted(root: str, layers: list[MountableLayer], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("kept")
    node = Sandboxes(root)
    sandbox = create(node, layers)
    inside = Path(sandbox.rootfs)
    (inside / "link").symlink_to(outside)
    (inside / "sub").mkdir()
    (inside / "sub/immutable").write_text("x")
    (inside / "etc/base").unlink()
    os.mkfifo(inside / "fifo")
    deep = os.open(inside, os.O_RDONLY)
    for _ in range(150):
        os.mkdir("deep", dir_fd=deep)
        below = os.open("deep", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    subprocess.run(["chattr", "+i", inside / "sub/immutable"], check=True)
    subprocess.run(["chattr", "+a", inside / "sub"], check=True)
    node.remove(sandbox.id)
    assert left_in(root) == []
    assert (outside / "keep").read_text() == "kept"


def test_what_was_mounted_inside_goes_too(root: str, layers: list[MountableLayer], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("kept")
    node = Sandboxes(root)
    sandbox = create(node, layers)
    mount("tmpfs", sandbox.rootfs + "/src", "tmpfs", 0)
    mount("tmpfs", sandbox.rootfs, "tmpfs", 0)
    node.remove(sandbox.id)
    assert left_in(root) == []
    assert (outside / "keep").exists()


def test_a_mount_in_the_upper_stops_the_deletion(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers)
    assert sandbox.upper is not None
    os.mkdir(sandbox.upper + "/volume")
    mount("tmpfs", sandbox.upper + "/volume", "tmpfs", 0)
    Path(sandbox.upper, "volume/file").write_text("x")
    with pytest.raises(ImgtoolError, match=r"busy|mounted"):
        node.remove(sandbox.id)
    assert Path(sandbox.directory, "upper/volume/file").read_text() == "x"
    umount(sandbox.directory + "/upper/volume")
    assert node.remove(sandbox.id).existed
    assert left_in(root) == []


# ---- what crashes leave


def test_nothing_to_recover(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    assert node.recover() == []
    sandbox = create(node, layers)
    assert node.recover() == []
    assert node.stands(sandbox)
    node.remove(sandbox.id)


def test_leftovers_are_found_named_and_cleared(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    keep = create(node, layers[:1], id="keep")
    half = create(node, layers, id="half")
    os.unlink(half.directory + "/state.json")
    os.makedirs(f"{root}/sandboxes/empty/upper")
    os.link(f"{root}/layers/{layers[0].digest}/lock", f"{root}/layers/{layers[0].digest}/users/ghost")
    os.mkdir(f"{root}/layers/{'ab' * 32}")
    Path(root, "sandboxes/UNKNOWN").touch()
    found = node.recover()
    assert [(item.kind, os.path.relpath(item.path, root)) for item in found[:3]] == [
        ("unknown name", "sandboxes/UNKNOWN"),
        ("part of a sandbox", "sandboxes/empty"),
        ("part of a sandbox", "sandboxes/half"),
    ]
    assert {(item.kind, os.path.relpath(item.path, root)) for item in found[3:]} == {
        ("layer user", f"layers/{layers[0].digest}/users/ghost"),
        ("layer without users", f"layers/{'ab' * 32}"),
    }
    assert node.list() == [keep]
    assert Path(keep.rootfs, "etc/base").read_text() == "base\n"
    assert node.layers.mounted() == [layers[0].digest]
    os.unlink(f"{root}/sandboxes/UNKNOWN")
    assert node.recover() == []
    node.remove("keep")
    assert left_in(root) == []


def test_a_mount_that_belongs_to_nobody_is_unmounted(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    os.makedirs(f"{root}/sandboxes/box/odd")
    Path(root, "sandboxes/box/state.json").write_text("{}")
    mount("tmpfs", f"{root}/sandboxes/box/odd", "tmpfs", 0)
    found = node.recover()
    assert [item.kind for item in found] == ["sandbox", "mount"]
    assert "imgtool down box" in found[0].action
    assert found[1].path == f"{root}/sandboxes/box/odd"
    node.remove("box")
    assert left_in(root) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"magic": "imgtool-sandbox", "version": 99}'])
def test_a_sandbox_whose_state_can_not_be_read_can_be_removed(
    root: str, layers: list[MountableLayer], text: str
) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    Path(sandbox.directory, "state.json").write_text(text)
    with pytest.raises((MalformedError, UnsupportedError)):
        node.get("box")
    assert node.list() == []
    assert [item.kind for item in node.recover()] == ["sandbox"]
    assert node.remove("box").existed
    assert left_in(root) == []


def test_a_sandbox_without_mounts_is_reported_and_kept(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    umount(sandbox.rootfs)
    assert node.recover() == [
        Leftover("sandbox", sandbox.directory, "kept: not mounted; `imgtool down box` removes it")
    ]
    assert node.list() == [sandbox]
    node.remove("box")


def test_what_came_after_the_mounts_were_listed_is_left_alone(
    root: str, layers: list[MountableLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id is removed and made again while recovery looks at the mounts that there were before."""
    node = Sandboxes(root)
    create(node, layers, id="box")
    stale = mountinfo.read()
    node.remove("box")

    def listed() -> list[mountinfo.Mount]:
        monkeypatch.setattr(mountinfo, "read", real)
        create(Sandboxes(root), layers, id="late")
        return stale

    real = mountinfo.read
    monkeypatch.setattr(mountinfo, "read", listed)
    assert node.recover() == []
    sandbox = node.get("late")
    assert Path(sandbox.rootfs, "etc/top").read_text() == "tool\n"
    assert node.layers.mounted() == sorted(layer.digest for layer in layers)
    node.remove("late")
    assert left_in(root) == []


def test_what_is_being_made_is_left_alone(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    os.makedirs(f"{root}/sandboxes/busy")
    fd = os.open(f"{root}/sandboxes/busy", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert node.recover() == []
    os.close(fd)
    assert [item.kind for item in node.recover()] == ["part of a sandbox"]


def die_at(count: int) -> None:
    """In a child: be killed just before the ``count``th call that changes something."""
    left = count

    def counting(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **keywords: object) -> object:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)

        return call

    for name in ("mkdir", "link", "unlink", "rmdir", "rename", "chmod", "open"):
        setattr(os, name, counting(getattr(os, name)))
    setattr(fcntl, "flock", counting(fcntl.flock))  # noqa: B010 - its type says that it can't be
    for module in (layers_module, sandbox_module, scratch_module):
        module.umount = counting(umount)  # type: ignore[attr-defined]
    FsContext.create = counting(FsContext.create)  # type: ignore[assignment, method-assign]
    FsContext.mount = counting(FsContext.mount)  # type: ignore[assignment, method-assign]


def in_child(work: Callable[[], object]) -> int:
    """The exit code of ``work`` in a forked child: 0, 1 for an exception, -9 when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("options", [{}, {"read_only": True}])
def test_killed_at_any_point_of_creation(root: str, layers: list[MountableLayer], options: dict[str, object]) -> None:
    node = Sandboxes(root)
    count, code = 0, -9
    while code == -9:
        count += 1

        def work(count: int = count) -> None:
            fresh = Sandboxes(root)
            die_at(count)
            create(fresh, layers[:2], id="box", **options)

        code = in_child(work)
        node.recover()
        assert [sandbox.id for sandbox in node.list()] == (["box"] if code == 0 else [])
        if code == -9:
            assert left_in(root) == []
    assert code == 0
    assert count > 25
    assert Path(node.get("box").rootfs, "etc/top").read_text() == "work\n"
    node.remove("box")
    assert left_in(root) == []


def test_killed_at_any_point_of_removal(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    count, code = 0, -9
    while code == -9:
        count += 1
        if not node.list():
            Path(create(node, layers[:2], id="box").rootfs, "written").write_text("x")

        def work(count: int = count) -> None:
            fresh = Sandboxes(root)
            die_at(count)
            fresh.remove("box")

        code = in_child(work)
        node.recover()
        assert [node.stands(sandbox) for sandbox in node.list()] in ([True], [])  # whole, or gone
        if not node.list():
            assert left_in(root) == []
    assert code == 0
    assert count > 20
    assert left_in(root) == []


def test_killed_at_any_point_of_leaving_and_coming_back(root: str, layers: list[MountableLayer]) -> None:
    """With other variants on the way: whatever was reached, it can be resumed, and removing it leaves nothing."""
    variants = [replace(layer, variant="fuse-1") for layer in layers[:2]]
    count, code = 0, -9
    while code == -9:
        count += 1
        Path(create(Sandboxes(root), layers[:2], id="box").rootfs, "written").write_text("x")

        def work(count: int = count) -> None:
            fresh = Sandboxes(root)
            die_at(count)
            fresh.suspend("box")
            fresh.resume("box", variants)

        code = in_child(work)
        node = Sandboxes(root)
        node.recover()
        (sandbox,) = node.list()
        if count % 2 and not sandbox.stands:
            sandbox = node.resume("box", layers[:2])
        if sandbox.stands:
            assert Path(sandbox.rootfs, "written").read_text() == "x"
            assert Path(sandbox.rootfs, "etc/top").read_text() == "work\n"
            attached = [key for key in node.layers.mounted() if node.layers.users(key)]
            assert attached == sorted(sandbox.state.mounts)
        node.remove("box")
        assert left_in(root) == []
    assert code == 0
    assert count > 30


def test_many_at_once_on_one_layer(root: str, layers: list[MountableLayer]) -> None:
    """The last one out and the next one in meet all the time, with recovery between them."""
    create(Sandboxes(root), layers[:1], id="warm")
    Sandboxes(root).remove("warm")

    def churn(number: int) -> None:
        node = Sandboxes(root)
        for turn in range(15):
            sandbox = create(node, layers[: 1 + turn % 2], id=f"box{number}-{turn}")
            assert Path(sandbox.rootfs, "etc/base").read_text() == "base\n"
            node.remove(sandbox.id)

    def recovering() -> None:
        node = Sandboxes(root)
        for _ in range(15):
            node.recover()

    children = []
    works: list[Callable[[], None]] = [partial(churn, 1), partial(churn, 2), partial(churn, 3), recovering]
    for work in works:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0, 0]
    assert Sandboxes(root).recover() == []
    assert left_in(root) == []


def test_one_object_in_many_threads(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    failures: list[BaseException] = []

    def churn(number: int) -> None:
        try:
            for turn in range(10):
                sandbox = create(node, layers[:1], id=f"box{number}-{turn}")
                assert Path(sandbox.rootfs, "etc/base").read_text() == "base\n"
                node.remove(sandbox.id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert left_in(root) == []


def test_one_id_wanted_by_several_at_once(root: str, layers: list[MountableLayer]) -> None:
    def attempt() -> None:
        create(Sandboxes(root), layers[:1], id="box")

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                attempt()
                code = 0
            except ConflictError:
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [0, 3, 3, 3]
    node = Sandboxes(root)
    assert node.stands(node.get("box"))
    node.remove("box")
    assert left_in(root) == []


def test_uppers_come_from_a_detached_mount_where_the_kernel_takes_them(
    root: str, layers: list[MountableLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="fast")
    Path(sandbox.rootfs, "written").write_text("x")
    assert os.listdir(f"{root}/sandboxes/fast/upper") == ["written"]
    del node

    def refused(directory_fd: int, path: str, flags: int) -> int:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(detached, "open_tree", refused)
        create(Sandboxes(root), layers, id="plain")
    other = Sandboxes(root)
    assert other._detached is not None
    monkeypatch.setattr(other._detached, "path", lambda below: f"{root}/nowhere/{below}")
    create(other, layers, id="fallback")
    assert other._detached is None
    for name in ("plain", "fallback"):
        sandbox = other.get(name)
        Path(sandbox.rootfs, "written").write_text("x")
        assert os.listdir(f"{root}/sandboxes/{name}/upper") == ["written"]
    for name in ("fast", "plain", "fallback"):
        other.remove(name)
    assert left_in(root) == []


def test_many_stand_at_once(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    for number in range(100):
        create(node, layers, id=f"box{number}")
    assert len(node.list()) == 100
    assert sum(mounted.fs_type == b"erofs" for mounted in mountinfo.below(root, mountinfo.read())) == 3
    assert Path(node.get("box99").rootfs, "etc/top").read_text() == "tool\n"
    for number in range(100):
        node.remove(f"box{number}")
    assert left_in(root) == []


# ---- layers by themselves


def test_attaching_twice_is_once(root: str, layers: list[MountableLayer]) -> None:
    mounts = LayerMounts(root)
    assert mounts.attach(layers[0], "one") == mounts.attach(layers[0], "one")
    assert mounts.users(layers[0].digest) == ["one"]
    mounts.detach(layers[0].digest, "one")
    mounts.detach(layers[0].digest, "one")
    assert left_in(root) == []


def test_who_leaves_does_not_undo_an_arrival(
    root: str, layers: list[MountableLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving tries to remove ``users`` before it has the lock, so it may hit a new one that is still empty."""
    removed: list[str] = []
    real = os.link

    def link(source: str, target: str) -> None:
        users = os.path.dirname(target)
        if not removed and os.path.isdir(users) and not os.listdir(users):
            os.rmdir(users)
            removed.append(users)
        real(source, target)

    mounts = LayerMounts(root)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link)
        mounts.attach(layers[0], "one")
    assert removed
    assert mounts.users(layers[0].key) == ["one"]
    mounts.detach(layers[0].key, "one")
    assert left_in(root) == []


def test_a_layer_whose_mount_was_lost_is_mounted_again(root: str, layers: list[MountableLayer]) -> None:
    mounts = LayerMounts(root)
    path = mounts.attach(layers[0], "one")
    umount(path)
    assert mounts.mounted() == []
    assert mounts.attach(layers[0], "two") == path
    assert Path(path, "etc/base").read_text() == "base\n"
    for user in ("one", "two"):
        mounts.detach(layers[0].digest, user)
    assert left_in(root) == []


@pytest.mark.parametrize(("digest", "user"), [("../x", "a"), ("ab" * 32, "../a"), ("AB" * 32, "a"), ("ab" * 32, "")])
def test_names_of_layers_and_users_are_no_paths(root: str, digest: str, user: str) -> None:
    with pytest.raises(UsageError):
        LayerMounts(root).detach(digest, user)
    with pytest.raises(UsageError):
        LayerMounts(root).attach(MountableLayer(digest, "/nowhere"), user)


def test_variants_of_a_layer_are_mounted_side_by_side(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    direct = [replace(layers[0], variant="direct"), *layers[1:]]
    plain = create(node, layers, id="plain")
    other = create(node, direct, id="other", mode="direct")
    assert node.layers.mounted() == sorted({layer.key for layer in [*layers, *direct]})
    assert node.layers.users(layers[0].digest) == ["plain"]
    assert node.layers.users(direct[0].key) == ["other"]
    assert node.layers.users(layers[1].digest) == ["other", "plain"]
    assert other.state.layers == plain.state.layers
    assert other.state.chain == plain.state.chain
    assert node.get("other").state.mounts == tuple(layer.key for layer in direct)
    assert Path(other.rootfs, "data").read_bytes() == Path(plain.rootfs, "data").read_bytes()
    assert node.recover() == []
    node.remove("plain")
    assert Path(other.rootfs, "etc/base").read_text() == "base\n"
    node.remove("other")
    assert left_in(root) == []


def test_one_layer_in_two_variants_is_still_named_twice(root: str, layers: list[MountableLayer]) -> None:
    with pytest.raises(UsageError, match="twice"):
        create(Sandboxes(root), [layers[0], replace(layers[0], variant="direct")])


def test_leftovers_of_variants_are_cleared(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    direct = [replace(layer, variant="direct") for layer in layers]
    sandbox = create(node, direct, id="box")
    os.link(f"{root}/layers/{direct[0].key}/lock", f"{root}/layers/{direct[0].key}/users/ghost")
    os.mkdir(f"{root}/layers/{'ab' * 32}.fuse-7")
    assert {(item.kind, os.path.relpath(item.path, root)) for item in node.recover()} == {
        ("layer user", f"layers/{direct[0].key}/users/ghost"),
        ("layer without users", f"layers/{'ab' * 32}.fuse-7"),
    }
    os.unlink(f"{sandbox.directory}/state.json")
    assert [item.kind for item in node.recover()] == ["part of a sandbox"]
    assert left_in(root) == []


def test_a_state_from_before_variants(root: str, layers: list[MountableLayer]) -> None:
    node = Sandboxes(root)
    sandbox = create(node, layers, id="box")
    path = Path(sandbox.directory, "state.json")
    fields = json.loads(path.read_text())
    assert fields.pop("mounts") == fields["layers"]
    path.write_text(json.dumps(fields))
    assert node.get("box") == sandbox
    node.remove("box")
    assert left_in(root) == []


def test_a_layer_is_mounted_anew_under_its_users(root: str, layers: list[MountableLayer], tmp_path: Path) -> None:
    node = Sandboxes(root)
    key = layers[0].key
    sandbox = create(node, layers[:1], id="old")
    path = f"{root}/layers/{key}/mnt"
    before = os.stat(path).st_dev
    with open(path + "/data", "rb", buffering=0) as held:
        moved = tmp_path / "moved"
        moved.write_bytes(Path(layers[0].devices[0]).read_bytes())
        node.layers.remount(key, layers[0].image, [str(moved)])
        assert os.stat(path).st_dev != before
        assert held.read() == Path(path, "data").read_bytes()
    assert node.layers.users(key) == ["old"]
    assert sum(mounted.target == os.fsencode(path) for mounted in mountinfo.read()) == 1
    young = create(node, layers[:1], id="young")
    for each in (sandbox, young):
        assert Path(each.rootfs, "etc/base").read_text() == "base\n"
        assert Path(each.rootfs, "data").read_bytes() == Path(path, "data").read_bytes()
    for name in ("old", "young"):
        node.remove(name)
    assert left_in(root) == []


def test_a_layer_that_lost_its_mount_is_mounted_anew(root: str, layers: list[MountableLayer]) -> None:
    mounts = LayerMounts(root)
    path = mounts.attach(layers[0], "one")
    umount(path)
    mounts.remount(layers[0].key, layers[0].image, layers[0].devices)
    assert Path(path, "etc/base").read_text() == "base\n"
    mounts.detach(layers[0].key, "one")
    assert left_in(root) == []


def test_the_old_mount_stays_where_a_new_one_fails(root: str, layers: list[MountableLayer]) -> None:
    mounts = LayerMounts(root)
    path = mounts.attach(layers[0], "one")
    before = os.stat(path).st_dev
    for image, devices in ((layers[0].image, ["/nowhere"]), (layers[0].image, []), ("/nowhere", layers[0].devices)):
        with pytest.raises((NotFoundError, ConflictError)):
            mounts.remount(layers[0].key, image, devices)
        assert os.stat(path).st_dev == before
    mounts.detach(layers[0].key, "one")
    with pytest.raises(NotFoundError, match="nobody uses"):
        mounts.remount(layers[0].key, layers[0].image, layers[0].devices)
    assert left_in(root) == []


def test_no_arrival_ever_sees_a_bare_directory(root: str, layers: list[MountableLayer]) -> None:
    """Sandboxes are made while their layer is mounted anew, over and over."""
    node = Sandboxes(root)
    create(node, layers[:1], id="first")
    child = os.fork()
    if child == 0:
        mounts = LayerMounts(root)
        try:
            while True:
                mounts.remount(layers[0].key, layers[0].image, layers[0].devices)
        finally:
            os._exit(1)
    try:
        for number in range(60):
            sandbox = create(node, layers[:1], id=f"box{number}")
            assert Path(sandbox.rootfs, "etc/base").read_text() == "base\n"
            node.remove(sandbox.id)
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    node.remove("first")
    assert left_in(root) == []


def test_more_users_than_links_of_a_file(
    root: str, layers: list[MountableLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        if os.path.exists(os.path.dirname(target)):
            raise OSError(31, "Too many links", source)
        raise FileNotFoundError(2, "No such file", target)

    mounts = LayerMounts(root)
    mounts.attach(layers[0], "one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        mounts.attach(layers[0], "two")
        mounts.attach(layers[0], "two")
    assert mounts.users(layers[0].digest) == ["one", "two"]
    for user in ("one", "two"):
        mounts.detach(layers[0].digest, user)
    assert left_in(root) == []


def test_without_root_one_clear_line(root: str, layers: list[MountableLayer]) -> None:
    def attempt() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        node = Sandboxes(root)
        calls: list[Callable[[], object]] = [lambda: create(node, layers), lambda: node.remove("box"), node.recover]
        for call in calls:
            try:
                call()
            except PermissionError_ as error:
                assert str(error).count("\n") == 0
                assert "needs root" in str(error)
            else:
                raise AssertionError

    def look() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            node.list()
        except PermissionError_ as error:
            assert str(error).count("\n") == 0
        else:
            raise AssertionError

    assert in_child(attempt) == 0
    assert left_in(root) == []
    node = Sandboxes(root)
    create(node, layers, id="box")
    assert in_child(look) == 0
    node.remove("box")

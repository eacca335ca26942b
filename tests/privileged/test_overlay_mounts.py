"""EROFS and overlayfs mounted for real, and what programs then see."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import sandboxes
from support.sandboxes import device, directory, file, layer_with, symlink, tree, whiteout, write_layer
from support.tools import need_tool

from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    LimitError,
    NotFoundError,
    PermissionError_,
    UnsupportedError,
    UsageError,
)
from overlay import mountinfo, overlayfs
from overlay.erofs import mount_erofs
from overlay.layers import MountableLayer
from overlay.mountapi import MNT_DETACH, MS_BIND, mount, umount
from overlay.overlayfs import OVL_MAX_STACK, check_upper, mount_overlay

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

NAMES = [b"a:b", b"a,b", b"a\\b", b"a\\:b", b"a b", b"a\tb", b"a\nb", b"a%sb", b"a\xff\xfeb", b'a"b', b"x" * 255]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A directory on ext4; whatever a test mounts below it is unmounted, the latest first."""
    sandboxes.node_root(tmp_path)
    yield tmp_path
    for mounted in mountinfo.below(os.fsencode(tmp_path), mountinfo.read()):
        umount(mounted.target, MNT_DETACH)


def erofs(here: Path, layer: MountableLayer, name: str = "mnt", **options: bool) -> Path:
    target = here / name
    target.mkdir()
    mount_erofs(layer.image, layer.devices, str(target), **options)
    return target


def stack(here: Path, layers: list[MountableLayer], *, read_only: bool = False, nodev: bool = True) -> Path:
    """Mount ``layers``, bottom first, and an overlay over them with its upper at ``here/upper``."""
    lowers = [str(erofs(here, layer, f"lower{number}")) for number, layer in enumerate(layers)]
    for name in ("upper", "work", "empty", "merged"):
        (here / name).mkdir()
    target = str(here / "merged")
    if read_only:
        mount_overlay(lowers, None, None, target, empty=str(here / "empty"), read_only=True, nodev=nodev)
    else:
        mount_overlay(lowers, str(here / "upper"), str(here / "work"), target, nodev=nodev)
    return here / "merged"


def names_in(top: Path) -> list[bytes]:
    """All paths below ``top`` as readdir has them."""
    root = os.fsencode(top)
    found = []
    for path, directories, files in os.walk(root, onerror=lambda error: (_ for _ in ()).throw(error)):
        found += [os.path.relpath(os.path.join(path, name), root) for name in directories + files]
    return sorted(found)


# ---- EROFS


def test_data_on_several_packs_reads_back(here: Path) -> None:
    data = os.urandom(300_001)
    layer = layer_with(here / "image", {b"big": data, b"small": b"inline\n"}, packs=3)
    assert len(layer.devices) == 3
    mounted = erofs(here, layer)
    assert (mounted / "big").read_bytes() == data
    assert (mounted / "small").read_bytes() == b"inline\n"
    with pytest.raises(OSError, match="Read-only"):
        (mounted / "new").write_text("x")


def test_no_loop_device_is_used(here: Path) -> None:
    layer = layer_with(here / "image", {b"big": os.urandom(50_000)})
    erofs(here, layer)
    (found,) = [mounted for mounted in mountinfo.read() if mounted.target == os.fsencode(here / "mnt")]
    assert found.source == os.fsencode(layer.image)
    assert found.device[0] == 0  # not a block device
    assert {b"ro", b"nosuid", b"nodev", b"noatime"} <= set(found.options.split(b","))


def test_the_number_of_packs_is_checked(here: Path) -> None:
    layer = layer_with(here / "image", {b"big": os.urandom(50_000)}, packs=2)
    (here / "mnt").mkdir()
    for devices in ((), layer.devices[:1], (*layer.devices, layer.devices[0])):
        with pytest.raises(ConflictError, match=f"lists 2 packs and {len(devices)} were given"):
            mount_erofs(layer.image, devices, str(here / "mnt"))
    assert list((here / "mnt").iterdir()) == []


def test_a_short_pack_is_refused(here: Path) -> None:
    layer = layer_with(here / "image", {b"big": os.urandom(50_000)})
    os.truncate(layer.devices[0], os.path.getsize(layer.devices[0]) - 4096)
    (here / "mnt").mkdir()
    with pytest.raises(CorruptError, match="too short"):
        mount_erofs(layer.image, layer.devices, str(here / "mnt"))


@pytest.mark.parametrize("what", ["image", "pack", "target"])
def test_what_is_missing_is_not_found(here: Path, what: str) -> None:
    layer = layer_with(here / "image", {b"big": os.urandom(50_000)})
    target = here / "mnt"
    if what != "target":
        target.mkdir()
        os.unlink(layer.image if what == "image" else layer.devices[0])
    with pytest.raises(NotFoundError, match="No such file"):
        mount_erofs(layer.image, layer.devices, str(target))


def test_an_image_on_tmpfs_is_refused_with_advice(here: Path) -> None:
    layer = layer_with(here / "image", {b"file": b"x"})
    for name in ("tmpfs", "mnt"):
        (here / name).mkdir()
    mount("tmpfs", str(here / "tmpfs"), "tmpfs", 0, b"size=1m")
    copy = here / "tmpfs" / "image"
    copy.write_bytes(Path(layer.image).read_bytes())
    with pytest.raises(UnsupportedError, match=r"tmpfs.*put the node's root on ext4"):
        mount_erofs(str(copy), [], str(here / "mnt"))


def test_packs_may_be_on_tmpfs(here: Path) -> None:
    data = os.urandom(50_000)
    layer = layer_with(here / "image", {b"big": data})
    for name in ("tmpfs", "mnt"):
        (here / name).mkdir()
    mount("tmpfs", str(here / "tmpfs"), "tmpfs", 0, b"size=1m")
    copy = here / "tmpfs" / "pack"
    copy.write_bytes(Path(layer.devices[0]).read_bytes())
    mount_erofs(layer.image, [str(copy)], str(here / "mnt"))
    assert (here / "mnt" / "big").read_bytes() == data


def test_damage_is_corrupt(here: Path) -> None:
    layer = layer_with(here / "image", {b"file": b"x"})
    with open(layer.image, "r+b") as stream:
        stream.seek(1024 + 0x40)
        stream.write(b"volume")
    (here / "mnt").mkdir()
    with pytest.raises(CorruptError, match="checksum"):
        mount_erofs(layer.image, [], str(here / "mnt"))


@pytest.mark.case("O03", "O04")
@pytest.mark.parametrize("name", NAMES)
def test_images_packs_and_targets_of_any_name(here: Path, name: bytes) -> None:
    data = os.urandom(50_000)
    layer = layer_with(here / "image", {b"big": data}, packs=2)
    odd = os.fsencode(here) + b"/" + name
    os.mkdir(odd)
    os.mkdir(odd + b"/target")
    image = odd + b"/image"
    os.rename(layer.image, image)
    packs = []
    for number, path in enumerate(layer.devices):
        packs.append(odd + b"/%d" % number + name[:200])
        os.rename(path, packs[-1])
    mount_erofs(image, packs, odd + b"/target")
    with open(odd + b"/target/big", "rb") as stream:
        assert stream.read() == data
    (found,) = mountinfo.below(odd, mountinfo.read())
    assert found.target == odd + b"/target"


@pytest.mark.case("O01", "O03")
def test_a_thousand_packs(here: Path) -> None:
    """A device option each: far more than the page that mount(2) takes, and values beyond 255 bytes."""
    far = here / ("d" * 200)
    data = os.urandom(1000 * 16384)
    layer = layer_with(far, {b"big": data}, packs=1000)
    assert len(layer.devices) == 1000
    mounted = erofs(here, layer)
    assert (mounted / "big").read_bytes() == data


# ---- overlayfs


def test_the_last_layer_wins_and_writes_stay_in_the_upper(here: Path) -> None:
    merged = stack(here, sandboxes.three_layers(here / "images"))
    assert (merged / "etc/top").read_text() == "tool\n"
    assert names_in(merged) == [
        b"data",
        b"etc",
        b"etc/base",
        b"etc/top",
        b"opt",
        b"opt/tool",
        b"src",
        b"src/work",
    ]
    (merged / "etc/base").write_text("changed\n")
    (merged / "src/work").unlink()
    assert (here / "upper/etc/base").read_text() == "changed\n"
    assert (here / "lower0/etc/base").read_text() == "base\n"
    assert names_in(merged / "src") == []


@pytest.mark.case("T12")
def test_a_single_layer_read_only(here: Path) -> None:
    layers = sandboxes.three_layers(here / "images")
    merged = stack(here, layers[:1], read_only=True)
    assert (merged / "etc/top").read_text() == "base\n"
    with pytest.raises(OSError, match="Read-only"):
        (merged / "new").write_text("x")


@pytest.mark.case("O03")
def test_options_are_said_explicitly(here: Path) -> None:
    stack(here, sandboxes.three_layers(here / "images"))
    (found,) = [mounted for mounted in mountinfo.read() if mounted.target == os.fsencode(here / "merged")]
    options = found.super_options.split(b",")
    assert b"xino=on" in options
    assert not {b"index=on", b"redirect_dir=on", b"metacopy=on", b"nfs_export=on"} & set(options)
    # index and redirect_dir would be kept in the work directory and in xattrs of the upper
    assert not (here / "work/index").exists()
    (here / "merged/etc/base").write_text("copied up\n")
    assert not any(b"redirect" in os.fsencode(name) for name in os.listxattr(here / "upper/etc"))


def test_two_may_probe_an_upper_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.removexattr

    def twice(path: str, name: bytes) -> None:
        real(path, name)
        real(path, name)

    monkeypatch.setattr(os, "removexattr", twice)
    overlayfs.check_filesystem(str(here))
    assert os.listxattr(here) == []


def test_one_device_number_and_lasting_inode_numbers(here: Path) -> None:
    base = layer_with(here / "image", {b"a": b"1\n", b"d/b": b"2\n"})
    merged = stack(here, [base, layer_with(here / "image", {b"d/c": b"3\n"})])
    assert len({os.lstat(merged / path).st_dev for path in (".", "a", "d", "d/b", "d/c")}) == 1
    before = os.stat(merged / "a").st_ino
    (merged / "a").write_text("copied up\n")
    assert os.stat(merged / "a").st_ino == before


@pytest.mark.case("O01")
@pytest.mark.parametrize("count", [128, OVL_MAX_STACK])
def test_many_lowers_under_a_long_path(here: Path, count: int) -> None:
    base = here / ("p" * 200)
    lowers = []
    for number in range(count):
        lower = base / f"lower{number}"
        lower.mkdir(parents=True)
        (lower / f"file{number}").write_text(str(number))
        lowers.append(str(lower))
    for name in ("upper", "work", "merged"):
        (base / name).mkdir()
    mount_overlay(lowers, str(base / "upper"), str(base / "work"), str(base / "merged"))
    assert len(os.listdir(base / "merged")) == count
    assert (base / "merged/file0").read_text() == "0"


@pytest.mark.case("O01")
def test_more_lowers_than_the_kernel_stacks_are_refused_before_mounting(here: Path) -> None:
    with pytest.raises(LimitError, match="at most 500"):
        mount_overlay(["/nowhere"] * 501, "/nowhere", "/nowhere", "/nowhere")


@pytest.mark.case("O02")
@pytest.mark.parametrize("length", [4094, 4095, 4096, 4097])
def test_around_one_page_of_options(here: Path, length: int) -> None:
    """Lengths at which a string for mount(2) would be whole, cut or refused are nothing special here."""
    fixed = [str(here / "upper"), str(here / "work")]
    lowers = [str(here / f"lower{number:02}-") for number in range(20)]
    text = f"lowerdir={':'.join(lowers)},upperdir={fixed[0]},workdir={fixed[1]}"
    missing = length - len(text)
    assert missing > 0
    for number in range(20):
        share = min(missing, 200)
        lowers[number] += "x" * share
        missing -= share
    assert len(f"lowerdir={':'.join(lowers)},upperdir={fixed[0]},workdir={fixed[1]}") == length
    for number, lower in enumerate(lowers):
        os.mkdir(lower)
        Path(lower, f"file{number}").touch()
    for name in ("upper", "work", "merged"):
        (here / name).mkdir()
    mount_overlay(lowers, fixed[0], fixed[1], str(here / "merged"))
    assert len(os.listdir(here / "merged")) == 20


@pytest.mark.case("O03", "O04")
@pytest.mark.parametrize("name", NAMES)
def test_directories_of_any_name(here: Path, name: bytes) -> None:
    top = os.fsencode(here)
    for decoy in (b"a", b"b", b"a/" + name, b":b"):
        os.makedirs(top + b"/" + decoy, exist_ok=True)
    for kind in (b"low", b"upper", b"work", b"target"):
        os.makedirs(top + b"/" + kind + b"/" + name)
    with open(top + b"/low/" + name + b"/right", "wb") as stream:
        stream.write(b"yes")
    lower, upper, work, target = (top + b"/" + kind + b"/" + name for kind in (b"low", b"upper", b"work", b"target"))
    mount_overlay([lower], upper, work, target)
    assert os.listdir(target) == [b"right"]
    with open(target + b"/written", "wb") as stream:
        stream.write(b"x")
    assert os.listdir(upper) == [b"written"]
    (found,) = mountinfo.below(target, mountinfo.read())
    assert (found.target, found.fs_type) == (target, b"overlay")


@pytest.mark.case("O08")
def test_opaque_directories_stay_so_and_only_in_the_trusted_namespace(here: Path) -> None:
    base = layer_with(here / "image", {b"d/old": b"old\n", b"d/sub/old": b"old\n"})
    top = tree({b"d/new": b"new\n"})
    opaque = top.entries[b"d"]
    assert isinstance(opaque, type(top))
    opaque.opaque = True
    merged = stack(here, [base, write_layer(here / "image", top)])
    assert names_in(merged / "d") == [b"new"]
    (merged / "d/touched").write_text("x")
    assert names_in(merged / "d") == [b"new", b"touched"]
    assert not [name for name in os.listxattr(here / "upper/d") if name.startswith("user.")]
    assert not [name for name in os.listxattr(merged / "d") if "overlay" in name]
    with pytest.raises(OSError, match="No data"):
        os.getxattr(here / "lower1/d", "user.overlay.opaque")
    assert os.getxattr(here / "lower1/d", "trusted.overlay.opaque") == b"y"


@pytest.mark.case("O10")
def test_a_whiteout_at_the_root_hides_one_name(here: Path) -> None:
    base = layer_with(here / "image", {b"test": b"1", b"root/test": b"2", b"a/b/test": b"3"})
    merged = stack(here, [base, layer_with(here / "image", {b"test": whiteout()})])
    assert names_in(merged) == [b"a", b"a/b", b"a/b/test", b"root", b"root/test"]
    assert not (merged / "test").exists()


@pytest.mark.case("T12")
def test_no_whiteout_is_listed_alone_over_one_and_over_two(here: Path) -> None:
    base = layer_with(here / "image", {b"home/readme": b"r", b"home/changelog.txt": b"c"})
    work = layer_with(here / "image", {b"home/changelog.txt": whiteout(), b"src/a": b"a"})
    tool = layer_with(here / "image", {b"opt/t": b"t"})
    alone = erofs(here, base, "alone")
    assert names_in(alone) == [b"home", b"home/changelog.txt", b"home/readme"]
    for number, layers in enumerate(([base], [base, work], [base, work, tool])):
        for read_only in (False, True):
            place = here / f"{number}{read_only}"
            place.mkdir()
            listed = names_in(stack(place, layers, read_only=read_only))
            assert (b"home/changelog.txt" in listed) == (number == 0)
            assert b"home/readme" in listed


@pytest.mark.case("T12")
def test_why_a_layer_may_not_hold_whiteouts_that_hide_nothing(here: Path) -> None:
    """The kernel filters them in merged directories only; so the converter leaves them out elsewhere."""
    base = layer_with(here / "image", {b"a": b"a"})
    top = tree({b"new/gone": whiteout(), b"opaque/gone": whiteout()})
    opaque = top.entries[b"opaque"]
    assert isinstance(opaque, type(top))
    opaque.opaque = True
    listed = names_in(stack(here, [base, write_layer(here / "image", top)]))
    assert listed == [b"a", b"new", b"new/gone", b"opaque", b"opaque/gone"]


@pytest.mark.case("T33")
def test_capabilities_are_equal_in_all_views(here: Path) -> None:
    getcap = need_tool("getcap")
    # struct vfs_cap_data revision 2, effective: cap_net_raw permitted (<linux/capability.h>)
    value = struct.pack("<IIIII", 0x0200_0001, 1 << 13, 0, 0, 0)
    layer = layer_with(here / "image", {b"usr/bin/ping": file(b"#!", 0o755, xattrs=((b"security.capability", value),))})
    merged = stack(here, [layer])
    said = []
    for top in (here / "lower0", merged):
        assert os.getxattr(top / "usr/bin/ping", "security.capability") == value
        said.append(subprocess.run([getcap, "ping"], cwd=top / "usr/bin", capture_output=True, check=True).stdout)
    assert said[0] == said[1]
    assert b"cap_net_raw" in said[0]


@pytest.mark.case("T56")
def test_device_nodes_are_there_and_can_not_be_opened(here: Path) -> None:
    nodes = {
        b"console": (stat.S_IFCHR, 5, 1),
        b"block": (stat.S_IFBLK, 8, 0),
        b"large": (stat.S_IFCHR, 4095, 1048575),
        b"null": (stat.S_IFCHR, 1, 3),
    }
    entries = {name: device(*numbers) for name, numbers in nodes.items()}
    entries[b"fifo"] = device(stat.S_IFIFO, 0, 0)
    layer = layer_with(here / "image", dict(entries))
    merged = stack(here, [layer])
    for top in (os.fsencode(here / "lower0"), os.fsencode(merged)):
        for name, (kind, major, minor) in nodes.items():
            status = os.lstat(top + b"/" + name)
            assert (stat.S_IFMT(status.st_mode), os.major(status.st_rdev), os.minor(status.st_rdev)) == (
                kind,
                major,
                minor,
            )
        assert stat.S_ISFIFO(os.lstat(top + b"/fifo").st_mode)
        with pytest.raises(PermissionError):
            os.open(top + b"/null", os.O_RDONLY)
    other = here / "dev"
    other.mkdir()
    with_devices = stack(other, [layer], nodev=False)
    os.close(os.open(with_devices / "null", os.O_RDONLY))


def test_links_and_hard_links_survive(here: Path) -> None:
    shared = file(b"one\n")
    layer = layer_with(here / "image", {b"a": shared, b"b": shared, b"l": symlink(b"/a")})
    merged = stack(here, [layer])
    assert os.stat(merged / "a").st_ino == os.stat(merged / "b").st_ino
    assert os.stat(merged / "a").st_nlink == 2
    assert os.readlink(merged / "l") == "/a"


# ---- what an upper needs


def directories(here: Path, *names: str) -> list[str]:
    for name in names:
        (here / name).mkdir()
    return [str(here / name) for name in names]


@pytest.mark.case("O11")
def test_upper_and_work_on_two_mounts_of_one_filesystem(here: Path) -> None:
    real, upper, work, lower, merged = directories(here, "real", "upper", "work", "lower", "merged")
    mount("tmpfs", real, "tmpfs", 0, b"size=1m")
    directories(here / "real", "u", "w")
    mount(real + "/u", upper, "", MS_BIND)
    mount(real + "/w", work, "", MS_BIND)
    with pytest.raises(ConflictError, match="different mounts"):
        mount_overlay([lower], upper, work, merged)
    with pytest.raises(ConflictError, match="different mounts"):  # the kernel's bare EINVAL is explained as well
        mount_overlay([lower], upper, work, merged, checked=True)


@pytest.mark.case("O11")
def test_upper_on_an_overlay(here: Path) -> None:
    merged = stack(here, [layer_with(here / "image", {b"a": b"a"})])
    upper, work = directories(merged, "u", "w")
    lower, target = directories(here, "low", "target")
    with pytest.raises(UnsupportedError, match="overlayfs"):
        mount_overlay([lower], upper, work, target)


@pytest.mark.case("O11")
@pytest.mark.parametrize("kind", sorted(overlayfs.UNFIT_FOR_UPPER))
def test_upper_on_a_filesystem_that_can_not_hold_one(here: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlayfs, "filesystem_name", lambda path: kind)
    upper, work = directories(here, "upper", "work")
    with pytest.raises(UnsupportedError, match=f"on {kind} and can't hold an upper"):
        check_upper(upper, work)


@pytest.mark.case("O11")
def test_upper_on_a_read_only_mount(here: Path) -> None:
    mounted = erofs(here, layer_with(here / "image", {b"u/a": b"", b"w/a": b""}))
    with pytest.raises(UnsupportedError, match="can't hold an upper"):
        check_upper(str(mounted / "u"), str(mounted / "w"))


@pytest.mark.case("O11")
def test_work_that_is_not_empty(here: Path) -> None:
    upper, work = directories(here, "upper", "work")
    (here / "work/left").touch()
    with pytest.raises(ConflictError, match="not empty"):
        check_upper(upper, work)


@pytest.mark.case("O11")
@pytest.mark.parametrize(("upper", "work"), [("u", "u/w"), ("w/u", "w"), ("u", "u")])
def test_upper_and_work_inside_each_other(here: Path, upper: str, work: str) -> None:
    for name in (upper, work):
        (here / name).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConflictError, match="inside each other"):
        check_upper(str(here / upper), str(here / work))


@pytest.mark.case("O11")
def test_upper_and_work_side_by_side_are_fine_on_ext4_and_tmpfs(here: Path) -> None:
    (volume,) = directories(here, "tmpfs")
    mount("tmpfs", volume, "tmpfs", 0, b"size=1m")
    for base in (here, Path(volume)):
        upper, work = directories(base, "upper", "work")
        check_upper(upper, work)
        assert os.listxattr(upper) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([], "u", "w"), UsageError),
        ((["l"], None, None), UsageError),
        ((["l"], "u", None), UsageError),
        ((["missing"], "u", "w"), NotFoundError),
        ((["l"], "missing", "w"), NotFoundError),
    ],
)
def test_arguments_that_do_not_fit(
    here: Path, arguments: tuple[list[str], str | None, str | None], error: type[ImgtoolError]
) -> None:
    directories(here, "l", "u", "w", "merged")
    lowers, upper, work = arguments
    with pytest.raises(error):
        mount_overlay(
            [str(here / lower) for lower in lowers],
            str(here / upper) if upper else None,
            str(here / work) if work else None,
            str(here / "merged"),
        )


def test_a_volatile_overlay_does_not_sync(here: Path) -> None:
    lower, upper, work, merged = directories(here, "l", "u", "w", "merged")
    mount_overlay([lower], upper, work, merged, volatile=True)
    with open(merged + "/file", "wb") as stream:
        os.fsync(stream.fileno())
    umount(merged)
    with pytest.raises(ConflictError, match="not empty"):  # it keeps a mark that it may have lost something
        mount_overlay([lower], upper, work, merged)


def test_without_root_one_clear_line(here: Path) -> None:
    layer = layer_with(here / "image", {b"a": b"a"})
    lower, upper, work, merged = directories(here, "l", "u", "w", "merged")
    for path in (here, *here.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path.is_relative_to(here.parents[2]):
            path.chmod(path.stat().st_mode | 0o005)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            refused = 0
            attempts: list[Callable[[], None]] = [
                lambda: mount_erofs(layer.image, layer.devices, merged),
                lambda: mount_overlay([lower], upper, work, merged, checked=True),
            ]
            for attempt in attempts:
                try:
                    attempt()
                except PermissionError_ as error:
                    refused += "\n" not in str(error) and "root" in str(error)
            code = 0 if refused == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_directories_of_layers_keep_their_attributes(here: Path) -> None:
    top = tree({b"d/f": b"x"}, root=directory(0o1777, uid=12, gid=34, mtime=99))
    mounted = erofs(here, write_layer(here / "image", top))
    status = mounted.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime) == (0o1777, 12, 34, 99)

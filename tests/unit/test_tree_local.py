"""Directories of this machine as trees."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest
from support.tools import need_root
from support.trees import at, content, manifest, names

from layerstore.errors import ConflictError, MalformedError, NotFoundError, PermissionError_, UsageError
from layerstore.tree.inode import Attrs, Directory, File, Special, Symlink
from layerstore.tree.local import scan


def scanned(path: Path, warnings: list[str] | None = None) -> Directory:
    return scan(str(path), warn=([] if warnings is None else warnings).append)


def test_everything_that_stat_tells(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d" / "f").write_bytes(b"content")
    (tmp_path / "d" / "f").chmod(0o4711)
    (tmp_path / "empty").touch()
    os.symlink("/no/where", tmp_path / "l")
    os.mkfifo(tmp_path / "p", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
    os.utime(tmp_path / "d" / "f", ns=(0, -1_250_000_001))
    os.utime(tmp_path / "l", ns=(0, 5_000_000_007), follow_symlinks=False)
    tree = scanned(tmp_path)
    assert names(tree) == [b"d", b"d/f", b"empty", b"l", b"p", b"s"]
    uid, gid = os.getuid(), os.getgid()
    assert at(tree, b"d/f").attrs == Attrs(stat.S_IFREG | 0o4711, uid, gid, -2, 749_999_999)
    assert content(at(tree, b"d/f")) == b"content" and content(at(tree, b"empty")) == b""
    link = at(tree, b"l")
    assert isinstance(link, Symlink) and link.target == b"/no/where" and link.attrs.mtime == 5 and link.attrs.nsec == 7
    assert at(tree, b"p").attrs.mode == stat.S_IFIFO | 0o640
    assert isinstance(at(tree, b"s"), Special) and at(tree, b"s").kind == stat.S_IFSOCK
    assert tree.attrs.mtime == os.stat(tmp_path).st_mtime_ns // 10**9


def test_names_are_bytes(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"new\nline", "ä".encode(), b".wh.x"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).touch()
    assert sorted(scanned(tmp_path).entries) == sorted([b"caf\xe9", b"new\nline", "ä".encode(), b".wh.x"])


def test_hard_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "d").mkdir()
    os.link(tmp_path / "a", tmp_path / "d" / "b")
    (tmp_path / "c").write_bytes(b"x")
    os.symlink("t", tmp_path / "l")
    os.link(tmp_path / "l", tmp_path / "m", follow_symlinks=False)
    rows = manifest(scanned(tmp_path))
    assert rows[b"a"].links == {b"a", b"d/b"} and rows[b"l"].links == {b"l", b"m"} and rows[b"c"].links is None


def test_the_order_of_the_file_system_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    listdir = os.listdir
    orders = []
    for backwards in (False, True):
        monkeypatch.setattr(os, "listdir", lambda fd, backwards=backwards: sorted(listdir(fd), reverse=backwards))
        orders.append(list(scanned(tmp_path).entries))
    assert orders[0] == orders[1] == [b"a", b"b", b"c"]


def test_holes(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(1 << 20)
        file.write(b"x" * 4096)
        file.seek(32 << 20)
        file.write(b"y")
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    tree = scanned(tmp_path)
    sparse, hole = at(tree, b"sparse"), at(tree, b"hole")
    assert isinstance(sparse, File) and isinstance(hole, File)
    assert sparse.size == 64 << 20 and sum(extent.length for extent in sparse.extents) < 1 << 20
    assert hole.size == 1 << 40 and hole.extents == ()
    data = bytes(1 << 20) + b"x" * 4096 + bytes((31 << 20) - 4096) + b"y"
    assert content(sparse) == data + bytes((64 << 20) - len(data))


def test_a_file_system_that_does_not_tell_its_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", 10_000)

    def lseek(*args: object) -> int:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "lseek", lseek)
    assert content(at(scanned(tmp_path), b"f")) == bytes(10_000)


def test_xattrs(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    values = {"user.z": b"\0\n\xff", "user.a": b"", "user.overlay.opaque": b"y"}
    for name, value in values.items():
        os.setxattr(tmp_path / "f", name, value)
    os.setxattr(tmp_path, "user.root", b"1")
    tree = scanned(tmp_path)
    assert at(tree, b"f").attrs.xattrs == ((b"user.a", b""), (b"user.overlay.opaque", b"y"), (b"user.z", b"\0\n\xff"))
    assert tree.attrs.xattrs == ((b"user.root", b"1"),)


@pytest.mark.case("Z17")
@pytest.mark.parametrize("code", [errno.ENODATA, errno.EOPNOTSUPP])
def test_an_xattr_that_is_listed_but_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    (tmp_path / "f").touch()
    os.setxattr(tmp_path / "f", "user.a", b"1")
    listxattr, getxattr = os.listxattr, os.getxattr

    def list_one_more(path: bytes, *, follow_symlinks: bool) -> list[str]:
        return [*listxattr(path, follow_symlinks=follow_symlinks), "security.selinux"]

    def get(path: bytes, name: str, *, follow_symlinks: bool) -> bytes:
        if name == "security.selinux":
            raise OSError(code, os.strerror(code))
        return getxattr(path, name, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "listxattr", list_one_more)
    monkeypatch.setattr(os, "getxattr", get)
    warnings: list[str] = []
    tree = scanned(tmp_path, warnings)
    assert at(tree, b"f").attrs.xattrs == ((b"user.a", b"1"),)
    assert len(warnings) == 2 and all("security.selinux" in line for line in warnings)


@pytest.mark.case("Z17")
def test_a_file_system_without_xattrs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listxattr(path: bytes, *, follow_symlinks: bool) -> list[str]:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "listxattr", listxattr)
    warnings: list[str] = []
    assert scanned(tmp_path, warnings).attrs.xattrs == () and warnings == []


def test_an_xattr_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listxattr(path: bytes, *, follow_symlinks: bool) -> list[str]:
        raise OSError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "listxattr", listxattr)
    with pytest.raises(PermissionError_):
        scanned(tmp_path)


@pytest.mark.case("T37", "T57")
def test_overlay_marks_mean_nothing_here_either(tmp_path: Path) -> None:
    need_root()
    os.setxattr(tmp_path, "trusted.overlay.opaque", b"y")
    warnings: list[str] = []
    tree = scanned(tmp_path, warnings)
    assert tree.attrs.xattrs == ((b"trusted.overlay.overlay.opaque", b"y"),) and not tree.opaque
    assert len(warnings) == 1
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    null = at(scanned(tmp_path), b"null")
    assert isinstance(null, Special) and (null.major, null.minor) == (1, 3)
    os.mknod(tmp_path / "w", stat.S_IFCHR, os.makedev(0, 0))
    with pytest.raises(MalformedError, match="0:0"):
        scanned(tmp_path)


@pytest.mark.parametrize("how", ["write", "cut", "other", "symlink", "gone", "fifo", "touch"])
def test_a_file_that_changes_before_it_is_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234567890")
    os.utime(path, ns=(0, 10**18))
    tree = scanned(tmp_path)
    assert content(at(tree, b"f")) == b"1234567890"
    if how == "write":
        path.write_bytes(b"abcdefghij")
    elif how == "cut":
        os.truncate(path, 5)
        os.utime(path, ns=(0, 10**18))
    elif how == "touch":
        os.utime(path, ns=(0, 10**18 + 1))
    else:
        path.rename(tmp_path / "old")
        if how == "other":
            path.write_bytes(b"1234567890")
            os.utime(path, ns=(0, 10**18))
        elif how == "symlink":
            os.symlink("old", path)
        elif how == "fifo":
            os.mkfifo(path)
    with pytest.raises(ConflictError, match="changed while it was read"):
        content(at(tree, b"f"))


def test_a_file_that_is_only_read_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234567890")
    file = at(scanned(tmp_path), b"f")
    os.utime(path, ns=(10**18, os.stat(path).st_mtime_ns))
    path.chmod(0o600)
    assert isinstance(file, File)
    (extent,) = file.extents
    assert extent.source.read_at(3, 4) == b"4567" and extent.source.read_at(10, 0) == b""
    with pytest.raises(ConflictError):
        extent.source.read_at(5, 6)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / str(i)).write_bytes(b"x")
        os.truncate(tmp_path / str(i), 1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    tree = scanned(tmp_path)
    for i in range(20):
        content(at(tree, str(i).encode()))
    assert len(os.listdir("/proc/self/fd")) == before


def test_entries_that_vanish_or_change_while_scanning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    listdir, lstat = os.listdir, os.lstat
    monkeypatch.setattr(os, "listdir", lambda fd: [*listdir(fd), "ghost"])
    with pytest.raises(ConflictError, match="ghost"):
        scanned(tmp_path)
    monkeypatch.setattr(os, "listdir", listdir)

    def swap(path: bytes) -> os.stat_result:
        status = lstat(path)
        if path.endswith(b"/d"):
            os.rename(path, path + b"2")
            os.symlink(b"/etc", path)
        return status

    monkeypatch.setattr(os, "lstat", swap)
    with pytest.raises(ConflictError):
        scanned(tmp_path)


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(UsageError):
        scanned(tmp_path / "f")
    with pytest.raises(NotFoundError):
        scanned(tmp_path / "gone")


def test_the_root_may_be_given_as_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    os.symlink("d", tmp_path / "l")
    assert names(scanned(tmp_path / "l")) == [b"f"]


def test_a_directory_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    opened = os.open

    def refuse(path: bytes, flags: int) -> int:
        if path.endswith(b"/d"):
            raise PermissionError(errno.EACCES, "denied", path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError_, match="/d"):
        scanned(tmp_path)

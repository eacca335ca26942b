"""A tree on disk, packed by GNU tar and bsdtar in every format they have, reads as it lies there."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.tools import need_tool

from layerstore.tar.archive import LayerArchive
from layerstore.tar.member import Member

pytestmark = pytest.mark.compat

HOLES = {"hole": 1 << 20, "sparse-tail": 4098, "sparse-head": 500_000, "all-hole": 65_536, "many": 60 * 16_384}


@dataclass
class Format:
    """One way of writing, and what it can't express."""

    command: list[str]
    fractions: bool | None = False  # of times; None: as it happens
    negative: bool = False  # times too; bsdtar writes -1.25 as -2.75, and the others round or write 0
    modern: bool = True  # long names, and times before 1970
    xattrs: bool = False
    sparse: bool = False
    special: bool = True


GNU = {
    "v7": Format(["--format=v7"], modern=False, special=False),
    "ustar": Format(["--format=ustar"], modern=False),
    "oldgnu": Format(["--format=oldgnu", "--sparse"], sparse=True),
    "gnu": Format(["--format=gnu", "--sparse"], sparse=True),
    "gnu dense": Format(["--format=gnu"]),
    "pax": Format(["--format=posix", "--xattrs", "--xattrs-include=*"], fractions=True, negative=True, xattrs=True),
    "pax sparse 0.0": Format(["--format=posix", "--sparse-version=0.0"], fractions=True, negative=True, sparse=True),
    "pax sparse 0.1": Format(["--format=posix", "--sparse-version=0.1"], fractions=True, negative=True, sparse=True),
    "pax sparse 1.0": Format(["--format=posix", "--sparse-version=1.0"], fractions=True, negative=True, sparse=True),
}
BSD = {
    "v7": Format(["--format=v7"], modern=False, special=False),
    "ustar": Format(["--format=ustar"], modern=False),
    "gnutar": Format(["--format=gnutar"]),
    "pax": Format(["--format=pax", "--xattrs"], fractions=True, xattrs=True, sparse=True),
    "restricted pax": Format(["--format=paxr", "--no-xattrs", "--no-acls"], fractions=None, sparse=True),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("written")
    (top / "dir/sub").mkdir(parents=True)
    (top / "dir/file").write_bytes(b"content")
    (top / "dir/empty").touch()
    (top / "before-1970").touch()
    (top / os.fsdecode(b"dir/caf\xe9 \n")).write_bytes(b"x" * 513)
    (top / "dir/setuid").write_bytes(b"s")
    os.chmod(top / "dir/setuid", 0o4755)
    os.link(top / "dir/file", top / "hard")
    os.symlink("dir/file", top / "soft")
    os.symlink("t" * 250, top / "soft-long")
    long = top / ("d" * 80) / ("e" * 80)
    long.mkdir(parents=True)
    (long / ("f" * 120)).write_bytes(b"long")
    os.link(long / ("f" * 120), top / "hard-long")
    os.mkfifo(top / "fifo")
    chance = random.Random(1)
    for name, size in HOLES.items():
        with open(top / name, "wb") as file:
            if name in ("hole", "sparse-tail"):
                file.seek(size - 2)
                file.write(b"ab")
            elif name == "sparse-head":
                file.write(b"ab")
            elif name == "many":
                for at in range(0, size, 32_768):
                    file.seek(at)
                    file.write(chance.randbytes(4096))
            file.truncate(size)
    _set_xattr(top / "dir/file", "user.bytes", bytes(range(256)))
    for number, path in enumerate(sorted(top.rglob("*"))):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number * 1_000_000_001), follow_symlinks=False)
    os.utime(top / "before-1970", ns=(0, -1_250_000_000))
    return top


def _set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise


def _fits(path: str, form: Format) -> bool:
    if not form.modern and (len(path) > 90 or path in ("hard-long", "soft-long", "before-1970")):
        return False
    return form.special or path != "fifo"


@pytest.mark.case("T50", "T51", "T64")
@pytest.mark.parametrize("name", GNU)
def test_gnu_tar(name: str, tree: Path, tmp_path: Path) -> None:
    tool = need_tool("tar")
    form = GNU[name]
    names = _names(tree, form)
    command = [tool, "--no-recursion", "--numeric-owner", *form.command, "-cf", "-"]
    _pack([*command, "--null", "--verbatim-files-from", "-T", "-"], names, tree, tmp_path)
    check(tmp_path / "out.tar", tree, form, names, tmp_path)


@pytest.mark.case("T50", "T51", "T64")
@pytest.mark.parametrize("name", BSD)
def test_bsdtar(name: str, tree: Path, tmp_path: Path) -> None:
    tool = need_tool("bsdtar")
    form = BSD[name]
    names = _names(tree, form)
    _pack([tool, *form.command, "-n", "--numeric-owner", "-cf", "-", "--null", "-T", "-"], names, tree, tmp_path)
    check(tmp_path / "out.tar", tree, form, names, tmp_path)


def _names(tree: Path, form: Format) -> list[str]:
    found = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    return [path for path in found if _fits(path, form)]


def _pack(command: list[str], names: list[str], tree: Path, tmp_path: Path) -> None:
    with open(tmp_path / "out.tar", "wb") as out:
        given = b"".join(os.fsencode(name) + b"\0" for name in names)
        ran = subprocess.run(
            command, input=given, stdout=out, stderr=subprocess.PIPE, cwd=tree, timeout=120,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def check(path: Path, tree: Path, form: Format, names: list[str], scratch: Path) -> None:
    found: dict[bytes, Member] = {}
    with LayerArchive(path, scratch=str(scratch), warn=pytest.fail) as layer:
        for member in layer.members():
            found[member.path.rstrip(b"/")] = member
        assert sorted(found) == sorted(map(os.fsencode, names))
        for name, member in found.items():
            original = os.fsencode(tree) + b"/" + name
            status = os.lstat(original)
            if member.hardlink is not None:
                assert os.lstat(os.fsencode(tree) + b"/" + member.hardlink).st_ino == status.st_ino
                continue
            compare(member, status, form)
            if stat.S_ISLNK(status.st_mode):
                assert member.target == os.readlink(original)
            if stat.S_ISREG(status.st_mode):
                content = bytearray(member.size)
                for offset, length, at in member.data:
                    content[offset : offset + length] = layer.source.read_at(at, length)
                with open(original, "rb") as file:
                    assert bytes(content) == file.read()
                if form.sparse and os.fsdecode(name) in HOLES and status.st_blocks * 512 < status.st_size // 2:
                    assert sum(run.length for run in member.data) < status.st_size // 2
            if form.xattrs:
                kept = {key: os.getxattr(original, key, follow_symlinks=False) for key in _xattrs(original)}
                assert dict(member.attrs.xattrs) == kept
        layer.finish()


def _xattrs(path: bytes) -> list[bytes]:
    return [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False)]


def compare(member: Member, status: os.stat_result, form: Format) -> None:
    attrs = member.attrs
    assert attrs.mode == status.st_mode
    assert (attrs.uid, attrs.gid) == (status.st_uid, status.st_gid)
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    if seconds >= 0:
        assert attrs.mtime == seconds
        assert attrs.nsec in {True: [nanoseconds], False: [0], None: [0, nanoseconds]}[form.fractions]
    elif form.negative:
        assert (attrs.mtime, attrs.nsec) == (seconds, nanoseconds)
    if stat.S_ISREG(status.st_mode):
        assert member.size == status.st_size

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerstore.errors import ImgtoolError, LimitError, MalformedError, NotFoundError, UsageError
from layerstore.oci.config import RunConfig
from overlay.inroot import READ_LIMIT, read_in_root
from overlay.process import DEFAULT_PATH, User, process_of, resolve_user

PASSWD = """\
# a comment
root:x:0:0:root:/root:/bin/sh
+nis
broken
app:x:1000:1001:App:/home/app:/bin/sh
app:x:7:7::/second:/bin/sh
nohome:x:1002:1002:::
word:x:one:two::/:/bin/sh
short:x:1003:1003
"""
GROUP = """\
root:x:0:
app:x:1001:
staff:x:50:app,other
docker:x:999:other,app
alone:x:60
"""


@pytest.fixture
def rootfs(tmp_path: Path) -> str:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("spec", "user"),
    [
        ("", User(0, 0, (), "/root")),
        ("root", User(0, 0, (), "/root")),
        ("app", User(1000, 1001, (50, 999), "/home/app")),
        ("1000", User(1000, 1001, (50, 999), "/home/app")),
        ("01000", User(1000, 1001, (50, 999), "/home/app")),
        ("app:", User(1000, 1001, (50, 999), "/home/app")),
        ("app:staff", User(1000, 50, (), "/home/app")),
        ("app:60", User(1000, 60, (), "/home/app")),
        ("app:12345", User(1000, 12345, (), "/home/app")),
        (":staff", User(0, 50, (), "/root")),
        ("4242", User(4242, 0, (), "/")),
        ("4242:4343", User(4242, 4343, (), "/")),
        ("nohome", User(1002, 1002, (), "/")),
        ("short", User(1003, 1003, (), "/")),
    ],
)
def test_users(rootfs: str, spec: str, user: User) -> None:
    assert resolve_user(spec, rootfs) == user


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("nobody-here", NotFoundError),
        ("app:nogroup", NotFoundError),
        ("word", NotFoundError),
        ("4294967295", MalformedError),
        ("0:4294967295", MalformedError),
        ("-1", NotFoundError),
        ("a\0b", MalformedError),
        ("\ud800", MalformedError),
    ],
)
def test_users_that_there_are_not(rootfs: str, spec: str, error: type[ImgtoolError]) -> None:
    with pytest.raises(error):
        resolve_user(spec, rootfs)


def test_without_passwd_numbers_do(tmp_path: Path) -> None:
    assert resolve_user("", str(tmp_path)) == User()
    assert resolve_user("5:6", str(tmp_path)) == User(5, 6)
    with pytest.raises(NotFoundError, match="app"):
        resolve_user("app", str(tmp_path))


@pytest.mark.case("O13")
@pytest.mark.parametrize("target", ["/nix/store/x/passwd", "../../../../nix/store/x/passwd", "../nix/store/x/passwd"])
def test_links_are_followed_inside_the_image(tmp_path: Path, target: str) -> None:
    (tmp_path / "nix/store/x").mkdir(parents=True)
    (tmp_path / "nix/store/x/passwd").write_text("app:x:77:78::/nix:/bin/sh\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to(target)
    assert resolve_user("app", str(tmp_path)) == User(77, 78, (), "/nix")


@pytest.mark.case("O13")
@pytest.mark.parametrize("target", ["../../../../etc/hostname", "/etc/hostname", "/proc/self/environ", "passwd"])
def test_the_host_is_never_read(tmp_path: Path, target: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to(target)
    (tmp_path / "etc/os-release").symlink_to("../../../../etc/shadow")
    assert os.path.exists("/etc/hostname")
    assert read_in_root(str(tmp_path), "/etc/passwd") is None
    assert read_in_root(str(tmp_path), "/etc/os-release") is None


@pytest.mark.case("O13")
def test_an_absolute_directory_link_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/passwd").write_text("inside")
    (tmp_path / "etc").symlink_to("/real")
    assert read_in_root(str(tmp_path), "/etc/passwd") == b"inside"


def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    for name in ("/fifo", "/dir"):
        with pytest.raises(MalformedError, match="regular"):
            read_in_root(str(tmp_path), name)


def test_a_huge_passwd_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "passwd").open("wb") as stream:
        stream.truncate(READ_LIMIT + 1)
    with pytest.raises(LimitError):
        read_in_root(str(tmp_path), "/passwd")


def test_the_images_command(rootfs: str) -> None:
    config = RunConfig(env=("A=1", "B=x=y"), entrypoint=("/run",), cmd=("-v",), user="app", working_dir="/srv")
    process = process_of(config, rootfs)
    assert process.args == ("/run", "-v")
    assert process.env == ("A=1", "B=x=y", f"PATH={DEFAULT_PATH}", "HOME=/home/app")
    assert process.cwd == "/srv"
    assert process.user.uid == 1000


def test_arguments_are_the_whole_command(rootfs: str) -> None:
    config = RunConfig(env=("PATH=/bin", "HOME=/x"), entrypoint=("/run",), cmd=("-v",))
    process = process_of(config, rootfs, ["sh", "-c", "true"])
    assert process.args == ("sh", "-c", "true")
    assert process.env == ("PATH=/bin", "HOME=/x")
    assert process.cwd == "/"


def test_a_relative_directory_counts_from_the_root(rootfs: str) -> None:
    assert process_of(RunConfig(working_dir="srv/app"), rootfs, ["x"]).cwd == "/srv/app"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (RunConfig(), UsageError),
        (RunConfig(cmd=()), UsageError),
        (RunConfig(cmd=("x",), env=("NOVALUE",)), MalformedError),
        (RunConfig(cmd=("x",), env=("=x",)), MalformedError),
        (RunConfig(cmd=("x\0y",)), MalformedError),
        (RunConfig(cmd=("\ud800",)), MalformedError),
        (RunConfig(cmd=("x",), working_dir="a\0b"), MalformedError),
    ],
)
def test_what_can_not_run(rootfs: str, config: RunConfig, error: type[ImgtoolError]) -> None:
    with pytest.raises(error):
        process_of(config, rootfs)

"""The reference tools themselves: where they come from, and that want of one is never silent."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from support import images, tools

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("name", ["mkfs.erofs", "fsck.erofs", "dump.erofs"])
def test_erofs_oracle_is_new_enough(name: str) -> None:
    version = tools.tool_version(tools.need_tool(name, "1.8"))
    assert version is not None
    assert tools.version_key(version) >= (1, 8)


def test_fsck_accepts_what_mkfs_makes_and_refuses_a_damaged_copy(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"content\n")
    image = tmp_path / "image.erofs"
    make: list[str | Path] = [tools.need_tool("mkfs.erofs"), image, tmp_path / "tree"]
    subprocess.run(make, check=True, capture_output=True)
    check: list[str | Path] = [tools.need_tool("fsck.erofs", "1.8"), image]
    assert subprocess.run(check, capture_output=True).returncode == 0
    with image.open("r+b") as stream:
        stream.seek(1024)  # the superblock's magic
        stream.write(bytes(4))
    assert subprocess.run(check, capture_output=True).returncode != 0


def test_desync_restores_what_it_chunked(tmp_path: Path) -> None:
    desync = tools.need_tool("desync")
    source, index, restored, store = (tmp_path / name for name in ("source", "s.caibx", "restored", "store"))
    source.write_bytes(b"".join(i.to_bytes(4, "little") for i in range(100_000)))
    store.mkdir()
    subprocess.run([desync, "make", "-s", store, index, source], check=True, capture_output=True)
    subprocess.run([desync, "extract", "-s", store, index, restored], check=True, capture_output=True)
    assert restored.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("umoci version 0.4.7+ds-3+b7", "0.4.7"),
        ("mkfs.erofs (erofs-utils) 1.10\\n1.2", "1.10"),
        ("no number", None),
    ],
)
def test_version_is_the_first_dotted_number(tmp_path: Path, printed: str, version: str | None) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
    program.chmod(0o755)
    assert tools.tool_version(str(program)) == version


def test_versions_compare_as_numbers() -> None:
    assert tools.version_key("1.10") > tools.version_key("1.9.4")


def test_want_of_a_tool_skips_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is not installed"):
        tools.need_tool("no-such-program")


def test_want_of_a_tool_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-program is not installed"):
        tools.need_tool("no-such-program")


def test_an_old_tool_counts_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "aged"
    program.write_text("#!/bin/sh\necho aged 1.7.9\n")
    program.chmod(0o755)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.need_tool("aged", "1.7") == str(program)
    with pytest.raises(pytest.fail.Exception, match=r"aged is 1\.7\.9, older than 1\.8"):
        tools.need_tool("aged", "1.8")


def test_want_of_root_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        tools.need_root()


def test_small_image_says_everything_that_a_layer_can(tmp_path: Path) -> None:
    tools.need_root()
    layout = images.small_layout()
    umoci: list[str | Path] = [tools.need_tool("umoci"), "unpack", "--image", f"{layout}:changed", tmp_path / "bundle"]
    subprocess.run(umoci, check=True, capture_output=True)
    root = tmp_path / "bundle" / "rootfs"
    zones, srv = root / "usr/share/zoneinfo", root / "srv"
    assert not (zones / "Africa").exists() and not (zones / "Zulu").exists()
    assert [path.name for path in (zones / "Europe").iterdir()] == ["Rome"]
    assert (zones / "Asia").is_file() and (zones / "Arctic").is_symlink() and (zones / "UTC").is_dir()
    assert (zones / "America").is_dir()
    assert os.path.samefile(srv / "data", srv / "data.link")
    assert os.path.samestat(os.lstat(srv / "loop"), os.lstat(srv / "loop.link"))
    assert stat.S_ISFIFO((srv / "fifo").stat().st_mode)
    assert (srv / "disk").stat().st_rdev == os.makedev(259, 4096)
    assert os.path.getsize(os.fsencode(srv) + b"/latin-\xe9\xff") > 0
    assert (srv / "owned").stat().st_uid == 4_000_000_000
    assert os.getxattr(srv / "data", "user.note") == b"\0\xff = value\n"
    assert len(os.getxattr(root / "usr/bin/ping", "security.capability")) == 20
    assert (srv / "ancient").stat().st_mtime < 0
    ran = subprocess.run(["chroot", root, "/bin/sh", "-c", "echo $((6 * 7))"], capture_output=True, check=True)
    assert ran.stdout == b"42\n"

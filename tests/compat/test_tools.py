"""The reference tools themselves: where they come from, and that want of one is never silent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support import tools

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
    subprocess.run([tools.need_tool("mkfs.erofs"), image, tmp_path / "tree"], check=True, capture_output=True)
    check = [tools.need_tool("fsck.erofs", "1.8"), image]
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

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sandboxes

from overlay import mountinfo, probe
from overlay.mountapi import MNT_DETACH, mount, umount
from overlay.probe import Finding

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    sandboxes.node_root(tmp_path)
    yield tmp_path
    for mounted in mountinfo.below(os.fsencode(tmp_path), mountinfo.read()):
        umount(mounted.target, MNT_DETACH)


def findings(root: Path) -> dict[str, Finding]:
    found = {finding.name: finding for finding in probe.probe(str(root))}
    assert all(finding.advice for finding in found.values() if finding.status != "ok")
    return found


def test_this_machine_can_make_sandboxes_and_nothing_stays(here: Path) -> None:
    before = sorted(os.listdir(here))
    found = findings(here / "not" / "there" / "yet")
    assert [finding for finding in found.values() if finding.required and finding.status == "missing"] == []
    assert found["mount trial"].status == "ok"
    assert sorted(os.listdir(here)) == before
    assert list(mountinfo.below(str(here), mountinfo.read())) == []


def test_a_root_on_tmpfs_is_bad_and_nothing_stays(here: Path) -> None:
    mount("tmpfs", str(here / "node"), "tmpfs", 0)
    found = findings(here / "node")
    assert found["root directory"].status == "missing"
    assert "tmpfs" in found["root directory"].detail
    assert found["mount trial"].status == "missing"
    assert "ext4" in found["mount trial"].advice
    assert os.listdir(here / "node") == []


def test_what_the_kernel_lacks_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = os.uname_result(("Linux", "host", "6.1.0-18-amd64", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: release)
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    found = findings(here)
    assert found["kernel"].status == "missing"
    assert "6.12" in found["kernel"].advice
    assert found["OCI runtime"].status == "degraded"
    assert "e2fsprogs" in found["mkfs.ext4"].advice


def test_a_failing_trial_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(probe, "mount_overlay", broken)
    found = findings(here / "node")
    assert found["mount trial"].status == "missing"
    assert "Input/output error" in found["mount trial"].advice
    assert os.listdir(here / "node") == []


def test_little_space_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FREE_SPACE", 1 << 60)
    assert findings(here)["space"].status == "degraded"


def test_without_root_nothing_is_tried(here: Path) -> None:
    for path in (here, here / "node", *here.parents[:2]):
        path.chmod(0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            found = findings(here / "node")
            tried = {found[name].detail for name in ("mount trial", "fanotify pre-content")}
            code = 0 if found["root"].status == "missing" and tried == {"not tried"} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""From a real image to a running command: what the kernel shows is what umoci unpacks, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.images import small_layout
from support.sandboxes import mounts_unchanged, node_root
from support.tools import need_root, need_tool
from support.trees import Row, manifest

from imgtool.cli import run
from layerstore.tree.local import scan

pytestmark = [pytest.mark.compat, pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]

__all__ = ["mounts_unchanged"]


class Site:
    """A node root with its store, used through the command line."""

    def __init__(self, root: str, capture: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capture = capture

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self._capture.readouterr()
        verb, *rest = arguments
        result = run([verb, "--root", self.root, *rest])
        output = self._capture.readouterr()
        assert result == code, f"{arguments}: {result}: {output.err}"
        return output.out

    def json(self, *arguments: str, code: int = 0) -> object:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def site(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Site]:
    need_root()
    site = Site(node_root(tmp_path), capfd)
    yield site
    site("down", "--all")
    run(["node", "stop", "--root", site.root])


def unpacked(tag: str, path: Path) -> dict[bytes, Row]:
    """What umoci makes of an image of the small layout."""
    command = [need_tool("umoci"), "raw", "unpack", "--image", f"{small_layout()}:{tag}", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    rows = manifest(scan(str(path), warn=[].append))
    shutil.rmtree(path)
    return rows


def mount_points() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def seen(rootfs: str) -> dict[bytes, Row]:
    """What the kernel shows of a sandbox."""
    return manifest(scan(rootfs, warn=[].append))


def assert_equal(actual: dict[bytes, Row], expected: dict[bytes, Row]) -> None:
    """Path by path; the root's own time is made up by umoci where no layer has an entry for it."""
    assert sorted(actual) == sorted(expected)
    wrong = {path: (actual[path], expected[path]) for path in expected if path and actual[path] != expected[path]}
    assert not wrong


@pytest.mark.case("Z19", "T33", "T34", "T56", "T12", "T29", "T51", "T53")
def test_a_collapsed_image_on_the_kernel_is_what_umoci_unpacks(site: Site, tmp_path: Path) -> None:
    site("convert", f"oci:{small_layout()}:changed", "--role", "base", "--tag", "whole")
    up = site.json("up", "whole")
    assert_equal(seen(up["rootfs"]), unpacked("changed", tmp_path / "umoci"))


@pytest.mark.case("T15", "T13")
def test_a_workspace_over_its_base_is_the_same_image(site: Site, tmp_path: Path) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    site("convert", f"oci:{small_layout()}:changed", "--role", "workspace", "--base", "base", "--tag", "work")
    site("compose", "--base", "base", "--workspace", "work", "--tag", "env")
    up = site.json("up", "env", "--read-only")
    assert_equal(seen(up["rootfs"]), unpacked("changed", tmp_path / "umoci"))
    site("down", up["id"])
    # Over a base that it was not built on, the difference of the trees gives the same again.
    other = tmp_path / "other"
    (other / "etc").mkdir(parents=True)
    (other / "etc/motd").write_text("another base\n")
    site("convert", f"tree:{other}", "--role", "base", "--tag", "other")
    site("convert", f"oci:{small_layout()}:changed", "--role", "workspace", "--base", "other", "--tag", "no", code=7)
    rebased = ("--base", "other", "--rebase", "--tag", "rebased")
    site("convert", f"oci:{small_layout()}:changed", "--role", "workspace", *rebased)
    site("compose", "--base", "other", "--workspace", "rebased", "--tag", "env2")
    assert_equal(seen(site.json("up", "env2")["rootfs"]), unpacked("changed", tmp_path / "umoci2"))


def test_every_metadata_image_passes_fsck(site: Site) -> None:
    fsck = need_tool("fsck.erofs", "1.8")
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    site("convert", f"oci:{small_layout()}:changed", "--role", "workspace", "--base", "base", "--tag", "work")
    for name in ("base", "work"):
        site.json("up", name, "--mode", "eager")
        layer = site.json("inspect", name)["layers"][0]
        image = Path(site.root, "cache/meta", *layer["layer"].split(":"))
        packs = [Path(site.root, "cache/packs", *pack["pack"].split(":"), "data") for pack in layer["packs"]]
        assert packs
        command = [fsck, *(f"--device={pack}" for pack in packs), str(image)]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_run_gives_the_commands_output_and_code_and_leaves_nothing(site: Site) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    need_tool("runc")
    for runtime in ("runc", "chroot"):  # crun: test_overlay_execution.py
        command = ("run", "--runtime", runtime, "base", "--", "/bin/sh", "-c")
        assert site(*command, "echo hello; echo x > /new; cat /new") == "hello\nx\n"
        site(*command, "exit 7", code=7)
        site("run", "--runtime", runtime, "base", "--", "/bin/nonexistent", code=127)
        site("run", "--runtime", runtime, "base", "--", "nonexistent", code=127)
        site("run", "--runtime", runtime, "base", "--", "/etc", code=126)
        assert site("run", "--runtime", runtime, "base", "--", "echo", "by", "PATH") == "by PATH\n"
        site(*command, "sh -c 'kill -TERM $$'; exit $?", code=143)
    assert site.json("ps") == []
    assert os.listdir(Path(site.root, "sandboxes")) == []


def test_a_bundle_starts_with_runc(site: Site, tmp_path: Path) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    bundle = tmp_path / "bundle"
    up = site.json("up", "base", "--bundle", str(bundle))
    config = json.loads((bundle / "config.json").read_text())
    config["process"] |= {"args": ["/bin/sh", "-c", "echo $0 runs; id -u"], "terminal": False}
    (bundle / "config.json").write_text(json.dumps(config))
    command = [need_tool("runc"), "run", "-b", str(bundle), f"t-{os.getpid()}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "/bin/sh runs\n0\n"), ran.stderr
    site("down", up["id"])


def test_sandboxes_share_layers_and_nothing_else(site: Site) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    first, second = (site.json("up", "base") for _ in range(2))
    Path(first["rootfs"], "etc/hostname").write_text("first\n")
    Path(first["rootfs"], "mine").write_text("x")
    assert not Path(second["rootfs"], "mine").exists()
    assert len([path for path in mount_points() if path.startswith(f"{site.root}/layers")]) == 1
    site("down", first["id"])
    assert Path(second["rootfs"], "bin/sh").exists()
    site("down", second["id"])
    assert not [path for path in mount_points() if path.startswith(site.root)]
    site("down", second["id"])  # idempotent


@pytest.mark.case("C05", "C10")
def test_a_corrupt_pack_is_named_and_never_mounted(site: Site) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    pack = site.json("inspect", "base")["layers"][0]["packs"][0]
    blob = Path(site.root, "store/blobs", *pack["blob"].split(":"))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    site("up", "base", "--mode", "eager", code=5)
    findings = site.json("verify", code=12)
    assert (findings[0]["fault"], findings[0]["blob"]) == ("corrupt", pack["blob"])
    # Converting again does not rely on it, and heals it.
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    assert site.json("verify") == []
    assert Path(site.json("up", "base", "--mode", "eager")["rootfs"], "bin/sh").exists()


def test_a_cached_image_needs_no_fetch(site: Site) -> None:
    site("convert", f"oci:{small_layout()}:base", "--role", "base", "--tag", "base")
    assert site.json("up", "base")["receipt"]["fetched_bytes"] > 0
    assert site.json("up", "base")["receipt"]["fetched_bytes"] == 0


def test_without_root_there_is_one_clear_line(tmp_path: Path) -> None:
    need_root()
    script = (
        "import os, sys, imgtool.commands.up; from imgtool.cli import run; os.setgid(65534); os.setuid(65534); "
        f"sys.exit(run(['up', '--root', {str(tmp_path)!r}, 'x']))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 11
    assert len(ran.stderr.splitlines()) == 1
    assert "root" in ran.stderr

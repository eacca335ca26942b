"""Each benchmark of the node runs, in small, and measures what it says: not how fast, but how its arms differ."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support import sandboxes
from support.layouts import Layout, tar_of
from support.tools import CHECKOUT, need_root, need_tool

pytestmark = [pytest.mark.privileged, pytest.mark.usefixtures("mounts_unchanged")]
mounts_unchanged = sandboxes.mounts_unchanged

MIB = 1 << 20
BIG = 12
"""MiB of the largest file: more frames than are read ahead."""


def blocks(count: int, first: int) -> bytes:
    """So many MiB that compress well, and no two blocks of which are the same."""
    numbers = range(first << 8, (first + count) << 8)
    return b"".join(struct.pack("<Q", number) * 512 for number in numbers)


def root_tar() -> bytes:
    """A shell with its libraries, a large file and a larger one."""
    shell = need_tool("sh")
    said = subprocess.run(["ldd", shell], capture_output=True, text=True, check=True).stdout
    files = {word: Path(word).read_bytes() for word in said.split() if word.startswith("/")}
    files |= {"/bin/sh": Path(shell).read_bytes(), "/srv/large": blocks(2, 0), "/srv/larger": blocks(BIG, 2)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("proc", "sys", "dev", "tmp"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``benchmarks.images`` makes, in small."""
    need_root()
    top = tmp_path_factory.mktemp("images")
    layout = Layout(top / "debian")
    base = layout.layer(root_tar())
    layout.image([base], tag="full")
    layout.image([base, layout.layer(tar_of({"srv/work": b"work\n"}))], tag="workspace")
    return top


def bench(name: str, tmp_path: Path, *arguments: str) -> Any:
    """What it writes with ``--json``; whatever it made is gone."""
    work, result = tmp_path / "work", tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--rounds", "1"]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(
        [*command, "--work", str(work), "--json", str(result)],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "| --- |" in done.stdout
    assert not work.exists()
    return json.loads(result.read_text())


def test_a_lazy_cold_start_fetches_less(images: Path, tmp_path: Path) -> None:
    need_tool("nginx")
    need_tool("runc")
    found = bench("coldstart", tmp_path, str(images), "--link", "0ms", "--command", "sh -c 'echo done'")
    runs = found["links"]["0ms"]
    fetched = {name: run["more"]["bytes"] for name, [run] in runs.items()}
    assert {"imgtool lazy (fanotify)", "imgtool lazy (fuse)", "imgtool run, lazy", "imgtool eager"} <= set(fetched)
    assert 0 < fetched["imgtool lazy (fanotify)"] < fetched["imgtool eager"]


def test_sandboxes_are_made_by_both_and_removed(images: Path, tmp_path: Path) -> None:
    found = bench("nodeup", tmp_path, str(images), "--alone", "4", "--standing", "12", "--clients", "2")
    [ours] = found["rounds"]["imgtool"]
    assert all(value > 0 for value in ours.values())
    assert {"up_median_ms", "up_clients_per_second", "up_batches_per_second", "down_median_ms"} <= set(ours)


def test_a_page_is_an_event_while_its_pack_is_guarded_and_none_before_and_after(images: Path, tmp_path: Path) -> None:
    found = bench("events", tmp_path, str(images), "--pages", "100")
    events = {name: run["events"] for name, [run] in found["pages"].items()}
    assert events == {"eager": 0.0, "released": 0.0, "guarded (fanotify)": 1.0, "guarded (fuse)": 0.0}


def test_memory_is_counted_for_every_process(tmp_path: Path) -> None:
    found = bench("nodememory", tmp_path, "--mib", "48", "--layers", "2", "--sandboxes", "4", "--fill")
    for sizes in found["stages"].values():
        assert {"imgtool-holder", "imgtool-worker", "imgtool-keeper"} < set(sizes)
        assert sizes["sum"] == sum(size for name, size in sizes.items() if name != "sum") > MIB

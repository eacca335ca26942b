"""The examples of the manual that make sandboxes, run in order on a real kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.images import small_layout
from support.layouts import Layout, tar_of
from support.manual import MANUAL, examples, fits
from support.sandboxes import node_root
from support.tools import CHECKOUT

pytestmark = pytest.mark.privileged


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A store with ``repo-env``, whose base runs a shell, and a node beside it that is cleared at the end."""
    base = small_layout()
    node_root(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "imgtool"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{CHECKOUT}" exec "{sys.executable}" -m imgtool "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "IMGTOOL_ROOT": str(tmp_path / "root"),
        "IMGTOOL_STORE": str(tmp_path / "store"),
    }
    layout = Layout(tmp_path / "repo")
    layout.image([tar_of({"src/": None, "src/hello": b"hello\n"})], tag="latest")
    for command in (
        f"imgtool convert oci:{base}:base --role base --tag debian-full",
        "imgtool convert oci:repo:latest --role toolkit --tag repo",
        "imgtool compose --base debian-full --toolkit repo --tag repo-env",
    ):
        ran = _shell(command, tmp_path, environment)
        assert ran.returncode == 0, ran.stdout
    try:
        yield environment
    finally:
        ran = _shell("imgtool down --all --json", tmp_path, environment)
        assert ran.returncode == 0, ran.stdout
        assert json.loads(ran.stdout)["leftovers"] == [], ran.stdout
        assert _shell("imgtool node stop", tmp_path, environment).returncode == 0


def _shell(command: str, top: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=top,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_examples_do_what_the_manual_says(tmp_path: Path, environment: dict[str, str]) -> None:
    count = 0
    for example in examples(root=True):
        ran = _shell(example.command, tmp_path, environment)
        where = f"{MANUAL.name}:{example.line}: $ {example.command}\n{ran.stdout}"
        assert ran.returncode == example.code, where
        assert fits(example.output, ran.stdout), f"{where}--- but the manual shows:\n{example.output}"
        count += 1
    assert count > 8


def test_json_keys_of_sandboxes_are_those_in_the_manual(tmp_path: Path, environment: dict[str, str]) -> None:
    def keys(verb: str) -> set[str]:
        section = MANUAL.read_text().partition(f"\n### imgtool {verb}\n")[2].partition("\n##")[0]
        rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
        return {key for row in rows for key in re.findall(r"`([a-z_]+)`", row)}

    def printed(command: str) -> Any:
        ran = _shell(command, tmp_path, environment)
        assert ran.returncode == 0, ran.stdout
        return json.loads(ran.stdout)

    up = printed("imgtool up repo-env --id box --json")
    [listed] = printed("imgtool ps --json")
    run = printed("imgtool run --quiet --json repo-env -- true")
    down = printed("imgtool down box --json")
    assert set(up) == keys("up")
    assert set(listed) == keys("up") - {"bundle"} | keys("ps")
    assert set(run) == keys("up") - {"bundle"} | keys("run")
    assert set(down) == keys("down")

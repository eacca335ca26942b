"""The programs that tests compare with: found, new enough, or said to be missing.

On a laptop a missing program skips the test and says why; with ``CI`` set it fails, because there
``scripts/setup test`` has installed everything and a silent gap would look like a pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PRIVATE_TOOLS = CHECKOUT / ".tools" / "bin"
"""What ``scripts/setup test`` unpacks from a newer Debian; it comes before PATH."""

_VERSION = re.compile(r"(?<![\d.])\d+(?:\.\d+)+")


def need_tool(name: str, minimum: str | None = None) -> str:
    """The path of the program ``name``, at least of release ``minimum`` (such as "1.8"). Else the test ends."""
    path = find_tool(name)
    if path is None:
        lacking(f"{name} is not installed (scripts/setup test)")
    if minimum is not None:
        found = tool_version(path)
        if found is None or version_key(found) < version_key(minimum):
            lacking(f"{path} is {found or 'of an unknown release'}, older than {minimum} (scripts/setup test)")
    return path


def need_root() -> None:
    """End the test unless it runs as root."""
    if os.geteuid() != 0:
        lacking("needs root")


def lacking(reason: str) -> NoReturn:
    """End the test for want of something: a failure in CI, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {reason}", pytrace=False)
    pytest.skip(reason)


def find_tool(name: str) -> str | None:
    return shutil.which(
        name,
        path=os.pathsep.join([str(PRIVATE_TOOLS), os.environ.get("PATH", os.defpath), "/usr/sbin:/sbin"]),
    )


@cache
def tool_version(path: str) -> str | None:
    """The first dotted number that the program prints about itself; None when it prints none."""
    for option in ("--version", "-V"):
        ran = subprocess.run(
            [path, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        match = _VERSION.search(ran.stdout.decode("utf-8", "replace"))
        if match and (ran.returncode == 0 or option == "-V"):
            return match.group()
    return None


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

"""Real images for tests, built once by ``benchmarks/images`` into ``.cache/images`` of the checkout."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from support.tools import CHECKOUT, lacking, need_root, need_tool

CACHE = CHECKOUT / ".cache" / "images"


def small_layout() -> Path:
    """An OCI layout of Debian packages, about 3,700 entries and 57 MB, which runs ``/bin/sh`` and ``perl``.

    Tag ``base`` has one layer. Tag ``changed`` has a second one over it: whiteouts of a file and of a directory, an
    opaque directory, file, symlink and directory in each other's place, hardlinks (one of a symlink), a fifo, devices,
    xattrs, a capability, a name that is not UTF-8 and one over 100 bytes, ids beyond octal, times with nanoseconds and
    before 1970. Root and the mirror are needed the first time; a test without them ends as in :mod:`support.tools`.
    """
    return need_image("small") / "small"


def need_image(name: str) -> Path:
    """The directory that holds the image ``name`` (see ``benchmarks/images``), built now if it isn't there."""
    reason = _build(name)
    if reason is not None:
        lacking(reason)
    return CACHE


@cache
def _build(name: str) -> str | None:
    need_root()
    need_tool("mmdebstrap")
    built = subprocess.run(
        [sys.executable, "-m", "benchmarks.images", CACHE, name],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if built.returncode:
        return f"the image {name} can't be built here: {built.stderr.strip().splitlines()[-1:]}"
    return None

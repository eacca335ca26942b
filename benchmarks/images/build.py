"""Builds images that are not there yet."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.images.layout import Layout
from benchmarks.images.recipes import RECIPES, RECIPES_VERSION, Workshop


def build(directory: Path, names: Iterable[str]) -> list[str]:
    """Build the images ``names``, and those they stand on, where ``directory`` lacks them; returns what was built."""
    directory.mkdir(parents=True, exist_ok=True)
    built: list[str] = []
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _discard_other_version(directory)
        for name in names:
            _build(Workshop(directory), name, built)
    return built


def exists(directory: Path, target: str) -> bool:
    layout, _, tag = target.partition(":")
    if not tag:
        return (directory / layout).exists()
    return (directory / layout / "index.json").exists() and tag in Layout(directory / layout).tags()


def report(directory: Path) -> Iterable[str]:
    """One line for each image: layers with their compressed sizes."""
    for path in sorted(directory.glob("*/index.json")):
        layout = Layout(path.parent)
        for tag in layout.tags():
            sizes = " + ".join(f"{layer.size / 1e6:.1f}" for layer in layout.layers(tag))
            yield f"oci:{path.parent}:{tag}: {sizes} MB"


def _build(shop: Workshop, name: str, built: list[str]) -> None:
    recipe, target, bases = RECIPES[name]
    if exists(shop.directory, target):
        return
    for base in bases:
        _build(shop, base, built)
    started = time.monotonic()
    recipe(shop)
    built.append(name)
    print(f"{name}: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _discard_other_version(directory: Path) -> None:
    stamp = directory / "version.json"
    if not stamp.exists() or json.loads(stamp.read_bytes()) != RECIPES_VERSION:
        for name in ("trees", *{target.partition(":")[0] for _, target, _ in RECIPES.values()}):
            shutil.rmtree(directory / name, ignore_errors=True)
        stamp.write_text(json.dumps(RECIPES_VERSION))

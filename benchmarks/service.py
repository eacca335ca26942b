"""Our arm: a node service in processes of its own, stopped at the end, with nothing of it left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import TOP, imgtool
from layerstore.errors import ImgtoolError
from overlay import mountinfo
from overlay.service.client import Client

_PATIENCE = 60.0


@dataclass
class Service:
    """One that runs.

    Attributes:
        root: its root.
        client: a connection to it; others may be made.
    """

    root: Path
    client: Client

    @property
    def log(self) -> Path:
        return self.root.with_name(self.root.name + ".log")

    def status(self) -> Mapping[str, Any]:
        return self.client.status().raw

    def pids(self) -> list[int]:
        return list(self.status()["pids"].values())


@contextlib.contextmanager
def running(root: Path, *options: str) -> Iterator[Service]:
    """The service of ``root`` for as long as the block runs; its log lies beside the root."""
    service = Service(root, Client(str(root)))
    service.log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        imgtool("node", "run", "--root", str(root), "--log", str(service.log), *options), cwd=TOP
    )
    try:
        until = time.monotonic() + _PATIENCE
        while not _answers(service.client):
            if process.poll() is not None or time.monotonic() > until:
                said = service.log.read_text()[-500:] if service.log.exists() else "it wrote no log"
                raise SystemExit(f"the node service does not answer: {said}")
            time.sleep(0.01)
        yield service
    finally:
        pids: list[int] = []
        with contextlib.suppress(ImgtoolError):
            pids = service.pids()
            service.client.remove_all()
            service.client.stop(force=True)
        service.client.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        until = time.monotonic() + _PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
            time.sleep(0.01)  # the worker outlives the holder by a moment
        left = list(mountinfo.below(os.path.realpath(root), mountinfo.read()))
        assert not left, f"still mounted: {left[:3]}"


def _answers(client: Client) -> bool:
    try:
        client.status()
    except ImgtoolError:
        return False
    return True


def resident(pids: list[int]) -> dict[str, int]:
    """Proportional set size of each process, and their sum, in bytes: shared pages are divided by those who share."""
    sizes = {}
    for pid in pids:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                sizes[name] = sizes.get(name, 0) + int(line.split()[1]) * 1024
    return {**sizes, "sum": sum(sizes.values())}

"""Running arms in turn, and telling what came of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOP = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """One run of one arm: seconds of wall clock and of processors, and peak memory in bytes."""

    wall: float
    cpu: float
    peak: int
    more: Mapping[str, object] = field(default_factory=dict)


def tool(name: str) -> str | None:
    """A program from ``.tools/bin`` or PATH."""
    private = TOP / ".tools" / "bin" / name
    return str(private) if private.exists() else shutil.which(name)


def timed(command: str | Sequence[str]) -> Run:
    """Run a command (a string goes through bash) and account for it and all it started."""
    shell = isinstance(command, str)
    argv = ["bash", "-o", "pipefail", "-c", command] if shell else list(command)
    start = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}: {errors.decode(errors='replace')[-500:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def interleaved(
    arms: Mapping[str, Callable[[], Run]], rounds: int, *, warm_up: bool = True, unit: str = ".2f"
) -> dict[str, list[Run]]:
    """Every arm once a round, in turn; the first round is a warm-up that isn't counted, unless there is to be none."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for number in range(0 if warm_up else 1, rounds + 1):
        for name, arm in arms.items():
            run = arm()
            if number:
                runs[name].append(run)
                print(f"  round {number} {name}: {run.wall:{unit}} s", file=sys.stderr)
    return runs


def median(runs: Sequence[Run]) -> float:
    return statistics.median(run.wall for run in runs)


def spread(values: Sequence[float], unit: str = ".2f") -> tuple[str, str]:
    """Median and range, for two columns of a table."""
    return f"{statistics.median(values):{unit}}", f"{min(values):{unit}}-{max(values):{unit}}"


def drop_caches(what: int = 3) -> None:
    """Have the kernel forget what it has on disk: pages (1), directories and inodes (2), or both."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text(str(what))


@contextlib.contextmanager
def journaled(directory: Path, size: int = 16 << 30) -> Iterator[Path]:
    """A fresh ext4 with a journal, as nodes have, mounted on ``directory``; it lies in a sparse file beside it.

    Without a journal ext4 looks for inodes that were not deleted lately, and what one arm has deleted slows down the
    next: up to 0.3 ms for each new file or directory, for a minute and more (measured on 6.18).
    """
    image = directory.with_name(directory.name + ".ext4")
    with image.open("wb") as file:
        file.truncate(size)
    timed(["mkfs.ext4", "-q", str(image)])
    directory.mkdir()
    timed(["mount", "-o", "loop", str(image), str(directory)])
    try:
        yield directory
    finally:
        for _ in range(100):  # the last files of processes that have ended are closed a moment later
            if subprocess.run(["umount", str(directory)], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        directory.rmdir()
        image.unlink()


def need_root() -> None:
    """For what mounts: be root, and clean up at SIGTERM as at Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if os.geteuid() != 0:
        raise SystemExit("this needs root: it mounts, and drops the page cache")


def rows(runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, ...]]:
    """For a table: name, median, spread, CPU seconds, peak memory."""
    return [
        (
            name,
            f"{median(of):.2f} s",
            f"{min(run.wall for run in of):.2f}-{max(run.wall for run in of):.2f}",
            f"{statistics.median(run.cpu for run in of):.2f}",
            f"{max(run.peak for run in of) / 1e6:.0f} MB",
        )
        for name, of in runs.items()
    ]


HEADINGS = ("arm", "median", "spread", "CPU s", "peak")


def table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, ready for the documentation."""
    print("| " + " | ".join(headings) + " |")
    print("|" + " --- |" * len(headings))
    for row in body:
        print("| " + " | ".join(map(str, row)) + " |")


def environment() -> dict[str, object]:
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "model": next(
            (line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), ""
        ),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def parser(description: str, *, images: bool = True, rounds: int = 5) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    if images:
        made.add_argument("images", type=Path, metavar="DIR", help="made by python -m benchmarks.images")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--work", type=Path, default=Path("/var/tmp/imgtool-benchmark"), help="removed before and after")
    return made


def fresh(path: Path) -> Path:
    """An empty directory."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def save(path: Path | None, result: Mapping[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **result}, indent=2, default=vars))


def layer_of(layout: Path, tag: str, number: int = -1) -> Path:
    """The blob of a layer of an image in an OCI layout."""
    index = json.loads((layout / "index.json").read_text())
    for entry in index["manifests"]:
        if entry["annotations"]["org.opencontainers.image.ref.name"] == tag:
            manifest = json.loads(blob(layout, entry["digest"]).read_text())
            return blob(layout, manifest["layers"][number]["digest"])
    raise SystemExit(f"{layout} has no image {tag}")


def tags(layout: Path) -> list[str]:
    index = json.loads((layout / "index.json").read_text())
    return [entry["annotations"]["org.opencontainers.image.ref.name"] for entry in index["manifests"]]


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / Path(*digest.split(":"))


def imgtool(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "imgtool", *arguments]


def tree_size(path: Path) -> int:
    """Bytes of all files below."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

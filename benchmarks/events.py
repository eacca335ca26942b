"""What lazy loading costs a reader whose data are on the node: while a pack is guarded, and after it was let go.

::

    scripts/setup test
    python -m benchmarks.images /var/tmp/imgtool-images debian
    python -m benchmarks.events /var/tmp/imgtool-images [--pages 4000] [--rounds 5] [--json FILE]

Four node services have debian:full in their caches and read the same files through their own mounts of its layer:

* **eager**: fetched before it was mounted. Nothing of ours is in the path.
* **released**: mounted while nothing was there, then read, all of it; the guard is gone, the mount is the same.
* **guarded (fanotify)**, **guarded (fuse)**: the same, but the largest file was not read: its frames are missing, so
  the pack stays guarded, and every read that the page cache of the layer can't serve is an event, answered at once.

*Pages* reads random pages of 4 KiB, each of which misses the page cache of the layer's files; the pack's own pages are
in memory. Only one page is read at a time (``POSIX_FADV_RANDOM``). The difference to eager is what an event costs.
*Whole* reads every file of the layer from one end to the other in pieces of 1 MiB, but for the largest: with the page
cache dropped, with the packs in it, and with the files in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import service
from benchmarks.harness import drop_caches, fresh, imgtool, need_root, parser, save, spread, table, timed
from overlay.service.request import Backend, Mode, SandboxRequest

PAGE = 4096
PIECE = 1 << 20
LARGE = 256 << 10
"""Files of this size and more are those whose pages are read."""
PATIENCE = 60.0
COLD, PACKS, FILES = "nothing in memory", "packs in memory", "files in memory"


@dataclass
class Mounted:
    """A layer as one service has mounted it, in the order in which its files lie in the directory tree."""

    node: service.Service
    top: Path
    files: Sequence[str]
    largest: str

    def read_whole(self, *, but: str = "") -> tuple[float, int]:
        """Seconds and bytes."""
        count, start = 0, time.perf_counter()
        for name in self.files:
            if name != but:
                count += _read(self.top / name)
        return time.perf_counter() - start, count

    def read_pages(self, places: Sequence[tuple[str, int]]) -> float:
        """Seconds for one page at each place; files are opened before."""
        with contextlib.ExitStack() as stack:
            fds = {}
            for name in {name for name, _ in places}:
                fds[name] = fd = os.open(self.top / name, os.O_RDONLY)
                stack.callback(os.close, fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            start = time.perf_counter()
            for name, offset in places:
                os.pread(fds[name], PAGE, offset)
            return time.perf_counter() - start

    def forget(self) -> None:
        """Have no page of the files in memory; those of the packs stay."""
        for name in self.files:
            fd = os.open(self.top / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def warm_packs(self) -> None:
        """Have the packs' pages in memory, by way of the files: who reads a guarded pack itself demands all of it."""
        self.read_whole(but=self.largest)
        self.forget()

    def events(self) -> int:
        return int(self.node.status()["events"]["events"])

    def guarded(self) -> int:
        return sum(backend["guarded_packs"] for backend in self.node.status()["backends"].values())


def _read(path: Path) -> int:
    count = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            count += len(piece)
    return count


def mount(node: service.Service, store: Path, mode: Mode, backend: Backend | None) -> Mounted:
    node.client.create(SandboxRequest(base="full", store=str(store), mode=mode, backend=backend))
    [top] = node.root.glob("layers/*/mnt")
    files = [
        os.path.relpath(os.path.join(folder, name), top)
        for folder, _, names in os.walk(top)
        for name in names
        if os.path.isfile(path := os.path.join(folder, name)) and not os.path.islink(path)
    ]
    return Mounted(node, top, sorted(files), max(files, key=lambda name: (top / name).stat().st_size))


def fill(mounted: Mounted, *, but: str = "") -> None:
    """Read everything once, by several readers, and wait until it is durable."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda name: _read(mounted.top / name), [name for name in mounted.files if name != but]):
            pass
    until = time.monotonic() + PATIENCE
    while not but and mounted.guarded():
        if time.monotonic() > until:
            raise SystemExit("the pack is read but not let go")
        time.sleep(0.1)
    if but and not mounted.guarded():
        raise SystemExit("nothing of the pack is missing, so it isn't guarded: is no file larger than a few frames?")


def main() -> None:
    need_root()
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, default=4000)
    options.add_argument("--image", default="debian:full", metavar="LAYOUT:TAG")
    arguments = options.parse_args()
    work = fresh(arguments.work)
    store = work / "store"
    source = ("convert", f"oci:{arguments.images}/{arguments.image}", "--role", "base", "--tag", "full")
    timed(imgtool(*source, "--store", str(store)))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        arms: dict[str, Mounted] = {}
        for name, mode, backend in (
            ("eager", "eager", None),
            ("released", "lazy", "fanotify"),
            ("guarded (fanotify)", "lazy", "fanotify"),
            ("guarded (fuse)", "lazy", "fuse"),
        ):
            node = stack.enter_context(service.running(work / name.replace(" ", "-")))
            arms[name] = mounted = mount(node, store, mode, backend)  # type: ignore[arg-type]
            if mode == "lazy":
                fill(mounted, but=mounted.largest if name != "released" else "")
        pages = measure_pages(arms, arguments.pages, arguments.rounds)
        whole = measure_whole(arms, arguments.rounds)
    report(pages, whole)
    save(arguments.json, {"pages": pages, "whole": whole, "pages_each": arguments.pages})


def measure_pages(arms: Mapping[str, Mounted], count: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Microseconds a page, and events a page, by arm."""
    eager = arms["eager"]
    sizes = {name: (eager.top / name).stat().st_size for name in eager.files if name != eager.largest}
    places = [
        (name, offset) for name, size in sizes.items() if size >= LARGE for offset in range(0, size - PAGE + 1, PAGE)
    ]
    chosen = random.Random(1).sample(places, min(count, len(places)))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for mounted in arms.values():
        mounted.warm_packs()
    for number in range(rounds + 1):
        for name, mounted in arms.items():
            before = mounted.events()
            seconds = mounted.read_pages(chosen)
            events = mounted.events() - before
            if number:
                found[name].append({"us": 1e6 * seconds / len(chosen), "events": events / len(chosen)})
    return found


def measure_whole(arms: Mapping[str, Mounted], rounds: int) -> dict[str, dict[str, list[float]]]:
    """MB a second, by what is in memory and arm."""
    but = arms["eager"].largest
    states: dict[str, Callable[[Mounted], object]] = {
        COLD: lambda mounted: drop_caches(1),
        PACKS: Mounted.warm_packs,
        FILES: lambda mounted: mounted.read_whole(but=but),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for state, prepare in states.items():
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, mounted in list(arms.items())[:: 1 if number % 2 else -1]:
                prepare(mounted)
                seconds, count = mounted.read_whole(but=but)
                if number:
                    rates[name].append(count / seconds / 1e6)
        found[state] = rates
    return found


def report(pages: Mapping[str, Sequence[Mapping[str, float]]], whole: Mapping[str, Mapping[str, list[float]]]) -> None:
    base = [run["us"] for run in pages["eager"]]
    body = []
    for name, runs in pages.items():
        more = statistics.median(run["us"] - other for run, other in zip(runs, base, strict=True))
        events = statistics.median(run["events"] for run in runs)
        body.append((name, *spread([run["us"] for run in runs], ".1f"), f"{more:+.1f}", f"{events:.2f}"))
    table(("a page of 4 KiB", "µs", "spread", "more than eager", "events a page"), body)
    print()
    body = []
    for state, rates in whole.items():
        for name, values in rates.items():
            ratio = statistics.median(value / other for value, other in zip(values, rates["eager"], strict=True))
            body.append((state, name, *spread(values, ".0f"), f"{ratio:.3f}"))
    table(("whole layer", "arm", "MB/s", "spread", "of eager"), body)


if __name__ == "__main__":
    main()

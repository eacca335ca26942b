"""Hot data first: what ``optimize`` buys at a start, and what it costs in time, space and sharing.

::

    scripts/setup bench
    python -m benchmarks.images /var/tmp/imgtool-images debian
    python -m benchmarks.relay /var/tmp/imgtool-images [--link 20ms] [--rounds 3] [--json FILE]

The plan is what the program reads of the packs, seen as it is read for the first time: the image is mounted from files
of its own, marked for pre-content events, and the program is run in it. One run, so what it buys is measured on what it
was made of; ``benchmarks.prefetch`` has plans and runs that they have not seen.

* **layout**: frames that hold planned chunks, runs of neighbouring frames, and their compressed bytes.
* **fetch**: these runs, each by one request of a single range, four at a time, from a file server behind the link.
* **lazy**: from an empty node to the program's end, with nothing fetched ahead, and with the plan.
* **sharing**: what a build that changed 5 % of its bytes adds to a store, with and without the new image in it; and
  when it is converted by the plan itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import service
from benchmarks.coldstart import COMMAND, LINKS, Cold, LinkKind
from benchmarks.fileserver import serving
from benchmarks.harness import (
    Run,
    fresh,
    imgtool,
    interleaved,
    median,
    need_root,
    parser,
    save,
    spread,
    table,
    tool,
)
from benchmarks.link import simulated
from layerstore.errors import printable
from layerstore.image import Image, load_image
from layerstore.opened import decompress_metadata
from layerstore.pack.reader import FrameIndex, PackReader
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from overlay.bundle import write_bundle
from overlay.erofs import mount_erofs
from overlay.lazy import fanotify
from overlay.mountapi import MNT_DETACH, umount
from overlay.process import run_config
from overlay.sandbox import Sandboxes
from overlay.service.request import SandboxRequest
from prefetch.learn.ranges import disjoint, joined
from prefetch.plans.format import CERTAIN, Plan, PlannedRange, PlanPart, parse_plan
from prefetch.plans.shelf import Shelf
from prefetch.trace.places import Range, open_places

AT_ONCE = 4
"""Requests under way in the fetch arms."""
IMAGE, HOT = "image", "hot"
FETCH, LAZY, PLANNED = "fetch", "lazy", "lazy, planned"


class Events:
    """First reads of marked files while it runs; a context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.seen: list[tuple[float, int, int, int]] = []  # seconds, device, offset, length
        self._group = fanotify.init()
        self._devices = {}
        for device, path in enumerate(paths, 1):
            fd = os.open(path, os.O_RDONLY)
            fanotify.mark(self._group, fd)
            self._devices[os.fstat(fd).st_ino] = device
            os.close(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer)

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not select.select([self._group], [], [], 0.1)[0]:
                continue
            for event in fanotify.read(self._group):
                device = self._devices[os.fstat(event.number).st_ino]
                self.seen.append((time.monotonic(), device, event.offset, event.length))
                fanotify.respond(self._group, event.number, True)
                os.close(event.number)

    def __enter__(self) -> Events:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._group)


def record(store: DirectoryStore, image: Image, work: Path, command: Sequence[str]) -> PlanPart:
    """What the program reads of the packs of an image of one layer, in the order of first reads."""
    (layer,) = image.layers
    metadata, target = work / "metadata", work / "mount"
    target.mkdir()
    with metadata.open("wb") as file:
        decompress_metadata(store, layer, file.write)
    devices = []
    for pack in layer.packs:
        devices.append(work / pack.digest.hex)
        with store.open(pack.blob) as blob, devices[-1].open("wb") as file:
            reader = PackReader(pack, blob)
            for offset in range(0, pack.raw_size, 1 << 20):
                file.write(reader.read_at(offset, min(1 << 20, pack.raw_size - offset)))
    with Events(devices) as events:
        mount_erofs(metadata, devices, target)
        try:
            start = time.monotonic()
            subprocess.run(["chroot", str(target), *command], check=True, stdout=subprocess.DEVNULL)
        finally:
            umount(str(target), MNT_DETACH)
    shutil.rmtree(work)
    found = []
    with open_places(store, image) as places:
        for at, device, offset, length in events.seen:
            for place in places.at(Range(0, device, offset, length)):
                where = place.range.offset, place.range.length
                path = printable(place.path)
                found.append(PlannedRange(device, *where, round((at - start) * 1e6), CERTAIN, path, place.file_offset))
    return PlanPart(layer.metadata, tuple(pack.digest for pack in layer.packs), joined(disjoint(found)))


class Bench:
    """A store with the image, laid out and not, behind a file server. A context manager."""

    def __init__(self, images: Path, image: str, work: Path, command: Sequence[str]) -> None:
        self._source, self._work, self._command = f"oci:{images}/{image}", work, command
        self._stack = contextlib.ExitStack()
        self._count = 0

    def __enter__(self) -> Bench:
        with self._stack as stack:
            served = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="imgtool-relay-")))
            stack.callback(shutil.rmtree, self._work, ignore_errors=True)
            fresh(self._work)
            self.path = served / "store"
            self._do("convert", self._source, "--role", "base", "--tag", IMAGE)
            self.store = DirectoryStore(str(self.path))
            part = record(self.store, load_image(self.store, IMAGE), fresh(self._work / "record"), self._command)
            plan = Plan((part,), name=IMAGE)
            self.plans = {IMAGE: plan}
            self.files = {name: self._work / f"{name}.json" for name in (IMAGE, HOT)}
            self.files[IMAGE].write_bytes(plan.to_bytes())
            before = self._space()
            start = time.perf_counter()
            options = ("--plan", str(self.files[IMAGE]), "--tag", HOT, "--plan-out", str(self.files[HOT]))
            self.optimized = self._do("optimize", IMAGE, *options)
            self.seconds = time.perf_counter() - start
            self.added = self._space() - before
            self.plans[HOT] = parse_plan(self.files[HOT].read_bytes(), "the new plan")
            self.address = stack.enter_context(serving(self.path)).removeprefix("http://")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _do(self, *arguments: str, store: Path | None = None) -> Any:
        command = imgtool(*arguments, "--json", "--store", str(store or self.path))
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def _space(self) -> int:
        return sum(blob.size for blob in DirectoryStore(str(self.path)).blobs())

    def fetch(self, kind: LinkKind, name: str) -> Run:
        """All frames that the plan touches, in runs, from the server."""
        plan, image = self.plans[name], load_image(self.store, name)
        with simulated(self.address, latency=kind.latency, rate=kind.rate) as link:
            store = HttpStore(f"http://{link.address}")
            with contextlib.ExitStack() as stack:
                blobs = {}
                for layer in image.layers:
                    for pack in layer.packs:
                        blobs[pack.digest] = stack.enter_context(store.open(pack.blob)), pack
                reads = []
                for part in plan.parts:
                    for number, digest in enumerate(part.packs, 1):
                        blob, pack = blobs[digest]
                        index = FrameIndex.read(pack, blob)
                        wanted = {
                            f for r in part.ranges if r.device == number for f in index.covering(r.offset, r.length)
                        }
                        reads += [(blob, index.blob_range(run)) for run in runs(sorted(wanted))]
                before = link.counts()
                start = time.perf_counter()
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(lambda read: read[0].read_at(*read[1]), reads))
                wall = time.perf_counter() - start
                counts = link.counts()
        return Run(wall, 0, 0, {key: counts[key] - before[key] for key in ("turns", "bytes_down")})

    def start(self, kind: LinkKind, name: str, *, planned: bool) -> Run:
        """From an empty node to the program's end."""
        self._count += 1
        root = self._work / f"root-{self._count}"
        Shelf(str(root)).save(self.plans[name])
        with (
            service.running(root) as node,
            simulated(self.address, latency=kind.latency, rate=kind.rate) as link,
        ):
            cold = Cold(link)
            request = SandboxRequest(
                base=name, store=f"http://{link.address}", mode="lazy", plan=IMAGE if planned else "none"
            )
            [made] = node.client.create(request)
            cold.is_up()
            sandbox = Sandboxes(str(root)).get(made.id)
            bundle = self._work / f"bundle-{self._count}"
            write_bundle(str(bundle), sandbox, run_config(made.raw["run"]), args=self._command)
            runc = tool("runc")
            assert runc is not None
            cold.run_to_the_end([runc, "run", "--bundle", str(bundle), f"imgtool-relay-{self._count}"])
            result = cold.result(node.status()["fetch"])
        shutil.rmtree(root)
        return result

    def sharing(self, build: str) -> dict[str, Any]:
        """What another build adds to a store: packs that it refers to, and bytes."""
        found = {}
        for name, tags, more in (
            ("after the image", (IMAGE,), ()),
            ("after both", (IMAGE, HOT), ()),
            ("after both, by the plan", (IMAGE, HOT), ("--plan", str(self.files[HOT]))),
            ("after the image, by the plan", (IMAGE,), ("--plan", str(self.files[IMAGE]))),
        ):
            store = self._work / "sharing"
            shutil.rmtree(store, ignore_errors=True)
            target = DirectoryStore.create(str(store))
            for tag in tags:
                copy(tag, self.store, target)
            found[name] = self._do("convert", build, "--role", "base", "--tag", "next", *more, store=store)
        shutil.rmtree(store)
        return found


def runs(numbers: Sequence[int]) -> Iterator[range]:
    """Rising numbers, neighbours together."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at


def main() -> None:
    need_root()
    options = parser(__doc__ or "", rounds=3)
    options.add_argument("--link", choices=LINKS, action="append", help="only this one")
    options.add_argument("--image", default="debian:full", metavar="LAYOUT:TAG")
    options.add_argument("--build", default="debian:changed", metavar="LAYOUT:TAG", help="for what sharing costs")
    options.add_argument("--command", default=COMMAND, help="has to print one line, at its end")
    options.add_argument("--no-start", action="store_true", help="without a node: layout, fetch and sharing")
    arguments = options.parse_args()
    results: dict[str, dict[str, list[Run]]] = {}
    with Bench(arguments.images, arguments.image, arguments.work, shlex.split(arguments.command)) as bench:
        layout(bench)
        for link in arguments.link or LINKS:
            results[link] = interleaved(
                arms(bench, LINKS[link], not arguments.no_start), arguments.rounds, warm_up=False
            )
        report(results)
        shared = bench.sharing(f"oci:{arguments.images}/{arguments.build}")
        print()
        table(
            ("another build", "MB stored", "MB new", "packs", "hot MB that other packs have"),
            [
                (
                    name,
                    f"{found['bytes_stored'] / 1e6:.1f}",
                    f"{found['bytes_new'] / 1e6:.1f}",
                    str(len(found["packs"])),
                    f"{found['hot']['bytes_copied'] / 1e6:.1f}" if "hot" in found else "-",
                )
                for name, found in shared.items()
            ],
        )
        summary = {"optimized": bench.optimized, "seconds": bench.seconds, "added": bench.added}
    save(
        arguments.json,
        {"image": arguments.image, "command": arguments.command, **summary, "sharing": shared, "links": results},
    )


def layout(bench: Bench) -> None:
    done = bench.optimized
    table(
        ("layout", "frames", "reads", "MB compressed"),
        [
            (name, str(of["frames"]), str(of["reads"]), f"{of['bytes'] / 1e6:.1f}")
            for name, of in (("as converted", done["before"]), ("hot first", done["after"]))
        ],
    )
    print(
        f"\n{done['matched']} ranges, {done['chunks']} chunks of {done['bytes_hot'] / 1e6:.1f} MB; optimize took "
        f"{bench.seconds:.2f} s and added {bench.added / 1e6:.1f} MB to the store\n"
    )


def arms(bench: Bench, kind: LinkKind, start: bool) -> dict[str, Callable[[], Run]]:
    found: dict[str, Callable[[], Run]] = {
        f"{FETCH}, as converted": lambda: bench.fetch(kind, IMAGE),
        f"{FETCH}, hot first": lambda: bench.fetch(kind, HOT),
    }
    if start:
        found |= {
            f"{LAZY}, as converted": lambda: bench.start(kind, IMAGE, planned=False),
            f"{LAZY}, hot first": lambda: bench.start(kind, HOT, planned=False),
            f"{PLANNED}, as converted": lambda: bench.start(kind, IMAGE, planned=True),
            f"{PLANNED}, hot first": lambda: bench.start(kind, HOT, planned=True),
        }
    return found


def report(results: dict[str, dict[str, list[Run]]]) -> None:
    body = []
    for link, found in results.items():
        for name, of in found.items():
            turns, fetched = (
                sorted(float(str(run.more[key])) for run in of)[len(of) // 2] for key in ("turns", _BYTES[name])
            )
            body.append((link, name, *spread([run.wall for run in of]), f"{turns:.0f}", f"{fetched / 1e6:.1f}"))
    table(("link", "arm", "seconds", "spread", "requests", "MB fetched"), body)
    for link, found in results.items():
        for kind in (FETCH, LAZY, PLANNED):
            if f"{kind}, hot first" in found:
                gain = median(found[f"{kind}, as converted"]) / median(found[f"{kind}, hot first"])
                print(f"\n{link}, {kind}: hot first is {gain:.2f} times as fast")


_BYTES = {
    f"{kind}, {which}": "bytes_down" if kind == FETCH else "bytes"
    for kind in (FETCH, LAZY, PLANNED)
    for which in ("as converted", "hot first")
}


if __name__ == "__main__":
    main()

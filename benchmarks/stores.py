"""Throughput of lazy and eager starts from each store, against the fastest plain client for it in the same run.

::

    python -m benchmarks.stores [--mib 256] [--link loopback --link 200M] [--store s3] [--rounds 3] [--json FILE]

One image, one file of bytes that don't compress, in a directory, behind a web server, in a bucket (SeaweedFS) and in a
registry (Debian's). What is served lies in memory. For each store and link, in turn:

* **eager**: ``POST /sandboxes`` to a node service whose cache is empty, until everything is here.
* **lazy**: the same lazily, and then the file is read from its beginning to its end.
* **plain**: the pack's blob into a file: ``cp``, ``curl``, or the transfer manager of boto3 with its own defaults.

The service has started a tiny image from the same store before, so that the store is open: to import boto3 and to make
a client takes a third of a second, once. A rate is bytes of the blob a second. Bytes and turns are the link's; over
loopback there is none, so that it costs nothing, and requests are those of the fetcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import containers, s3server, service
from benchmarks.fileserver import serving
from benchmarks.harness import (
    Run,
    drop_caches,
    fresh,
    interleaved,
    median,
    need_root,
    parser,
    save,
    spread,
    table,
    timed,
    tool,
)
from benchmarks.link import simulated
from layerstore.convert import Conversion, convert
from layerstore.image import Role, load_image
from layerstore.oci.source_name import SourceName
from layerstore.pack.stored import StoredPack
from layerstore.store.copying import copy
from layerstore.store.directory import DirectoryStore
from layerstore.store.opening import open_write_store
from overlay.service.request import Mode, SandboxRequest

LINKS = {"loopback": None, "200M": (0.0, 200e6), "5ms-200M": (0.005, 200e6)}
_TRANSFER = """
import sys, time
from benchmarks.s3server import BUCKET, client
made = client(sys.argv[1])
made.head_object(Bucket=BUCKET, Key=sys.argv[2])
start = time.perf_counter()
made.download_file(BUCKET, sys.argv[2], sys.argv[3])
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Place:
    """A store, and how else its blobs can be had.

    Attributes:
        address: ``HOST:PORT`` of its server; None for a directory.
        location: of the store, by the address to use.
        plain: fetches the pack's blob from that address into a file; the seconds it took.
    """

    address: str | None
    location: Callable[[str], str]
    plain: Callable[[str, Path], float]


class Bench:
    """The image in every store. A context manager: it serves, and removes all at the end."""

    def __init__(self, work: Path, size: int, wanted: list[str]) -> None:
        self._work, self._size, self._wanted = work, size, wanted
        self._stack = contextlib.ExitStack()
        self.places: dict[str, Place] = {}
        self.lacking: dict[str, str] = {}
        self._count = 0

    def __enter__(self) -> Bench:
        with self._stack as stack:
            served = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="imgtool-stores-")))
            stack.callback(shutil.rmtree, self._work, ignore_errors=True)
            fresh(self._work)
            store, self.pack = self._convert(served)
            for name in self._wanted:
                place = getattr(self, f"_{name}")(stack, served, store)
                if isinstance(place, str):
                    self.lacking[name] = place
                    continue
                self.places[name] = place
                if name not in ("directory", "http"):
                    target = open_write_store(place.location(place.address or ""), create=True)
                    for tag in ("image", "tiny"):
                        copy(tag, store, target)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _convert(self, served: Path) -> tuple[DirectoryStore, StoredPack]:
        tree = served / "tree"
        tree.mkdir()
        with (tree / "file").open("wb") as file:
            for _ in range(self._size >> 20):
                file.write(os.urandom(1 << 20))
        store = DirectoryStore.create(str(served / "store"))
        convert(Conversion(SourceName.parse(f"tree:{tree}"), Role.BASE, level=1), store, tag="image")
        (tree / "file").write_bytes(os.urandom(10_000))
        convert(Conversion(SourceName.parse(f"tree:{tree}"), Role.BASE, level=1), store, tag="tiny")
        shutil.rmtree(tree)
        [pack] = load_image(store, "image").layers[0].packs
        return store, pack

    # --- the stores

    def _directory(self, stack: contextlib.ExitStack, served: Path, store: DirectoryStore) -> Place | str:
        path = store.local_path(self.pack.blob)
        return Place(None, lambda address: store.root, lambda address, to: timed(["cp", path, str(to)]).wall)

    def _http(self, stack: contextlib.ExitStack, served: Path, store: DirectoryStore) -> Place | str:
        if tool("nginx") is None or tool("curl") is None:
            return "no nginx or no curl here: scripts/setup test"
        address = stack.enter_context(serving(served / "store")).removeprefix("http://")
        path = f"blobs/{self.pack.blob.algorithm}/{self.pack.blob.hex}"
        return Place(address, lambda at: f"http://{at}", lambda at, to: _curl(f"http://{at}/{path}", to))

    def _s3(self, stack: contextlib.ExitStack, served: Path, store: DirectoryStore) -> Place | str:
        if reason := s3server.lacking():
            return reason
        s3server.credentials()
        address = stack.enter_context(s3server.serving(served / "seaweedfs"))
        key = f"store/blobs/{self.pack.blob.algorithm}/{self.pack.blob.hex}"

        def transfer(at: str, to: Path) -> float:
            command = [sys.executable, "-c", _TRANSFER, f"http://{at}", key, str(to)]
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

        return Place(address, lambda at: f"s3://{s3server.BUCKET}/store?endpoint=http://{at}", transfer)

    def _registry(self, stack: contextlib.ExitStack, served: Path, store: DirectoryStore) -> Place | str:
        if tool("docker-registry") is None or tool("curl") is None:
            return "no docker-registry or no curl here: scripts/setup bench"
        address = stack.enter_context(containers.registry(served / "registry"))
        path = f"v2/store/blobs/{self.pack.blob}"
        return Place(address, lambda at: f"oci+http://{at}/store", lambda at, to: _curl(f"http://{at}/{path}", to))

    # --- the arms

    def arms(self, name: str, link: str) -> Mapping[str, Callable[[], Run]]:
        place = self.places[name]
        return {
            "eager": lambda: self._start(place, link, "eager"),
            "lazy": lambda: self._start(place, link, "lazy"),
            "plain": lambda: self._plain(place, link),
        }

    def _start(self, place: Place, link: str, mode: Mode) -> Run:
        self._count += 1
        root = self._work / f"root-{self._count}"
        with service.running(root) as node, _linked(place.address, link) as (address, counts):
            node.client.create(SandboxRequest(base="tiny", store=place.location(address), mode=mode))
            before = {"requests": _requests(node), **counts()}
            drop_caches()
            start = time.perf_counter()
            [made] = node.client.create(SandboxRequest(base="image", store=place.location(address), mode=mode))
            if mode == "lazy":
                timed(["cat", f"{made.rootfs}/file"])
            wall = time.perf_counter() - start
            after = {"requests": _requests(node), **counts()}
            more = {key: after[key] - before[key] for key in after}
        shutil.rmtree(root)
        return Run(wall, 0.0, 0, more)

    def _plain(self, place: Place, link: str) -> Run:
        to = self._work / "plain"
        with _linked(place.address, link) as (address, counts):
            drop_caches()
            wall = place.plain(address, to)
            more = counts()
        assert to.stat().st_size == self.pack.blob_size
        to.unlink()
        return Run(wall, 0.0, 0, more)


def _requests(node: service.Service) -> float:
    fetch = node.status()["fetch"]
    return float(sum(fetch[way]["requests"] for way in ("demand", "background")))


@contextlib.contextmanager
def _linked(to: str | None, link: str) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """The address to use, and what passed through the link so far."""
    kind = LINKS[link]
    if to is None or kind is None:
        yield to or "", dict
        return
    latency, rate = kind
    with simulated(to, latency=latency, rate=rate) as made:
        yield made.address, lambda: {"bytes": made.counts()["bytes_down"], "turns": made.counts()["turns"]}


def _curl(url: str, to: Path) -> float:
    return timed(["curl", "-fsS", "-o", str(to), url]).wall


def main() -> None:
    arguments = parser(__doc__ or "", images=False, rounds=3)
    arguments.add_argument("--mib", type=int, default=256, help="size of the file [default: 256]")
    arguments.add_argument("--link", action="append", choices=LINKS, help="[default: loopback and 200M]")
    names = ("directory", "http", "s3", "registry")
    arguments.add_argument("--store", action="append", choices=names, help="[default: all]")
    options = arguments.parse_args()
    need_root()
    result: dict[str, object] = {}
    body = []
    with Bench(options.work, options.mib << 20, options.store or list(names)) as bench:
        for name, reason in bench.lacking.items():
            body.append((name, "", "", reason, *[""] * 4))
        for link in options.link or ("loopback", "200M"):
            for name, place in bench.places.items():
                if place.address is None and LINKS[link] is not None:
                    continue
                runs = interleaved(bench.arms(name, link), options.rounds, warm_up=False)
                result[f"{name}, {link}"] = runs
                for arm, of in runs.items():
                    rates = [bench.pack.blob_size / run.wall / 1e6 for run in of]
                    more = {
                        key: statistics.median(run.more[key] for run in of if key in run.more) for key in of[0].more
                    }  # type: ignore[type-var]
                    ratio = f"{median(runs['plain']) / median(of):.2f}"
                    counted = [f"{more['bytes'] / 1e6:.1f} MB" if "bytes" in more else ""]
                    counted += [f"{more[key]:.0f}" if key in more else "" for key in ("turns", "requests")]
                    body.append((name, link, arm, *spread(rates, ".1f"), ratio, *counted))
    headings = ("store", "link", "arm", "MB/s", "spread", "to plain", "down", "turns", "requests")
    table(headings, [row + ("",) * (len(headings) - len(row)) for row in body])
    save(options.json, {"bytes": bench.pack.blob_size, "runs": result})


if __name__ == "__main__":
    main()

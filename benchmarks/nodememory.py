"""Memory of the node service with 1,000 sandboxes over 10 GiB of guarded packs.

::

    python -m benchmarks.nodememory [--mib 10240] [--layers 20] [--sandboxes 1000] [--fill] [--json FILE]

The layers are made here, of files of 1 MiB whose content is distinct in every block and compresses to nearly nothing:
the store is small, the packs are as large as they say. Sandboxes are made lazily (fanotify) and evenly over the layers,
so all packs are guarded. With ``--fill``, nearly all files of all layers are read then, by eight readers, which writes
as much to the disk as the packs are large. Memory is the proportional set size of all processes of the service: empty,
with everything mounted, at its most while it is read (looked at every half second), and after that. What the kernel
has for mounts is not part of it; ``benchmarks.up`` measures that.
"""

from __future__ import annotations

import contextlib
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import service
from benchmarks.harness import fresh, need_root, parser, save, table
from layerstore.convert import Conversion, convert
from layerstore.image import Role
from layerstore.oci.source_name import SourceName
from layerstore.store.directory import DirectoryStore
from overlay.service.request import SandboxRequest

MIB = 1 << 20
BLOCK = 4096
BATCH = 50
UNREAD = 16
"""Files of each layer that are not read: more than is read ahead of others."""


def write_tree(top: Path, layer: int, mebibytes: int) -> None:
    """Files of 1 MiB; every block has a number of its own, over and over."""
    top.mkdir()
    for file in range(mebibytes):
        first = (layer * mebibytes + file) * (MIB // BLOCK)
        blocks = range(first, first + MIB // BLOCK)
        (top / f"{file}").write_bytes(b"".join(struct.pack("<Q", block) * (BLOCK // 8) for block in blocks))


def make_store(path: Path, layers: int, mebibytes: int) -> DirectoryStore:
    store = DirectoryStore.create(str(path))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="imgtool-memory-") as trees:
        for layer in range(layers):
            tree = Path(trees, str(layer))
            write_tree(tree, layer, mebibytes)
            convert(Conversion(SourceName.parse(f"tree:{tree}"), Role.BASE), store, tag=f"layer-{layer}")
            shutil.rmtree(tree)
    return store


def guarded(node: service.Service) -> int:
    return sum(backend["guarded_packs"] for backend in node.status()["backends"].values())


def read_all(node: service.Service) -> tuple[int, float]:
    """All files of all layers but the first of each, so that the packs stay guarded; bytes and seconds."""

    def read(path: str) -> int:
        with open(path, "rb", buffering=0) as file:
            return sum(iter(lambda: len(file.read(MIB)), 0))

    start = time.perf_counter()
    paths = [
        str(path)
        for top in node.root.glob("layers/*/mnt")
        for path in sorted(top.iterdir(), key=lambda path: int(path.name))[UNREAD:]
    ]
    with ThreadPoolExecutor(8) as pool:
        count = sum(pool.map(read, paths))
    return count, time.perf_counter() - start


@contextlib.contextmanager
def watched(node: service.Service) -> Iterator[dict[str, int]]:
    """The memory when it was most, once the block is over."""
    most: dict[str, int] = {}
    pids, over = node.pids(), threading.Event()

    def watch() -> None:
        while True:
            now = service.resident(pids)
            if now["sum"] > most.get("sum", 0):
                most.update(now)
            if over.wait(0.5):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def main() -> None:
    need_root()
    options = parser(__doc__ or "", images=False, rounds=1)
    options.add_argument("--mib", type=int, default=10 << 10, help="of packs")
    options.add_argument("--layers", type=int, default=20)
    options.add_argument("--sandboxes", type=int, default=1000)
    options.add_argument("--fill", action="store_true")
    arguments = options.parse_args()
    work = fresh(arguments.work)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        mebibytes = arguments.mib // arguments.layers
        make_store(work / "store", arguments.layers, mebibytes)
        node = stack.enter_context(service.running(work / "root"))
        stages: dict[str, dict[str, int]] = {"empty": service.resident(node.pids())}
        share = -(-arguments.sandboxes // arguments.layers)
        start = time.perf_counter()
        for layer in range(arguments.layers):
            for made in range(0, share, BATCH):
                count = min(BATCH, share - made)
                request = SandboxRequest(
                    base=f"layer-{layer}", store=str(work / "store"), mode="lazy", backend="fanotify", count=count
                )
                node.client.create(request)
        seconds = time.perf_counter() - start
        mounted = f"{share * arguments.layers} sandboxes, {arguments.layers} packs guarded"
        assert guarded(node) == arguments.layers
        stages[mounted] = service.resident(node.pids())
        print(f"made in {seconds:.1f} s", flush=True)
        if arguments.fill:
            with watched(node) as peak:
                count, seconds = read_all(node)
            stages["most while they are read"] = peak
            stages[f"{count / (1 << 30):.1f} GiB of them read"] = service.resident(node.pids())
            allocated = sum(path.stat().st_blocks * 512 for path in node.root.glob("cache/packs/sha256/*/data"))
            assert guarded(node) == arguments.layers
            print(f"read in {seconds:.0f} s; {allocated / (1 << 30):.1f} GiB on disk")
    print()
    names = list(dict.fromkeys(name for stage in stages.values() for name in stage))
    table(
        ("MiB", *names), [(stage, *(f"{of.get(name, 0) / MIB:.1f}" for name in names)) for stage, of in stages.items()]
    )
    save(arguments.json, {"stages": stages})


if __name__ == "__main__":
    main()

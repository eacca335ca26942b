"""Sandboxes a second from a cached stack through the library, 3,200 of them at once, and what each costs."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

from benchmarks.harness import fresh, imgtool, parser, save, table, timed
from layerstore.store.directory import DirectoryStore
from overlay.node import Node


def free_memory() -> int:
    """Bytes that are neither used nor only cached, after caches were dropped."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no MemAvailable")


def mounts(work: Path) -> list[bytes]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return [line for line in lines if bytes(work) in line]


def main() -> None:
    options = parser(__doc__ or "", rounds=3)
    options.add_argument("--standing", type=int, default=3200)
    arguments = options.parse_args()
    work = fresh(arguments.work)
    store = work / "store"
    layout, toolkit = arguments.images / "debian", arguments.images / "toolkit"
    for source, *more in (
        (f"oci:{layout}:full", "--role", "base", "--tag", "full"),
        (f"oci:{layout}:workspace", "--role", "workspace", "--base", "full", "--tag", "repo"),
        (f"tree:{toolkit}", "--role", "toolkit", "--tag", "tools"),
    ):
        timed(imgtool("convert", source, *more, "--store", str(store)))
    stack = ("--base", "full", "--workspace", "repo", "--toolkit", "tools", "--tag", "env")
    timed(imgtool("compose", *stack, "--store", str(store)))
    node = Node(str(work / "root"))
    image = node.prepare(DirectoryStore(str(store)), "env")
    first = node.up(image)  # keeps the layers mounted, as on a node that is in use

    results = []
    for number in range(arguments.rounds):
        before = free_memory()
        latencies = []
        start = time.perf_counter()
        ids = []
        for _ in range(arguments.standing):
            one = time.perf_counter()
            ids.append(node.up(image).id)
            latencies.append(time.perf_counter() - one)
        made = time.perf_counter() - start
        memory = (before - free_memory()) / arguments.standing
        standing = sum(b" overlay " in mount for mount in mounts(work))
        assert standing == arguments.standing + 1
        probe = Path(node.sandboxes.get(ids[-1]).rootfs) / "etc/os-release"
        assert "Debian" in probe.read_text()
        start = time.perf_counter()
        for identifier in ids:
            node.sandboxes.remove(identifier)
        gone = time.perf_counter() - start
        latencies.sort()
        results.append(
            {
                "up_per_second": arguments.standing / made,
                "down_per_second": arguments.standing / gone,
                "median_ms": 1000 * statistics.median(latencies),
                "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
                "bytes_each": memory,
            }
        )
        tail = latencies[len(latencies) // 2]
        print(f"round {number}: {arguments.standing / made:.0f} a second, median {1000 * tail:.2f} ms", flush=True)
    node.sandboxes.remove(first.id)
    assert not mounts(work)
    table(
        ("", "median", "spread"),
        [
            (name, f"{statistics.median(values):.2f}", f"{min(values):.2f}-{max(values):.2f}")
            for name in results[0]
            if (values := [result[name] for result in results])
        ],
    )
    save(arguments.json, {"up": results, "processors": os.cpu_count()})
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

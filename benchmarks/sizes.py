"""Chunk and inline sizes: what they cost and save in the store, in metadata, in time, and in the kernel's reading."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from benchmarks.harness import fresh, parser, save, table, tags, tree_size
from benchmarks.stored import releases
from layerstore.convert import Conversion, convert
from layerstore.image import Role
from layerstore.oci.source_name import SourceName
from layerstore.pack.chunks import CHUNK_SIZE, INLINE_LIMIT, Sizes
from layerstore.store.directory import DirectoryStore
from overlay.node import Node

KIB = 1024
CHUNKS = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB]
INLINE = [0, 1024, 2048, 3500]


def main() -> None:
    arguments = parser(__doc__ or "", rounds=1).parse_args()
    work = arguments.work
    django, debian = arguments.images / "django", arguments.images / "debian"
    body = []
    for sizes in [*(Sizes(c, INLINE_LIMIT) for c in CHUNKS), *(Sizes(CHUNK_SIZE, i) for i in INLINE)]:
        store = DirectoryStore.create(str(fresh(work) / "django"))
        metadata = 0
        for tag in ["base", *releases(django)]:
            role, base = (Role.BASE, None) if tag == "base" else (Role.WORKSPACE, "base")
            report = convert(
                Conversion(SourceName.parse(f"oci:{django}:{tag}"), role, base, sizes=sizes), store, tag=tag
            )
            metadata += report.layer.blob_size
        django_bytes = tree_size(work / "django" / "blobs")
        assert "full" in tags(debian)
        full = DirectoryStore.create(str(work / "full"))
        start = time.perf_counter()
        report = convert(Conversion(SourceName.parse(f"oci:{debian}:full"), Role.BASE, sizes=sizes), full, tag="full")
        seconds = time.perf_counter() - start
        changed = convert(Conversion(SourceName.parse(f"oci:{debian}:changed"), Role.BASE, sizes=sizes), full)
        rate = reading(str(work / "root"), full) if os.geteuid() == 0 else 0.0
        row = (
            f"{sizes.chunk // KIB} KiB",
            f"{sizes.inline}",
            f"{django_bytes:,}",
            f"{metadata:,}",
            f"{report.layer.metadata_size:,}",
            f"{changed.stored_size:,}",
            f"{seconds:.1f} s",
            f"{rate:.0f} MB/s",
        )
        body.append(row)
        print("  ".join(row), flush=True)
    table(
        (
            "chunk",
            "inline",
            "Django, 11 layers stored",
            "of it metadata",
            "full: metadata raw",
            "changed: stored more",
            "full: converted in",
            "kernel reads",
        ),
        body,
    )
    save(arguments.json, {"sizes": body})
    shutil.rmtree(work)


def reading(root: str, store: DirectoryStore) -> float:
    """MB a second that the kernel reads of all files of /usr, from the page cache of packs but none of files."""
    node = Node(root)
    sandbox = node.up(node.prepare(store, "full"))
    try:
        best = 0.0
        for _ in range(3):
            Path("/proc/sys/vm/drop_caches").write_text("1")
            os.system(f"cat {root}/cache/packs/sha256/*/data > /dev/null")
            start, count = time.perf_counter(), 0
            for folder, _, names in os.walk(os.path.join(sandbox.rootfs, "usr")):
                for name in names:
                    path = os.path.join(folder, name)
                    if os.path.isfile(path) and not os.path.islink(path):
                        with open(path, "rb", buffering=0) as file:
                            while piece := file.read(1 << 20):
                                count += len(piece)
            best = max(best, count / (time.perf_counter() - start) / 1e6)
        return best
    finally:
        node.sandboxes.remove(sandbox.id)


if __name__ == "__main__":
    main()

"""Memory: bounded whatever the size of what is converted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.tars import directory, file, header, number
from support.tools import CHECKOUT

MIB = 1 << 20
LIMIT = 300 * MIB
"""What the issue that asked for the converter allows."""

CHILD = """
import sys
from layerstore.convert import Conversion, convert
from layerstore.image import Role
from layerstore.oci.source_name import SourceName
from layerstore.store.directory import DirectoryStore
store = DirectoryStore.create(sys.argv[1])
report = convert(Conversion(SourceName.parse(sys.argv[2]), Role.BASE, jobs=2, level=1), store, tag="it")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(report.entries, report.source_size, peak)
"""
"""Tells its peak by VmHWM: ru_maxrss counts the parent too, as it was at the fork."""


def write_large_tar(path: str, entries: int, size: int) -> int:
    """An archive of one file of ``size`` bytes, most of it text that repeats, and many small ones; returns its size."""
    block = noise(64 * 1024, 1)
    filler = b"The same line again and again.\n" * 40_000
    with open(path, "wb") as out:
        out.write(directory("many"))
        for index in range(entries):
            out.write(file(f"many/{index}", b"%d" % index * 3, mtime=index))
        out.write(header("large", size=size, raw={"size": number(size, 12)}))
        written = 512 * (1 + 2 * entries) + 512 + size + -size % 512 + 1024
        left, turn = size, 0
        while left:
            turn += 1
            piece = (turn.to_bytes(8, "big") + block + filler)[: min(left, MIB)]
            out.write(piece)
            left -= len(piece)
        out.write(bytes(-size % 512) + bytes(1024))
        return written


@pytest.mark.timeout(120)
def test_a_gibibyte_from_a_pipe_takes_less_than_300_mib(tmp_path: Path) -> None:
    site = Site(tmp_path)
    fifo = tmp_path / "layer.tar"
    os.mkfifo(fifo)
    entries, size = 20_000, 1 << 30
    written: list[int] = []
    writer = threading.Thread(target=lambda: written.append(write_large_tar(str(fifo), entries, size)))
    writer.start()
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, site.store.root, f"tar:{fifo}"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    writer.join()
    assert ran.returncode == 0, ran.stderr
    found_entries, source_size, peak = map(int, ran.stdout.split())
    assert (found_entries, source_size) == (entries + 3, written[0])
    assert peak * 1024 < LIMIT
    assert site.leftovers() == []

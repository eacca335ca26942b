"""strace itself is the oracle for what is made of its logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import tools

from prefetch.trace.exchange.strace import is_log, read_log

pytestmark = pytest.mark.compat

SCRIPT = """
import os, sys
fd = os.open("one", os.O_RDONLY)
os.lseek(fd, 8192, 0)
os.read(fd, 100)
if not os.fork():
    os.read(fd, 50)
    os.pread(os.open(sys.argv[1], os.O_RDONLY), 10, 4096)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    "options", [["-y", "-ttt"], ["-r"], ["-yy", "-tt", "-T"], ["-e", "trace=open,openat"]], ids=" ".join
)
def test_what_a_program_reads(tmp_path: Path, options: list[str]) -> None:
    strace = tools.need_tool("strace", "5.10")
    for name, size in (("one", 100_000), ("two", 5000)):
        (tmp_path / name).write_bytes(bytes(size))
    command = [strace, "-f", *options, "-o", "log", sys.executable, "-c", SCRIPT, str(tmp_path / "two")]
    subprocess.run(command, cwd=tmp_path, check=True)
    data = (tmp_path / "log").read_bytes()
    assert is_log(data)
    found = read_log(data, "log")
    own = str(tmp_path).encode().lstrip(b"/")
    mine = {
        (wanted.path.removeprefix(own + b"/"), wanted.ranges[0] if wanted.ranges else None)
        for wanted in found.wanted
        if wanted.path.startswith(own)
    }
    times = [wanted.at for wanted in found.wanted]
    if "trace=open,openat" in options:
        assert mine == {(b"two", None)}  # of "one" no call tells the directory
        assert set(times) == {None}
    elif "-r" in options:
        assert (b"two", (4096, 10)) in mine and None not in times
    else:
        assert mine >= {(b"one", (8192, 100)), (b"one", (8292, 50)), (b"two", (4096, 10))}
        assert None not in times and min(at for at in times if at is not None) == 0

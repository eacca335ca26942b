"""Files whose bytes are known without having them, and readers that compare all that they get.

A reader is a process: ``python -m support.reading DIRECTORY SEED``. It reads ranges of the files below DIRECTORY by
``pread`` and through memory maps until its standard input ends, then prints one JSON object: what it read, how often it
got EIO, the longest wait, and every byte that was wrong.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

_LONGEST = 256 << 10
_READ_ERRORS = (errno.EIO,)


def expected(name: str, offset: int, length: int) -> bytes:
    """Bytes of the file ``name`` at any offset; no two places of any files are alike."""
    return blake3(name.encode()).digest(length=length, seek=offset)


def make_files(directory: Path, *, files: int, size: int) -> None:
    """``files`` files of about ``size`` bytes each."""
    directory.mkdir(parents=True)
    for number in range(files):
        name = f"f{number}"
        (directory / name).write_bytes(expected(name, 0, size + 4096 * number + 123))


@dataclass(frozen=True)
class Outcome:
    """What a reader met: reads that were right, EIO, seconds of the longest read, and what was wrong."""

    right: int
    errors: int
    longest: float
    wrong: list[str]


class Reader:
    """A reader process."""

    def __init__(self, directory: str, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.reading", directory, str(seed)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def end(self, *, within: float) -> Outcome:
        """Have it end; one that is stuck in a read for longer than ``within`` seconds is an AssertionError."""
        try:
            output, _ = self._process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            stack = Path(f"/proc/{self._process.pid}/stack")
            where = stack.read_text() if stack.exists() else ""
            self.kill()
            raise AssertionError(f"a reader is stuck: {where}") from None
        return Outcome(**json.loads(output))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def read_until_told(directory: str, seed: int) -> Outcome:
    rng = random.Random(seed)
    names = sorted(os.listdir(directory))
    right = errors = 0
    longest = 0.0
    wrong: list[str] = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        name = rng.choice(names)
        began = time.monotonic()
        try:
            descriptor = os.open(f"{directory}/{name}", os.O_RDONLY)
            try:
                size = os.fstat(descriptor).st_size
                offset = rng.randrange(size)
                length = min(rng.randint(1, _LONGEST), size - offset)
                got = (
                    _mapped(descriptor, offset, length) if rng.random() < 0.2 else os.pread(descriptor, length, offset)
                )
            finally:
                os.close(descriptor)
            if got == expected(name, offset, len(got)) and got:
                right += 1
            else:
                kind = "zeros" if not any(got) else "wrong bytes"
                wrong.append(f"{name} at {offset}: {len(got)} of {length} bytes, {kind}")
        except OSError as error:
            if error.errno not in _READ_ERRORS:
                raise
            errors += 1
        longest = max(longest, time.monotonic() - began)
    return Outcome(right, errors, longest, wrong[:20])


def _mapped(descriptor: int, offset: int, length: int) -> bytes:
    """Through a memory map, by the kernel: a page fault that fails is EFAULT of a write, where ours would be SIGBUS."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    reading, writing = os.pipe()
    try:
        with mmap.mmap(descriptor, offset + length - start, prot=mmap.PROT_READ, offset=start) as mapped:
            view = memoryview(mapped)[offset - start :]
            parts = []
            try:
                while view:
                    try:
                        count = os.write(writing, view[: 32 << 10])
                    except OSError as error:
                        if error.errno == errno.EFAULT:
                            raise OSError(errno.EIO, "page fault failed") from error
                        raise
                    parts.append(os.read(reading, count))
                    rest = view[count:]
                    view.release()
                    view = rest
            finally:
                view.release()
            return b"".join(parts)
    finally:
        os.close(reading)
        os.close(writing)


def check_all(directory: str) -> int:
    """0: every byte of every file is right. 1: something can't be read. 2: something is wrong."""
    for name in sorted(os.listdir(directory)):
        try:
            content = Path(directory, name).read_bytes()
        except OSError as error:
            if error.errno not in _READ_ERRORS:
                raise
            return 1
        right = expected(name, 0, len(content))
        if content != right:
            for at in range(0, len(content), 4096):
                got = content[at : at + 4096]
                if got != right[at : at + 4096]:
                    kind = "zeros" if not any(got) else "wrong"
                    print(f"{directory}/{name}: block {at // 4096} is {kind}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(check_all(sys.argv[1]))
    print(json.dumps(read_until_told(sys.argv[1], int(sys.argv[2])).__dict__))

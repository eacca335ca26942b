"""Small layers to record, mounted as a recording wants it; nothing of a recording is left at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from layerstore.digest import Digest
from overlay import mountinfo
from overlay.erofs import mount_erofs
from overlay.layers import MountableLayer
from overlay.lazy.choice import fanotify_works
from overlay.mountapi import MNT_DETACH, umount
from overlay.recording.recordings import RecordedLayer, RecordedTrace, Recording, Recordings
from overlay.recording.tracepoints import Tracepoints
from overlay.recording.way import EVENTS, TRACEPOINTS, NotHereError
from prefetch.trace.format import Trace, TracedLayer, TraceHeader, parse_trace
from support.tools import lacking

PATIENCE = 30.0
BLOCK = 4096


def need_way(way: str | None, top: Path) -> None:
    """End the test unless this machine can record so."""
    if way == TRACEPOINTS:
        try:
            Tracepoints([], lambda *read: False).close()
        except NotHereError as error:
            lacking(f"no tracepoints of EROFS: {error}")
    elif way == EVENTS and (why := fanotify_works(str(top))) is not None:
        lacking(f"no pre-content events: {why}")


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)


def header_of(layers: Sequence[MountableLayer]) -> TraceHeader:
    """Of layers as :func:`support.sandboxes.layer_with` makes them: their files are named by digests."""
    return TraceHeader(
        tuple(
            TracedLayer(
                Digest("sha256", Path(os.fsdecode(layer.image)).name),
                tuple(Digest("sha256", Path(os.fsdecode(device)).name[5:]) for device in layer.devices),
            )
            for layer in layers
        ),
        image="it",
        mode="eager",
    )


def recorded(layers: Sequence[MountableLayer]) -> list[RecordedLayer]:
    return [RecordedLayer(str(layer.image), tuple(map(str, layer.devices))) for layer in layers]


@dataclass
class Site:
    """A root with recordings, and layers mounted below ``top``."""

    top: Path
    recordings: Recordings
    warnings: list[str] = field(default_factory=list)
    mounted: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.top / "run"

    @property
    def traces(self) -> Path:
        return self.top / "root/traces"

    def again(self) -> Recordings:
        """As a worker that has just started has them."""
        self.recordings.close()
        self.recordings = Recordings(str(self.top / "root"), warn=self.warnings.append, run=str(self.run))
        return self.recordings

    def start(self, layers: Sequence[MountableLayer], way: str | None, id: str = "box", name: str = "it") -> Recording:
        need_way(way, self.top)
        return self.recordings.start(id, name, header_of(layers), recorded(layers), way=way)

    def mount(self, layers: Sequence[MountableLayer], recording: Recording | None = None) -> list[Path]:
        """Mount layers, recorded if that is given, else by their usual paths."""
        targets = []
        for number, layer in enumerate(layers):
            target = self.top / f"mnt-{len(self.mounted)}"
            target.mkdir(exist_ok=True)
            mount_erofs(layer.image, layer.devices if recording is None else recording.devices[number], str(target))
            self.mounted.append(str(target))
            targets.append(target)
        if recording is not None:
            recording.mounted([str(target) for target in targets])
        return targets

    def unmount(self) -> None:
        while self.mounted:
            umount(self.mounted.pop(), MNT_DETACH)

    def stop(self, id: str = "box") -> tuple[RecordedTrace, Trace]:
        stopped = self.recordings.stop(id)
        return stopped, read_trace(stopped.path)

    def recorder(self) -> int:
        """The process of the only recorder."""
        [pid] = self.recorders()
        return pid

    def recorders(self) -> list[int]:
        """Processes whose arguments name a directory of ours; zombies have no arguments."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"-m" in words and any(word.startswith(bytes(self.run)) for word in words):
                found.append(int(pid))
        return found

    def part(self, name: str = "it") -> Trace:
        return read_trace(self.traces / f"{name}.jsonl.part")

    def left(self) -> list[str]:
        """What there shouldn't be any more."""
        here = mountinfo.below(str(self.top), mountinfo.read())
        found = [f"mount {os.fsdecode(mount.target)}" for mount in here]
        found += [f"process {pid}" for pid in self.recorders()]
        for place, directories, files in os.walk(self.run):  # which passes over what can't be listed
            found += [f"{place}/{name}" for name in (*directories, *files) if place != str(self.run)]
        return found


@contextmanager
def site_in(top: Path) -> Iterator[Site]:
    """At the end nothing is mounted, no recorder runs, no directory of one is left."""
    (top / "root").mkdir()
    warnings: list[str] = []
    site = Site(top, Recordings(str(top / "root"), warn=warnings.append, run=str(top / "run")), warnings)
    try:
        yield site
    finally:
        site.unmount()
        site.recordings.close()
    until(lambda: not site.left(), f"that nothing is left of {site.left()}")


def read_trace(path: str | Path) -> Trace:
    return parse_trace(Path(path).read_bytes(), str(path))


def pread(path: Path, offset: int, length: int) -> bytes:
    """Read without any read-ahead."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Drop what the page cache has of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def blocks(trace: Trace) -> list[tuple[int, int, int]]:
    """(layer, device, block) of all that was read, in order."""
    return [
        (access.layer, access.device, block)
        for access in trace.accesses
        for block in range(access.offset // BLOCK, access.end // BLOCK)
    ]

"""Recording what a sandbox reads: it stands on mounts of its own, over devices at which reads are seen.

Nobody else comes to such a mount, and its page cache is empty at first: so the first read of everything is seen, also
of what the node has had for long. How the data get there and who answers for what is missing doesn't change by that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from layerstore.cache.cache import Cache
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError, printable
from overlay.layerkey import recorded_variant, recorder_in_path
from overlay.layers import MountableLayer
from overlay.recording.recordings import TRACES, RecordedLayer, RecordedTrace, Recording, Recordings
from overlay.recording.spec import FILES, RECORDINGS, RecordingSpec
from overlay.recording.way import PASSTHROUGH
from overlay.service.place import run_directory
from prefetch.trace.format import TracedLayer, TraceHeader


def part_of(root: str, name: str) -> str:
    """Where the trace of this name is while it grows."""
    return RecordingSpec(id="", name=name, traces=f"{root}/{TRACES}", sandbox="", way=None, layers=()).part


_WORDS = 1 << 12
"""Bytes of a process's arguments that are looked at."""


@dataclass(frozen=True, slots=True)
class Record:
    """That a sandbox is to be recorded.

    Attributes:
        name: of the trace; None: that of the sandbox.
        command: what is going to run, where that is known.
    """

    name: str | None = None
    command: tuple[str, ...] = ()


class RecordedSandboxes:
    """The traces of a node that are being recorded. Any thread may call."""

    def __init__(self, root: str, cache: Cache, warn: Callable[[str], None]) -> None:
        """``warn`` is told what is missing in a trace, or why there is none."""
        self._root = root
        self._cache = cache
        self._warn = warn
        self._directory = f"{run_directory(root)}/{RECORDINGS}"
        self._finding = threading.Lock()
        self._found: Recordings | None = None
        self._lock = threading.Lock()
        self._serving: dict[str, str] = {}
        """Sandboxes that are read through a recorder, by the last part of its directory's name."""

    @property
    def _recordings(self) -> Recordings:
        """Found with the first use, since recorders are asked: a worker answers readers before."""
        with self._finding:
            if self._found is None:
                self._found = Recordings(self._root, warn=self._warn)
            return self._found

    @contextmanager
    def over(
        self,
        id: str,
        record: Record,
        layers: Sequence[MountableLayer],
        *,
        image: Mapping[str, object],
        mode: str,
        backend: str,
    ) -> Iterator[tuple[list[MountableLayer], Recording]]:
        """Record sandbox ``id``, which the block mounts over the layers that this yields.

        When the block raises, or this does at its end, there is no recording and no trace.

        Raises:
            ConflictError: it is being recorded, or there is a trace of this name.
            UsageError: not the name of a trace.
            UnsupportedError, UnavailableError: what it reads can't be seen.
            NotFoundError: at the end, the sandbox is gone again.
        """
        header = TraceHeader(
            tuple(self._traced(layer) for layer in layers),
            image=str(image.get("name", "")),
            manifest=None if image.get("manifest") is None else str(image["manifest"]),
            mode=mode,
            backend=backend,
            command=tuple(map(printable, record.command)),
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        read = [RecordedLayer(layer.image, layer.devices) for layer in layers]
        recording = self._recordings.start(id, record.name or id, header, read)
        try:
            self._note(recording)
            yield (
                [
                    replace(layer, devices=devices, variant=recorded_variant(layer.variant, recording.variant))
                    for layer, devices in zip(layers, recording.devices, strict=True)
                ],
                recording,
            )
            recording.mounted()
        except BaseException:
            self.discard(id)
            raise

    def _traced(self, layer: MountableLayer) -> TracedLayer:
        packs = tuple(Digest("sha256", hex) for hex in self._cache.metadata.packs_of(layer.digest))
        return TracedLayer(Digest("sha256", layer.digest), packs)

    def discard(self, id: str) -> None:
        """End the recording of a sandbox that wasn't made as it was asked for, without a trace. Never raises."""
        try:
            self._recordings.discard(id)
        except ImgtoolError as error:
            self._warn(f"recording of sandbox {id}: {error}")
        self._forget(id)

    def stop(self, id: str) -> RecordedTrace:
        """End the trace of a sandbox. Raises as :meth:`Recordings.stop`."""
        return self._recordings.stop(id)

    def ended(self, id: str, *, unmounted: bool) -> RecordedTrace | None:
        """The sandbox is gone, or stands otherwise from now on: end its trace, if there is one. Never raises.

        ``unmounted``: nobody has anything of it open, so its recorder may go, too.
        """
        trace = None
        try:
            trace = self._recordings.stop(id)
        except NotFoundError:
            pass
        except ImgtoolError as error:
            self._warn(f"trace of sandbox {id}: {error}")
        if unmounted:
            self.release(id)
        return trace

    def release(self, id: str) -> None:
        """Nothing is mounted through the recorder of a trace that has ended: it may go. Never raises."""
        with self._lock:
            serving = id in self._serving.values()
        if not serving:
            return
        try:
            self._recordings.release(id)
        except ImgtoolError as error:
            self._warn(f"recorder of sandbox {id}: {error}")
        self._forget(id)

    def sweep(self, keep: Callable[[str], bool]) -> None:
        """Clear what killed recorders have left; see :meth:`Recordings.sweep`. Never raises."""
        self._recordings.sweep(keep)

    def waited(self, id: str, seconds: float) -> None:
        """Some reader of sandbox ``id`` has just waited so long. Waits for nobody."""
        if self._found is not None:
            self._found.waited(id, seconds)

    def active(self) -> list[Recording]:
        """Those that go on."""
        return self._recordings.active()

    def close(self) -> None:
        """Let go of them: recorders go on, and the next process finds them."""
        if self._found is not None:
            self._found.close()

    # --- recorders that are read through

    def adopt(self, id: str, mounts: Sequence[str]) -> bool:
        """Know again that a sandbox reads through a recorder, by its mounts. False: it does, and that recorder is gone.

        The kernel remembers the root of a dead FUSE mount, so its directory is listed.
        """
        found = next(filter(recorder_in_path, mounts), None)
        if found is None:
            return True
        hex = found[-12:]
        with self._lock:
            self._serving[hex] = id
        try:
            return bool(os.listdir(f"{self._directory}/{hex}/{FILES}"))
        except OSError:
            return False

    def reader(self, pid: int) -> str | None:
        """The sandbox on whose behalf process ``pid`` reads, if it is a recorder."""
        if not self._serving:
            return None
        try:
            with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as stream:
                words = stream.read(_WORDS).split(b"\0")
        except OSError:
            return None
        start = os.fsencode(self._directory) + b"/"
        with self._lock:
            for word in words:
                if word.startswith(start):
                    return self._serving.get(os.fsdecode(word[len(start) :]))
        return None

    def _note(self, recording: Recording) -> None:
        if recording.way == PASSTHROUGH:
            with self._lock:
                self._serving[recording.variant[-12:]] = recording.id

    def _forget(self, id: str) -> None:
        with self._lock:
            self._serving = {hex: other for hex, other in self._serving.items() if other != id}

"""The worker's side of recordings: starting recorders, finding them again, ending them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UsageError,
    os_errors,
    printable,
)
from layerstore.staging import make_directory
from layerstore.store.names import check_name
from overlay.lazy.link import Link, Message
from overlay.recording.contact import (
    ANSWERING,
    COMPLETING,
    ENDING,
    Child,
    ask,
    ask_maybe,
    await_end,
    connect,
    end,
    heard,
    last_word,
    next_message,
    outcome,
    raise_as_met,
    spawned,
)
from overlay.recording.recording import Held, Places, RecordedTrace, Recording
from overlay.recording.spec import (
    FILES,
    RECORDINGS,
    SPEC,
    RecordedLayer,
    RecordingSpec,
    clear,
    device_file,
    load_spec,
)
from overlay.recording.way import EVENTS, PASSTHROUGH, TRACEPOINTS, WAYS
from overlay.service.place import RUN, make_run_directory, run_directory
from prefetch.trace.format import HEADER_BYTES, TRACE_BYTES, TraceHeader, parse_trace

__all__ = ["RecordedLayer", "RecordedTrace", "Recording", "Recordings"]

TRACES = "traces"
"""Below the root."""
NAME_LIMIT = 240
"""Characters of a trace's name, which ``.jsonl.part`` is put behind in a file name of 255."""

_STARTING = 30.0
"""Seconds for a recorder to stand. It takes 0.1."""
_RELEASING = 1.0
"""Seconds in which the kernel lets go of the files of a mount that is gone: it does that a little later."""

Warn = Callable[[str], None]


class _Running:
    """A recording as this process knows it. ``child`` is its recorder, where we have started it."""

    def __init__(self, recording: Recording, directory: str, spec: RecordingSpec) -> None:
        self.recording = recording
        self.directory = directory
        self.spec = spec
        self.waits: Link | None = None
        self.child: Child | None = None


class Recordings:
    """Of one root. Any thread may call; recorders outlive this object and its process."""

    def __init__(self, root: str, *, warn: Warn = lambda text: None, run: str = RUN) -> None:
        """``warn`` is told what is missing in traces; ``run`` is where run directories are."""
        self._root = os.path.realpath(root)
        self._run = run
        self._warn = warn
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._endings = 0
        """How many have been forgotten: what was found before may have ended since."""
        for recording in self._find():
            self._running[recording.recording.id] = recording

    # --- starting

    def start(
        self,
        id: str,
        name: str,
        header: TraceHeader,
        layers: Sequence[RecordedLayer],
        *,
        way: str | None = None,
    ) -> Recording:
        """Record what sandbox ``id`` reads, from before it is mounted.

        When this returns, mount by the recording's devices, where no other sandbox does, then tell it so. ``way`` is
        the only one to be tried; by default the first that works.

        Raises:
            UsageError: no name for a trace, or no way.
            ConflictError: the sandbox is recorded already, or a trace of this name exists, or grows; or header and
                layers don't agree.
            NotFoundError: a device is missing.
            UnsupportedError: reads can't be seen here, in neither way.
            PermissionError_: not root.
            NoSpaceError, UnavailableError: the operating system refuses, or the recorder didn't stand.
        """
        _check(name, header, layers)
        if way is not None and way not in WAYS:
            raise UsageError(f"reads can't be recorded by {printable(way)}: {', '.join(WAYS)}")
        with self._alone(id):
            directory = self._directory(id)
            self._make_way(id, directory)
            traces = f"{self._root}/{TRACES}"
            sandbox = f"{self._root}/sandboxes/{id}"
            spec = RecordingSpec(id, name, traces, sandbox, way, tuple(layers))
            with ExitStack() as undo, os_errors(f"record sandbox {printable(id)}"):
                make_directory(traces)
                _begin_part(spec, header)
                undo.callback(_discard_part, spec)
                self._make_directory(directory)
                undo.callback(clear, directory)
                with open(f"{directory}/{SPEC}", "xb") as stream:
                    stream.write(spec.to_bytes())
                places = Places(self._root, header, layers)
                running = _launch(directory, spec, places)
                undo.callback(running.recording.let_go)
                running.waits = connect(directory)
                undo.pop_all()
            if running.waits is not None:
                running.waits.setblocking(False)
            with self._lock:
                self._running[id] = running
            return running.recording

    def _make_way(self, id: str, directory: str) -> None:
        """Deal with what an earlier recording of this sandbox has left."""
        if not os.path.isdir(directory):
            return
        link = connect(directory)
        if link is None:  # its recorder was killed: what it had written stays as it is
            _clear(directory)
            return
        with link:
            until = time.monotonic() + _RELEASING
            while True:
                state = ask(link, {"who": True}, ANSWERING)
                if state.get("recording", True):
                    raise ConflictError(f"sandbox {printable(id)} is recorded already: `imgtool trace stop` ends that")
                if not state.get("in_use", True):
                    break
                if time.monotonic() >= until:
                    raise ConflictError(
                        f"sandbox {printable(id)} still reads through the recorder of its last trace: suspend it first"
                    )
                time.sleep(0.01)
            end(link)

    def _make_directory(self, directory: str) -> None:
        make_run_directory(self._root, run=self._run)
        while True:
            try:
                os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
                os.mkdir(directory, 0o700)
                return
            except FileNotFoundError:
                continue  # the last recording of others has just removed the parent

    # --- while they go on

    def waited(self, id: str, seconds: float) -> None:
        """Some reader of sandbox ``id`` has just waited so long. Never blocks, never raises; may be lost."""
        running = self._running.get(id)
        waits = running.waits if running is not None else None  # which may be taken away at any time
        if waits is None:
            return
        try:
            waits.send({"waited": float(seconds), "until": time.monotonic()})
        except OSError:
            pass  # it has ended, or is busy with its end

    def active(self) -> list[Recording]:
        """Those whose recorder lives and records, also if a process before this one has started it; by id."""
        with self._lock:
            endings = self._endings
        found = {running.recording.id: running for running in self._find()}
        with self._lock:
            for id, running in found.items():
                if id not in self._running and id not in self._busy and endings == self._endings:
                    self._running[id] = running
                elif running.waits is not None:
                    running.waits.close()
            return [self._running.get(id, found[id]).recording for id in sorted(found)]

    def _find(self) -> list[_Running]:
        """What the run directory knows of, if somebody answers there."""
        found = []
        for directory in self._directories():
            try:
                spec = load_spec(directory)
            except (OSError, MalformedError):
                continue
            link = connect(directory)
            if link is None:
                continue
            try:
                state = ask(link, {"who": True}, ANSWERING)
            except ImgtoolError:  # it completes a trace, so it doesn't record
                link.close()
                continue
            if state.get("recording") is not True:
                link.close()
                continue
            way = str(state.get("way"))
            running = _Running(Recording(spec.id, spec.name, way, _variant(spec.id, way)), directory, spec)
            link.setblocking(False)
            running.waits = link
            found.append(running)
        return found

    def _directories(self) -> list[str]:
        parent = f"{run_directory(self._root, run=self._run)}/{RECORDINGS}"
        try:
            names = os.listdir(parent)
        except OSError:
            return []
        return [f"{parent}/{name}" for name in names if "." not in name]  # else it is just being removed

    # --- ending

    def sweep(self, keep: Callable[[str], bool]) -> None:
        """Complete what recorders have left that were killed; where nothing was read, remove it.

        So may a worker have left what it was about to start. ``keep`` says of which sandboxes it stays. Never raises.
        """
        for directory in self._directories():
            spec = _spec_of(directory)
            if spec is not None and (spec.id in self._busy or keep(spec.id)):
                continue
            link = connect(directory)
            if link is not None:
                link.close()
                continue
            try:
                if spec is not None and _has_reads(spec):
                    self.stop(spec.id)
                elif spec is not None:
                    self.discard(spec.id)
            except ImgtoolError as error:
                self._warn(f"trace {spec.name if spec is not None else ''}: {error}")
            try:
                _clear(directory)
            except ImgtoolError as error:
                self._warn(str(error))

    def stop(self, id: str) -> RecordedTrace:
        """End a recording and complete its trace. Where its recorder was killed, with what it has left.

        By ``passthrough`` the recorder serves on as long as something is mounted through it; see :meth:`release`.

        Raises:
            NotFoundError: the sandbox isn't recorded.
            ConflictError: a trace of this name has appeared meanwhile.
            CorruptError, MalformedError: what a killed recorder has left is damaged.
            NoSpaceError, UnavailableError: the operating system refuses. ``NAME.jsonl.part`` stays.
        """
        with self._alone(id):
            directory = self._directory(id)
            running = self._forget(id)
            spec = running.spec if running is not None else _spec_of(directory)
            if spec is None:
                raise NotFoundError(f"sandbox {printable(id)} is not recorded")
            answer = self._stopped(directory, running)
            if answer is None:  # it has ended by itself meanwhile, or we couldn't hear it
                return _trace_of(spec)
            if answer["note"]:
                self._warn(f"trace {spec.name}: {answer['note']}")
            return RecordedTrace(spec.name, spec.target, answer["accesses"], answer["bytes"], answer["complete"])

    def _stopped(self, directory: str, running: _Running | None) -> Message | None:
        link = connect(directory)
        if link is not None:
            with link:
                answer = ask_maybe(link, {"stop": True}, COMPLETING)
                if answer is not None:
                    if not os.path.isdir(directory):
                        await_end(link, running.child if running is not None else None)
                    return outcome(answer)
        if running is not None and running.child is not None:
            running.child.wait(ENDING)
        if _spec_of(directory) is None:
            return None
        with spawned("overlay.recording.completion", directory)[0] as link:
            link.settimeout(COMPLETING)
            answer = heard(link)
        return None if answer is None else outcome(answer)

    def discard(self, id: str) -> None:
        """End a recording without a trace, if there is one: for a sandbox that didn't come to be."""
        with self._alone(id):
            directory = self._directory(id)
            running = self._forget(id)
            spec = running.spec if running is not None else _spec_of(directory)
            link = connect(directory)
            if link is not None:
                with link:
                    ask_maybe(link, {"discard": True}, COMPLETING)
                    end(link)
                    await_end(link, running.child if running is not None else None)
            elif spec is not None and _spec_of(directory) is not None:
                _discard_part(spec)
            _clear(directory)

    def release(self, id: str) -> None:
        """The sandbox is gone: end what serves it. Who reads through it still gets EIO. Repeatable."""
        with self._alone(id):
            directory = self._directory(id)
            running = self._forget(id)
            link = connect(directory)
            if link is not None:
                with link:
                    end(link)
                    await_end(link, running.child if running is not None else None)
            _clear(directory)

    def close(self) -> None:
        """Let go. Recorders go on; who comes after us finds them."""
        with self._lock:
            running, self._running = self._running, {}
        for each in running.values():
            each.recording.let_go()
            if each.waits is not None:
                each.waits.close()

    def _forget(self, id: str) -> _Running | None:
        with self._lock:
            running = self._running.pop(id, None)
            self._endings += 1
        if running is not None:
            running.recording.let_go()
            if running.waits is not None:
                running.waits.close()
                running.waits = None
        return running

    def _alone(self, id: str) -> _Alone:
        return _Alone(self._lock, self._busy, id)

    def _directory(self, id: str) -> str:
        return f"{run_directory(self._root, run=self._run)}/{RECORDINGS}/{_hex(id)}"


class _Alone:
    """Only one call at a time starts, stops or ends the recording of a sandbox."""

    def __init__(self, lock: threading.Lock, busy: set[str], id: str) -> None:
        self._lock, self._busy, self._id = lock, busy, id

    def __enter__(self) -> None:
        with self._lock:
            if self._id in self._busy:
                raise ConflictError(f"the recording of sandbox {printable(self._id)} is just being started or stopped")
            self._busy.add(self._id)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._busy.discard(self._id)


def _check(name: str, header: TraceHeader, layers: Sequence[RecordedLayer]) -> None:
    if "/" in check_name(name):
        raise UsageError(f"'{name}' is no name for a trace: it can't have a slash")
    if len(name) > NAME_LIMIT:
        raise UsageError(f"the name of a trace has at most {NAME_LIMIT} characters")
    if [len(layer.packs) for layer in header.layers] != [len(layer.devices) for layer in layers]:
        raise ConflictError("the trace's header lists other packs than those that are to be recorded")


def _begin_part(spec: RecordingSpec, header: TraceHeader) -> None:
    if os.path.lexists(spec.target):
        raise ConflictError(f"trace {spec.name} exists: give another name, or remove it")
    try:
        with open(spec.part, "xb") as stream:
            stream.write(header.line())
    except FileExistsError:
        raise ConflictError(
            f"trace {spec.name} is being recorded, or was and its recorder died: give another name, or remove "
            f"{printable(spec.part)}"
        ) from None


def _has_reads(spec: RecordingSpec) -> bool:
    """Whether a trace that grew has more than its header."""
    try:
        with open(spec.part, "rb") as stream:
            return bool(stream.readline(HEADER_BYTES) and stream.read(1))
    except OSError:
        return False


def _discard_part(spec: RecordingSpec) -> None:
    try:
        os.unlink(spec.part)
    except FileNotFoundError:
        pass


def _launch(directory: str, spec: RecordingSpec, places: Places) -> _Running:
    """Start a recorder, and wait until it stands. Raises as :meth:`Recordings.start`."""
    fds: list[int] = []
    link, child = spawned("overlay.recording.recorder", directory)
    held = Held(link)
    try:
        link.settimeout(_STARTING)
        while True:
            received = next_message(link)
            if received is None:
                raise UnavailableError(f"the recorder ended before it began: {last_word(directory)}")
            message, given = received
            for fd in given:
                held.keep(lambda fd=fd: os.close(fd))  # type: ignore[misc]
            fds += given
            if "failed" in message:
                raise_as_met(message)
            if "ready" in message:
                break
        way = str(message["ready"])
        if way == TRACEPOINTS:
            devices = tuple(layer.devices for layer in spec.layers)
        elif way == EVENTS:
            paths = iter([f"/proc/self/fd/{fd}" for fd in fds])
            devices = tuple(tuple(next(paths) for _ in layer.devices) for layer in spec.layers)
        else:
            devices = tuple(
                tuple(f"{directory}/{FILES}/{device_file(layer, device)}" for device in range(1, len(each.devices) + 1))
                for layer, each in enumerate(spec.layers)
            )
    except BaseException:
        held.close()
        child.kill()  # the directory may be another recorder's soon
        raise
    recording = Recording(spec.id, spec.name, way, _variant(spec.id, way), devices, places, held)
    running = _Running(recording, directory, spec)
    running.child = child
    return running


def _spec_of(directory: str) -> RecordingSpec | None:
    try:
        return load_spec(directory)
    except (OSError, MalformedError):
        return None


def _trace_of(spec: RecordingSpec) -> RecordedTrace:
    """What has been published. Raises NotFoundError."""
    with os_errors(f"trace {printable(spec.target)}"), open(spec.target, "rb") as stream:
        trace = parse_trace(stream.read(TRACE_BYTES + 1), printable(spec.target))
    size = sum(access.length for access in trace.accesses)
    return RecordedTrace(spec.name, spec.target, len(trace.accesses), size, trace.ended is not None)


def _clear(directory: str) -> None:
    with os_errors(f"remove {printable(directory)}"):
        clear(directory)


def _hex(id: str) -> str:
    return hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _variant(id: str, way: str) -> str:
    return f"{'via' if way == PASSTHROUGH else 'rec'}-{_hex(id)}"

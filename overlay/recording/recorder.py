"""The recorder: a process that sees what one sandbox reads, and answers before it does anything else.

``python -m overlay.recording.recorder DIRECTORY LINK``: DIRECTORY has ``spec.json``; LINK is the number of a
descriptor, the other end of which is the worker's until it has mounted. Over it go ``{"devices": N}``, with N
descriptors, as often as it takes, then ``{"ready": way}``; or ``{"failed": why, "kind": class}``. The worker answers
``{"mounted": [[layer, path], …]}`` with a descriptor of a copy of each mount, as often as it takes, and closes it.

At ``socket`` in DIRECTORY it takes messages from any number of links:

=========================================  =============================================================
``{"who": true}``                          ``{"way": …, "recording": not stopped, "in_use": something is mounted}``
``{"waited": seconds, "until": moment}``   no answer; by the monotonic clock
``{"stop": true}``                         ``{"stopped": …}`` when the trace is complete, or ``failed``
``{"discard": true}``                      ``{"discarded": true}``: there will be no trace
``{"release": true}``                      none: it stops if it hasn't, and ends. So does the link
=========================================  =============================================================

Modules are few until the end: it has to stand in a moment.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from layerstore.errors import ImgtoolError, MalformedError, UnsupportedError, from_os_error, printable
from overlay.lazy.link import Link, Message
from overlay.lazy.spinning import SpinningPoll
from overlay.recording.partial import Partial
from overlay.recording.spec import FILES, SOCKET, RecordingSpec, clear, load_spec
from overlay.recording.way import EVENTS, PASSTHROUGH, TRACEPOINTS, WAYS, Mounted, NotHereError, Way
from overlay.service.place import address

CHECK = 1.0
"""Seconds between looks at whether there is anything left to see."""
_NICE = {TRACEPOINTS: 19, EVENTS: -10, PASSTHROUGH: -10}
"""Where readers wait for it, as they do for the keeper, it comes first; else last."""
_BACKLOG = 16


class Recorder:
    """One recording, from its first mark to its end."""

    def __init__(self, directory: str, spec: RecordingSpec, starter: Link) -> None:
        self._directory = directory
        self._spec = spec
        self._starter: Link | None = starter
        self._links: dict[int, Link] = {}
        self._hearers: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._partial = Partial(spec.part, time.monotonic())
        self._given: list[Mounted] = []
        self._result: Message | None = None
        self._ended = False
        self._next_check = time.monotonic() + CHECK
        self._idle_checks = 0
        self._way: Way

    def begin(self) -> None:
        """Begin to see reads, listen, and say so.

        Raises:
            ImgtoolError, OSError: a device can't be had, or no way works.
        """
        self._way = self._first_that_works()
        set_priority(_NICE[self._way.name])
        self._listen()
        for fd in self._way.filenos():
            self._hear_from(fd, self._hear_way)
        self._hear_from(self._wake, self._hear_signal)
        signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(self._wake, 1))
        assert self._starter is not None
        self._hear_from(self._starter.fileno(), self._hear_starter)
        self._starter.send({"ready": self._way.name})
        self._starter.setblocking(False)

    def _first_that_works(self) -> Way:
        reasons = []
        for name in WAYS if self._spec.way is None else (self._spec.way,):
            try:
                return self._begun(name)
            except NotHereError as error:
                reasons.append(f"{name}: {error}")
                log(f"not by {reasons[-1]}")
        raise UnsupportedError(f"what a sandbox reads can't be seen here ({'; '.join(reasons)})")

    def _begun(self, name: str) -> Way:
        # Each has modules of its own, and those of the last one, libfuse's, take longer than all the rest.
        layers, note = self._spec.layers, self._partial.note
        if name == TRACEPOINTS:
            from overlay.recording.tracepoints import Tracepoints

            return Tracepoints(layers, note)
        if name == EVENTS:
            from overlay.recording.events import Events

            return Events(layers, self._give, note)
        from overlay.recording.passthrough import Passthrough

        return Passthrough(f"{self._directory}/{FILES}", layers, note)

    def _give(self, fds: list[int]) -> None:
        assert self._starter is not None
        self._starter.send({"devices": len(fds)}, fds)

    def _listen(self) -> None:
        with address(f"{self._directory}/{SOCKET}") as short:
            os.fchmod(self._listening.fileno(), 0o600)
            self._listening.bind(short)
        self._listening.listen(_BACKLOG)
        self._listening.setblocking(False)
        self._hear_from(self._listening.fileno(), self._accept)

    def _hear_from(self, fd: int, hearer: Callable[[], None]) -> None:
        self._hearers[fd] = hearer
        self._epoll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        del self._hearers[fd]
        self._epoll.unregister(fd)

    # --- the loop

    def run(self) -> None:
        """Until it is over."""
        poll = SpinningPoll(self._epoll)
        hearers, partial, way, clock = self._hearers, self._partial, self._way, time.monotonic
        while not self._ended:
            for fd, _ in poll(self._patience(clock())):
                if fd in hearers:  # what came before in this list may have ended it
                    hearers[fd]()
            now = clock()
            if self._result is None:
                if now >= way.due:
                    self._hear_way()
                if partial.is_due(now):
                    partial.flush()
            if now >= self._next_check:
                self._look_around(now)

    def _patience(self, now: float) -> float:
        if self._result is not None:
            return CHECK
        return max(0.0, min(self._partial.patience(now, CHECK), self._way.due - now))

    def _hear_way(self) -> None:
        try:
            self._way.hear()
        except Exception as error:  # nobody may wait for what can't be understood
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log(f"recording given up: {type(error).__name__}: {error}")
        if self._result is None:
            self._finish(cut=True)
            self._end_unless_needed()

    def _look_around(self, now: float) -> None:
        """End when nothing is left to be seen, twice in a row."""
        self._next_check = now + CHECK
        if self._starter is not None or self._in_use():
            self._idle_checks = 0
            return
        self._idle_checks += 1
        if self._idle_checks >= 2:
            self._finish(unless_empty=True)
            self._end()

    def _in_use(self) -> bool:
        if any(layer.devices for layer in self._spec.layers):
            return self._way.in_use()
        return os.path.isdir(self._spec.sandbox)  # nothing could be read through us, and nothing will be

    def _hear_signal(self) -> None:
        os.eventfd_read(self._wake)
        self._finish()
        self._end_unless_needed()

    def _hear_starter(self) -> None:
        """It is closed when the mounts are made, or won't be."""
        if self._starter is None:
            return
        try:
            while (received := self._starter.receive()) is not None:
                message, fds = received
                for (layer, path), copy in zip(message["mounted"], fds, strict=True):
                    self._given.append(Mounted(layer, path, copy))
        except BlockingIOError:
            return
        except (OSError, ImgtoolError, ValueError, TypeError, KeyError) as error:
            log(f"message of who has started us: {error}")
        self._leave_starter()

    def _leave_starter(self) -> None:
        """See what has been mounted."""
        if self._starter is None:
            return
        self._forget(self._starter.fileno())
        self._starter.close()
        self._starter = None
        self._way.mounted(self._given)

    # --- who asks

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        connection.setblocking(False)
        link = Link(connection)
        self._links[link.fileno()] = link
        self._hear_from(link.fileno(), lambda: self._hear(link))

    def _hear(self, link: Link) -> None:
        try:
            received = link.receive()
        except BlockingIOError:
            return
        except (MalformedError, OSError) as error:
            log(f"message: {error}")
            received = None
        if received is None:
            self._drop(link)
            return
        message, fds = received
        for fd in fds:
            os.close(fd)
        self._obey(link, message)

    def _obey(self, link: Link, message: Message) -> None:
        if "waited" in message:
            self._note_wait(message)
        elif "who" in message:
            state = {"recording": self._result is None, "in_use": self._in_use()}
            self._say(link, {"way": self._way.name, **state})
        elif "stop" in message or "discard" in message:
            answer = self._finish(discard="discard" in message)
            self._end_unless_needed()
            self._say(link, answer)
        elif "release" in message:
            self._finish()
            self._end()
        else:
            log(f"unknown message: {printable(' '.join(message)[:100])}")

    def _note_wait(self, message: Message) -> None:
        seconds, until = message["waited"], message.get("until")
        if self._result is None and type(seconds) is float and type(until) is float and 0 <= seconds < until:
            self._partial.wait(until - seconds, until)

    def _say(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except OSError:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._forget(link.fileno())
        del self._links[link.fileno()]
        link.close()

    # --- the end

    def _finish(self, *, discard: bool = False, unless_empty: bool = False, cut: bool = False) -> Message:
        """See no more, and complete the trace; the answer for whoever asked. Repeating it gives the same.

        ``unless_empty``: one in which nothing was read is discarded. ``cut``: it ends before the run.
        """
        if self._result is None:
            self._hear_starter()
            self._leave_starter()
            for fd in self._way.filenos():
                self._forget(fd)
            self._way.stop()
            ended = self._partial.end(time.monotonic())
            discard |= unless_empty and not len(self._partial.accesses)
            self._result = self._discarded() if discard else self._completed(None if cut else ended)
            self._partial.close()
        return self._result

    def _discarded(self) -> Message:
        try:
            os.unlink(self._spec.part)
        except FileNotFoundError:
            pass
        return {"discarded": True}

    def _completed(self, ended: int | None) -> Message:
        set_priority(0)
        gc.enable()
        # 100 ms of modules that nobody should have waited for when the recording began.
        from overlay.recording import completion
        from prefetch.trace.format import Access, Wait

        partial = self._partial
        accesses = [
            Access(seen.at, seen.layer, seen.device, seen.offset, seen.length, 0, seen.times, seen.comm)
            for seen in partial.accesses
        ]
        waits = sorted(Wait(*wait) for wait in partial.waits)
        missing = partial.accesses.dropped + self._way.lost
        note = f"{missing} reads are missing: they were too many, or came too fast" if missing else ""
        try:
            return completion.complete(self._spec, accesses, waits, ended, note).message()
        except ImgtoolError as error:
            log(f"trace not completed: {error}")
            return completion.answer(error)

    def _end_unless_needed(self) -> None:
        if not self._way.in_use():
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._way.close()
        self._leave_directory()

    def abandon(self) -> None:
        """Whoever wanted this was killed before it began: nobody else removes what there is of it."""
        self._discarded()
        if hasattr(self, "_way"):
            self._end()
        else:
            self._leave_directory()

    def _leave_directory(self) -> None:
        # Out of the way, before anybody could think that it was left behind: this name may be another's in a moment.
        aside = f"{self._directory}.{os.getpid()}"
        try:
            os.rename(self._directory, aside)
            clear(aside)
        except OSError as error:
            log(f"directory not removed: {error}")
        self._listening.close()


def set_priority(nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        pass  # it is slower without


def log(text: str) -> None:
    """One line to the log, or nowhere."""
    try:
        os.write(2, text.encode("utf-8", "backslashreplace") + b"\n")
    except OSError:
        pass


def main(arguments: Sequence[str]) -> None:
    """Be the recorder of a directory."""
    directory, fd = arguments
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the last one until it can be an orderly end
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/comm", "w", encoding="ascii") as stream:
        stream.write("imgtool-record")
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except OSError:
        pass  # there may be fewer devices, then
    link = Link.adopt(int(fd))
    recorder = None
    try:
        recorder = Recorder(directory, load_spec(directory), link)
        recorder.begin()
    except (ImgtoolError, OSError) as error:
        failed = error if isinstance(error, ImgtoolError) else from_os_error(error, "record")
        try:
            link.send({"failed": str(failed), "kind": type(failed).__name__})
        except OSError:
            if recorder is not None:
                recorder.abandon()
        return
    gc.collect()
    gc.freeze()
    gc.disable()  # what is made from now on has no cycles
    recorder.run()


if __name__ == "__main__":
    main(sys.argv[1:])

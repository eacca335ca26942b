"""Talking to recorders: starting one, asking, and waiting for its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import NoReturn

from layerstore import errors
from layerstore.errors import ImgtoolError, MalformedError, NotFoundError, UnavailableError, printable
from overlay.lazy.link import Link, Message
from overlay.recording.spec import LOG, SOCKET
from overlay.service.place import address

ANSWERING = 2.0
"""Seconds for an answer of one that isn't completing a trace."""
COMPLETING = 600.0
"""Seconds for completing a trace: as long as it takes to load the metadata images."""
ENDING = 10.0


class Child:
    """A process that may end at any time, and isn't left a zombie then: a thread waits for it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._thread = threading.Thread(target=process.wait, name=f"recorder {process.pid}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._thread.join(ENDING)


def spawned(module: str, directory: str) -> tuple[Link, Child]:
    """Run a module of ours for a recording; a link to it."""
    ours, its = Link.pair()
    with its:
        log = os.open(f"{directory}/{LOG}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, directory, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(log)
    return ours, Child(process)


def connect(directory: str) -> Link | None:
    """A link to the recorder of a directory; None if none listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(f"{directory}/{SOCKET}") as short:
            connection.settimeout(ANSWERING)
            connection.connect(short)
    except OSError:
        connection.close()
        return None
    return Link(connection)


def next_message(link: Link) -> tuple[Message, list[int]] | None:
    """Raises UnavailableError, where nothing comes."""
    try:
        return link.receive()
    except (OSError, MalformedError) as error:
        raise UnavailableError(f"no answer of the recorder: {error}") from error


def heard(link: Link) -> Message | None:
    """A message that comes without descriptors; None if the other end is gone."""
    received = next_message(link)
    if received is None:
        return None
    for fd in received[1]:
        os.close(fd)
    return received[0]


def ask_maybe(link: Link, message: Message, patience: float) -> Message | None:
    """The answer; None if the recorder is gone. Raises UnavailableError."""
    link.settimeout(patience)
    try:
        link.send(message)
    except TimeoutError as error:
        raise UnavailableError("the recorder takes no messages") from error
    except OSError:
        return None
    return heard(link)


def ask(link: Link, message: Message, patience: float) -> Message:
    """The answer. Raises UnavailableError."""
    answer = ask_maybe(link, message, patience)
    if answer is None:
        raise UnavailableError("the recorder has just ended; try again")
    return answer


def end(link: Link) -> None:
    """Tell a recorder to end, and wait until it has."""
    if ask_maybe(link, {"release": True}, COMPLETING) is not None:
        raise UnavailableError("the recorder doesn't end")


def await_end(link: Link, child: Child | None) -> None:
    """Return when a recorder that is at its end is gone."""
    link.settimeout(ENDING)
    try:
        heard(link)
    except UnavailableError:
        pass
    if child is not None:
        child.wait(ENDING)


def outcome(answer: Message) -> Message:
    """The fields of a completed trace. Raises ImgtoolError, if it isn't one."""
    if "failed" in answer:
        raise_as_met(answer)
    stopped = answer.get("stopped")
    if not isinstance(stopped, dict):
        raise NotFoundError("the recording was discarded")
    return stopped


def raise_as_met(message: Message) -> NoReturn:
    """An error as the recorder has met it."""
    kind = getattr(errors, str(message.get("kind")), UnavailableError)
    if not (isinstance(kind, type) and issubclass(kind, ImgtoolError)):
        kind = UnavailableError
    raise kind(str(message["failed"]))


def last_word(directory: str) -> str:
    """The last line of a recording's log, for messages."""
    try:
        with open(f"{directory}/{LOG}", "rb") as stream:
            lines = stream.read()[-4096:].splitlines()
    except OSError:
        lines = []
    return printable(lines[-1]) if lines else "it said nothing"

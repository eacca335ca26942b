"""The node service of a root: found where it runs, started where it doesn't."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import imgtool
from imgtool import environment
from imgtool.exitcodes import ExitCode
from layerstore.errors import NotFoundError, UnavailableError, os_errors, printable
from overlay.privilege import require_root
from overlay.service.client import Client
from overlay.service.options import AUTO_IDLE_EXIT
from overlay.service.place import connect, socket_path

LOG = "node.log"
"""In the root: where a service writes that was started by a command."""
PATIENCE = 20.0
"""Seconds a service gets to answer; on a slow disk most of it is Python reading its modules."""
MAX_LOG = 16 << 20
"""Bytes of a log that the next service goes on with; a longer one is put aside, in place of the one before."""
_ENDING = 5.0
"""Seconds that one gets to end which we have given up."""
_PAUSE = 0.02
_TAIL = 4096
"""Bytes at the end of a log in which the last line is looked for."""


def is_running(root: str) -> bool:
    """Whether somebody listens at the socket."""
    try:
        connect(socket_path(root), 1.0).close()
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return False
    except TimeoutError:  # it has no time for us, but it is there
        return True
    except PermissionError:
        require_root()
        raise
    return True


def running(root: str) -> Client | None:
    """A client of the service, if it runs."""
    return Client(root) if is_running(root) else None


def needed(root: str) -> Client:
    """A client of the service, which has to run.

    Raises:
        NotFoundError: it doesn't.
    """
    client = running(root)
    if client is None:
        raise NotFoundError(f"no node service of {printable(root)} is running; `imgtool node run` starts one")
    return client


def service(root: str) -> Client:
    """A client of the service, which is started if it doesn't run: it ends by itself when it isn't used any more.

    Raises:
        PermissionError_: not root.
        UnavailableError: it could not be started; the message has what its log says.
    """
    require_root()
    client = running(root)
    if client is None:
        until = time.monotonic() + PATIENCE
        with os_errors("start the node service"):
            os.makedirs(root, 0o700, exist_ok=True)
            with _starting(root, until):
                if not is_running(root):
                    _start(root, until)
        client = Client(root)
    return client


def wait_for_end(root: str) -> None:
    """Until a service that has been stopped listens no more, so that the next command finds it gone."""
    until = time.monotonic() + PATIENCE
    while is_running(root) and time.monotonic() < until:
        time.sleep(_PAUSE)


@contextmanager
def _starting(root: str, until: float) -> Iterator[None]:
    """One command at a time starts a service; the others wait, and then find it running."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UnavailableError("another command has been starting the node service for too long") from None
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(fd)


def _start(root: str, until: float) -> None:
    path = os.path.join(root, LOG)
    if os.path.exists(path) and os.stat(path).st_size > MAX_LOG:
        os.rename(path, path + ".1")
    log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        before = os.fstat(log).st_size
        child = _spawn(root, log)
        try:
            while not is_running(root):
                code = child.poll()
                if code == ExitCode.CONFLICT and time.monotonic() < until:
                    # Another one has the lock: it has just begun, as systemd's, or is about to end.
                    time.sleep(_PAUSE)
                    if not is_running(root):
                        child = _spawn(root, log)
                    continue
                if code is not None or time.monotonic() > until:
                    what = "does not answer" if code is None else f"ended with code {code}"
                    said = _last_line(log, before) or "it wrote nothing"
                    raise UnavailableError(f"the node service {what}: {said} (more in {printable(path)})")
                time.sleep(_PAUSE)
        except BaseException:
            _end(child)
            raise
        if child.returncode is None:
            child.returncode = 0  # it outlives this process, and how it ends is for its log
    finally:
        os.close(log)


def _spawn(root: str, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "imgtool",
            "node",
            "run",
            "--root",
            root,
            "--idle-exit",
            f"{AUTO_IDLE_EXIT:.0f}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env=environment.for_service(os.path.dirname(os.path.dirname(os.path.abspath(imgtool.__file__)))),
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_ENDING)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(log: int, before: int) -> str:
    """The last line that was written behind ``before``."""
    size = os.fstat(log).st_size
    start = max(before, size - _TAIL)
    lines = os.pread(log, max(0, size - start), start).splitlines()
    return printable(next((line for line in reversed(lines) if line.strip()), b""))

"""What the environment says. No other module reads it."""

from __future__ import annotations

import os

DEFAULT_ROOT = "/var/lib/imgtool"


def root() -> str:
    """``IMGTOOL_ROOT``: state of this node."""
    return os.environ.get("IMGTOOL_ROOT") or DEFAULT_ROOT


def store() -> str | None:
    """``IMGTOOL_STORE``: where layers are published; None means the store under the root."""
    return os.environ.get("IMGTOOL_STORE") or None


def spool() -> str | None:
    """``TMPDIR``: where blobs wait on their way to a store that is no directory.

    Without it /var/tmp, for /tmp is in memory on many machines; None is what Python's tempfile finds.
    """
    return os.environ.get("TMPDIR") or next(filter(os.path.isdir, ("/var/tmp",)), None)


def terminal() -> str | None:
    """``TERM``, for programs in a sandbox."""
    return os.environ.get("TERM") or None


def notify_socket() -> str | None:
    """``NOTIFY_SOCKET``: where systemd wants to be told that a service is ready."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog() -> float | None:
    """``WATCHDOG_USEC``: seconds within which systemd wants to hear of this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isdecimal() and int(text) else None


def listen_fds() -> tuple[tuple[str, int], ...]:
    """``LISTEN_FDS``: (name, descriptor) of what systemd kept for this process, and of nobody else's."""
    from overlay.service.notify import stored  # only `node run` asks

    return stored(*(os.environ.pop(name, None) for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")))


def for_service(path: str) -> dict[str, str]:
    """The environment of a service that is started on the side: it finds our packages in directory ``path``."""
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, others)))}

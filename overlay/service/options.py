"""How the service is started: what ``imgtool node run`` gives to the holder, and the holder to its worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

from layerstore.errors import UsageError
from overlay.service.fields import Fields
from overlay.service.request import PATH_LIMIT

LogFormat = Literal["json", "text"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
STANDARD_ERROR = "-"
READ_DEADLINE = 30.0
"""Seconds a reader waits for data before it gets EIO: longer than a store's hiccup, shorter than most watchdogs."""
THREADS = 16
"""Requests to the store under way: enough to fill 200 Mbit/s at 20 ms a request with frames of some 100 KiB."""
AUTO_IDLE_EXIT = 300.0
"""Seconds without sandbox and request after which a service that a command started ends itself."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """All of them; JSON and back.

    Attributes:
        limit: bytes of the cache; None: none but the disk's.
        read_deadline: seconds until a read that can't be served fails with EIO.
        threads: requests to the store at once.
        log: a file to append to, or "-" for standard error.
        log_format: one JSON object a line, or text.
        log_level: the least that is logged.
        prefetch_bandwidth: bytes a second, as stored, that all plans together may take from stores; None: no bound.
        idle_exit: seconds without sandbox and request until the service ends itself; None: never.
        notify_socket: systemd's NOTIFY_SOCKET.
        watchdog: seconds within which systemd wants to hear of us.
        listen_fds: (name, descriptor) of what systemd keeps for us over restarts, LISTEN_FDNAMES and LISTEN_FDS.
    """

    limit: int | None = None
    read_deadline: float = READ_DEADLINE
    threads: int = THREADS
    log: str = STANDARD_ERROR
    log_format: LogFormat = "json"
    log_level: LogLevel = "info"
    prefetch_bandwidth: int | None = None
    idle_exit: float | None = None
    notify_socket: str | None = None
    watchdog: float | None = None
    listen_fds: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "listen_fds": [list(item) for item in self.listen_fds]}

    @classmethod
    def from_json(cls, document: object) -> NodeOptions:
        """The options of a JSON object; what is absent has its default.

        Raises:
            UsageError: an unknown option, one of a wrong type or out of its range.
        """
        fields = Fields(document, "node options", tuple(cls.__dataclass_fields__))
        return cls(
            limit=fields.whole("limit", None, least=1, most=1 << 62),
            read_deadline=fields.seconds("read_deadline", READ_DEADLINE, most=86_400.0),
            threads=fields.whole("threads", THREADS, least=1, most=256),
            log=fields.optional_text("log", limit=PATH_LIMIT) or STANDARD_ERROR,
            log_format=cast(LogFormat, fields.choice("log_format", LOG_FORMATS, "json")),
            log_level=cast(LogLevel, fields.choice("log_level", LOG_LEVELS, "info")),
            prefetch_bandwidth=fields.whole("prefetch_bandwidth", None, least=1, most=1 << 62),
            idle_exit=fields.seconds("idle_exit", None, most=10 * 366 * 86_400.0),
            notify_socket=fields.optional_text("notify_socket", limit=PATH_LIMIT),
            watchdog=fields.seconds("watchdog", None, most=86_400.0),
            listen_fds=_descriptors(fields.items("listen_fds")),
        )


def _descriptors(items: list[object]) -> tuple[tuple[str, int], ...]:
    found = []
    for item in items:
        match item:
            case [str(name), int(fd)] if not isinstance(fd, bool) and fd >= 0:
                found.append((name, fd))
            case _:
                raise UsageError("node options: listen_fds holds something other than [name, descriptor]")
    return tuple(found)

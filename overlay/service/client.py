"""The client of a node's service: methods for endpoints, values for answers, errors as if it were called directly.

::

    with Client("/var/lib/imgtool") as client:
        made = client.create(SandboxRequest(base="repo-env", store="/srv/store", count=50))
        print([sandbox.rootfs for sandbox in made])

It is light to import, for the command line.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from layerstore.errors import ImgtoolError, LimitError, UnavailableError, UsageError, printable
from layerstore.progress import SILENT, Progress
from overlay.service.answers import (
    CacheInfo,
    LeftoverInfo,
    NodeStatus,
    PinInfo,
    RecordingInfo,
    RemovalInfo,
    SandboxInfo,
    StopInfo,
    TraceInfo,
    list_of,
    whole,
)
from overlay.service.messages import LINES, MAX_BODY, PREFIX, error_of
from overlay.service.place import socket_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPResponse

    from overlay.service.connection import Connection
    from overlay.service.request import SandboxRequest

TIMEOUT = 30.0
"""Seconds for a call that only asks; what changes something has the time it takes."""
_ATTEMPTS = 2


class NotRunning(UnavailableError):
    """Nobody listens at the socket: there is no service, or none yet."""


class Client:
    """One connection, for one thread at a time. It is made with the first call, and again after the service restarts.

    All methods raise the service's errors (:mod:`layerstore.errors`), and:

    - NotRunning: there is no service.
    - UnavailableError: it is busy, or it ended meanwhile. Calls that only ask, and those that say what shall be
      (remove, pin), are repeated once; after any other one, look whether it was done.
    - MalformedError: the answer is not of this release.
    """

    def __init__(self, root: str, *, timeout: float = TIMEOUT) -> None:
        """The client of the service with this root."""
        self._path = socket_path(root)
        self._timeout = timeout
        self._connection: Connection | None = None

    @classmethod
    def at(cls, path: str, *, timeout: float = TIMEOUT) -> Self:
        """The client of the service that listens at this socket; the path may be of any length."""
        client = cls("/", timeout=timeout)
        client._path = path
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Another call makes a new one."""
        if self._connection is not None:
            self._connection.close()

    def status(self) -> NodeStatus:
        return NodeStatus.from_json(self._get("/status"))

    def sandboxes(self) -> list[SandboxInfo]:
        return list_of(self._get("/sandboxes"), "sandboxes", SandboxInfo.from_json)

    def sandbox(self, id: str) -> SandboxInfo:
        return SandboxInfo.from_json(self._get(f"/sandboxes/{_part(id)}"))

    def create(self, request: SandboxRequest, progress: Progress = SILENT) -> list[SandboxInfo]:
        """Make ``request.count`` sandboxes, all or none; ``progress`` is told while data are fetched.

        When this call is interrupted, the service removes what it has made.
        """
        answer = self._call("POST", "/sandboxes", request.to_json(), progress=progress)
        return list_of(answer, "sandboxes", SandboxInfo.from_json)

    def remove(self, id: str, *, exit_code: int | None = None) -> RemovalInfo:
        """Remove a sandbox; one that is gone already is fine. ``exit_code``: of the command that it was made for."""
        body = None if exit_code is None else {"exit_code": exit_code}
        return RemovalInfo.from_json(self._call("DELETE", f"/sandboxes/{_part(id)}", body, repeatable=True))

    def remove_all(self) -> list[RemovalInfo]:
        answer = self._call("DELETE", "/sandboxes?all=true", repeatable=True)
        return list_of(answer, "removed", RemovalInfo.from_json)

    def receipt(self, id: str) -> Mapping[str, Any]:
        """The receipt of a sandbox, also of one that was removed."""
        return self._get(f"/receipts/{_part(id)}")

    def recover(self) -> list[LeftoverInfo]:
        """Clear what crashes left."""
        return list_of(self._call("POST", "/recover"), "leftovers", LeftoverInfo.from_json)

    def pins(self) -> list[PinInfo]:
        return list_of(self._get("/pins"), "pins", PinInfo.from_json)

    def pin(self, name: str, store: str) -> PinInfo:
        """Keep in the cache what it has, and will have, of the image ``name`` of the store at ``store``."""
        return PinInfo.from_json(self._call("PUT", f"/pins/{_part(name, '/:')}", {"store": store}, repeatable=True))

    def unpin(self, name: str) -> None:
        self._call("DELETE", f"/pins/{_part(name, '/:')}")

    def cache(self) -> CacheInfo:
        return CacheInfo.from_json(self._get("/cache"))

    def evict(self, wanted: int) -> int:
        """Free ``wanted`` bytes of the cache, as far as nobody uses them; how many were freed."""
        return whole(self._call("POST", "/cache/evict", {"bytes": wanted}), "freed")

    def traces(self) -> list[RecordingInfo]:
        """The traces that are being recorded."""
        return list_of(self._get("/traces"), "traces", RecordingInfo.from_json)

    def start_trace(self, id: str, name: str | None = None) -> RecordingInfo:
        """Record what sandbox ``id`` reads from now on; ``name`` is the trace's, by default that of the sandbox.

        Raises:
            ConflictError: somebody is in the sandbox, or it is recorded already, or there is a trace of this name.
        """
        return RecordingInfo.from_json(self._call("POST", "/traces", {"sandbox": id, "name": name}))

    def stop_trace(self, id: str) -> TraceInfo:
        """End the trace of sandbox ``id``.

        Raises:
            NotFoundError: it is not being recorded.
        """
        return TraceInfo.from_json(self._call("DELETE", f"/traces/{_part(id)}"))

    def stop(self, *, force: bool = False) -> StopInfo:
        """Stop the service: it unmounts, answers, and ends.

        Raises:
            ConflictError: a sandbox is in use that can't do without it; with ``force`` it is removed.
        """
        return StopInfo.from_json(self._call("POST", "/stop", {"force": force}))

    def metrics(self) -> str:
        """What Prometheus gets."""
        return self._ask("GET", "/metrics", None, SILENT, True, self._timeout)[1].decode()

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, repeatable=True, timeout=self._timeout)

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        progress: Progress = SILENT,
        repeatable: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        from overlay.service.connection import document_of

        content = None if body is None else json.dumps(body).encode()
        if content is not None and len(content) > MAX_BODY:
            raise LimitError(f"a request of {len(content)} bytes; the node service takes {MAX_BODY}")
        lines, answer = self._ask(method, PREFIX + path, content, progress, repeatable, timeout)
        return lines if lines is not None else document_of(answer)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        progress: Progress,
        repeatable: bool,
        timeout: float | None,
    ) -> tuple[dict[str, Any] | None, bytes]:
        """The result, when it came in lines, or the answer's bytes."""
        from overlay.service.connection import Connection, Lost, NobodyListens, refusal_of

        if self._connection is None:
            self._connection = Connection(self._path, self._timeout)
        connection = self._connection
        for left in reversed(range(_ATTEMPTS if repeatable else 1)):
            try:
                response = connection.ask(method, path, body, in_lines=progress is not SILENT, timeout=timeout)
                if response.getheader("Content-Type") == LINES:
                    return self._follow(connection, response, progress), b""
                answer = connection.read(response)
            except NobodyListens:
                raise NotRunning(
                    f"no node service listens at {printable(self._path)}; `imgtool node run` starts one"
                ) from None
            except Lost as error:
                if left:
                    continue
                more = "" if repeatable else "; look whether it was done"
                raise UnavailableError(
                    f"the node service ended before it answered ({error}); its log says why{more}"
                ) from error
            except BaseException:
                connection.close()  # in the middle of an answer: whatever comes next isn't the next one's
                raise
            if response.status >= 400:
                raise refusal_of(response, answer)
            return None, answer
        raise AssertionError("the last attempt returns or raises")

    def _follow(self, connection: Connection, response: HTTPResponse, progress: Progress) -> dict[str, Any]:
        from overlay.service.connection import Lost

        told = _Told(progress)
        result: dict[str, Any] | None = None
        error: ImgtoolError | None = None
        for line in connection.lines(response):
            if "progress" in line:
                told.tell(line["progress"])
            elif "error" in line:
                error = error_of(line)
            else:
                result = line.get("result")
        if error is not None:
            raise error
        if not isinstance(result, dict):
            raise Lost("the answer has no end")
        return result


class _Told:
    """Hands on what the service says of its progress: it says how much is done, a Progress wants to know what's new."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step: tuple[object, object] | None = None
        self._done = 0

    def tell(self, state: object) -> None:
        match state:
            case {"step": str(step), "total": int() | None as total, "done": int(done)}:
                if (step, total) != self._step or done < self._done:
                    self._step, self._done = (step, total), 0
                    self._progress.start(step, total)
                if done > self._done:
                    self._progress.advance(done - self._done)
                    self._done = done
            case _:
                pass  # of a later release


def _part(name: str, safe: str = "") -> str:
    """``name`` as the last part of a path; what can't be one there, the service refuses."""
    if not name:
        raise UsageError("the empty name is nobody's")
    try:
        return quote(name, safe=safe, errors="surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{printable(name)!r} is nobody's name") from None

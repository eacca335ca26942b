"""The endpoints: which request asks the service for what. ``docs/api.md`` describes each.

What a request names is checked here, before the service hears of it: sandbox ids by :func:`~.request.check_id` and
image names by :func:`~layerstore.store.names.check_name`, of which none can be a path or hidden. The rest of a target
is compared with fixed texts, so no part of a request reaches the file system unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote_to_bytes

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, MalformedError, UnsupportedError, UsageError, printable
from layerstore.progress import Progress
from layerstore.store.names import check_name
from overlay.service.fields import Fields
from overlay.service.messages import JSON, PREFIX
from overlay.service.request import NAME_LIMIT, PATH_LIMIT, SandboxRequest, check_file, check_id

MAX_TARGET = 1024
"""Characters of path and query."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TARGET = re.compile(r"(?:[A-Za-z0-9._~:/@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
_QUERY_FIELDS = 8

Document = dict[str, Any]


class Service(Protocol):
    """What answers; its methods run in several threads at once and raise errors of :mod:`layerstore.errors`."""

    def status(self) -> Document: ...
    def sandboxes(self) -> list[Document]: ...
    def sandbox(self, id: str) -> Document: ...
    def create(self, request: SandboxRequest, progress: Progress) -> list[Document]:
        """Make ``request.count`` sandboxes, all or none."""
        ...

    def remove(self, ids: Sequence[str] | None, *, exit_code: int | None = None) -> list[Document]:
        """Remove these, or all; those that are gone already are fine."""
        ...

    def recover(self) -> list[Document]: ...
    def receipt(self, id: str) -> Document:
        """Also of a sandbox that was removed."""
        ...

    def pins(self) -> list[Document]: ...
    def pin(self, name: str, store: str) -> Document: ...
    def unpin(self, name: str) -> None: ...
    def cache(self) -> Document: ...
    def evict(self, wanted: int) -> Document: ...
    def traces(self) -> list[Document]:
        """Those that are being recorded."""
        ...

    def start_trace(self, id: str, name: str | None) -> Document:
        """Record what sandbox ``id`` reads from now on, which nobody may be in."""
        ...

    def stop_trace(self, id: str) -> Document:
        """End the trace of sandbox ``id``."""
        ...

    def stop(self, force: bool) -> Document:
        """Unmount everything and have the server shut down, which it does after this call has been answered."""
        ...

    def metrics(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One request for a route.

    Attributes:
        name: the variable part of the path, checked; empty where there is none.
        body: the JSON object that was sent; empty when nothing was.
        progress: to be told how it goes.
    """

    name: str
    body: Document
    progress: Progress


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint.

    Attributes:
        method: of HTTP.
        path: with ``{id}`` or ``{name}`` for the variable part, which is the last one.
        answer: makes the answer: JSON, or bytes of ``media_type``.
        body: whether it takes one.
        query: what has to be in the query, and nothing else may.
        undo: undoes what was done, when the one who asked has gone and can't be told of it.
    """

    method: str
    path: str
    answer: Callable[[Service, Call], Document | bytes]
    body: bool = False
    query: Mapping[str, str] | None = None
    undo: Callable[[Service, Document], object] | None = None
    media_type: str = JSON


class Refusal(Exception):
    """A request that no route takes: HTTP's own status, and the error for the body."""

    def __init__(self, status: int, error: ImgtoolError, *, allow: str = "") -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.allow = allow


def find(method: str, target: str) -> tuple[Route, str]:
    """The route for a request, and the variable part of its path.

    Raises:
        Refusal: no such path, or not with this method.
        UsageError: the path or the query is malformed.
    """
    path, _, query = target.partition("?")
    methods, prefix = _FIXED.get(path), path
    if methods is None:
        path = _decoded(path, len(target))
        prefix = next((prefix for prefix in _VARIABLE if path.startswith(prefix) and len(path) > len(prefix)), "")
        if not prefix:
            raise Refusal(404, UnsupportedError(f"the node service has no {printable(path)}"))
        methods = _VARIABLE[prefix]
    route = methods.get(method)
    if route is None:
        allowed = ", ".join(sorted(methods))
        error = UnsupportedError(f"the node service takes no {printable(method)} of {printable(path)}, but {allowed}")
        raise Refusal(405, error, allow=allowed)
    name = path[len(prefix) :]
    if name:
        _CHECKS[route.path[len(prefix) :]](name)
    _check_query(route, query)
    return route, name


def _decoded(path: str, length: int) -> str:
    if length > MAX_TARGET:
        raise UsageError(f"a path of {length} characters; at most {MAX_TARGET} are taken")
    if not _TARGET.fullmatch(path):
        raise UsageError(f"{printable(path)!r} is not the path of a URL: percent-encode what isn't ASCII")
    try:
        text = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path!r} is not UTF-8") from None
    if "%2f" in path.lower() or not text.isprintable() or {".", ".."} & set(text.split("/")):
        raise UsageError(f"{path!r}: encoded slashes, control characters and parts that are dots can't be in a path")
    return text


def _check_query(route: Route, query: str) -> None:
    wanted = route.query or {}
    try:
        fields = parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=_QUERY_FIELDS
        )
    except ValueError:
        raise UsageError("the query of the URL is malformed") from None
    if fields != list(wanted.items()):
        said = "?" + "&".join(f"{key}={value}" for key, value in wanted.items()) if wanted else "no query"
        raise UsageError(f"{route.method} {route.path} takes {said}")


def _check_image(name: str) -> None:
    if not name.startswith("sha256:"):
        check_name(name)
        return
    try:
        Digest.parse(name)
    except MalformedError as error:
        raise UsageError(str(error)) from None


def _pin(service: Service, call: Call) -> Document:
    store = Fields(call.body, "pin", ("store",)).text("store", limit=PATH_LIMIT)
    if not store.startswith("/") and "://" not in store:
        raise UsageError(f"pin: store is {printable(store)!r}; it has to be an absolute path or a URL")
    return service.pin(call.name, store)


def _unpin(service: Service, call: Call) -> Document:
    service.unpin(call.name)
    return {"name": call.name}


def _evict(service: Service, call: Call) -> Document:
    wanted = Fields(call.body, "eviction", ("bytes",)).whole("bytes", None, least=0, most=1 << 62)
    if wanted is None:
        raise UsageError("eviction lacks the field 'bytes'")
    return service.evict(wanted)


def _create(service: Service, call: Call) -> Document:
    return {"sandboxes": service.create(SandboxRequest.from_json(call.body), call.progress)}


def _undo_create(service: Service, answer: Document) -> object:
    return service.remove([sandbox["id"] for sandbox in answer["sandboxes"]])


def _remove(service: Service, call: Call) -> Document:
    exit_code = Fields(call.body, "remove", ("exit_code",)).whole("exit_code", None, least=0, most=255)
    return service.remove([call.name], exit_code=exit_code)[0]


def _start_trace(service: Service, call: Call) -> Document:
    fields = Fields(call.body, "trace", ("sandbox", "name"))
    name = fields.optional_text("name", limit=NAME_LIMIT)
    return service.start_trace(
        check_id(fields.text("sandbox", limit=63)), None if name is None else check_file(name, "trace")
    )


def _stop(service: Service, call: Call) -> Document:
    return service.stop(Fields(call.body, "stop", ("force",)).flag("force"))


ROUTES: tuple[Route, ...] = (
    Route("GET", f"{PREFIX}/status", lambda service, call: service.status()),
    Route("GET", f"{PREFIX}/sandboxes", lambda service, call: {"sandboxes": service.sandboxes()}),
    Route("POST", f"{PREFIX}/sandboxes", _create, body=True, undo=_undo_create),
    Route(
        "DELETE",
        f"{PREFIX}/sandboxes",
        lambda service, call: {"removed": service.remove(None)},
        query={"all": "true"},
    ),
    Route("GET", f"{PREFIX}/sandboxes/{{id}}", lambda service, call: service.sandbox(call.name)),
    Route("DELETE", f"{PREFIX}/sandboxes/{{id}}", _remove, body=True),
    Route("GET", f"{PREFIX}/receipts/{{id}}", lambda service, call: service.receipt(call.name)),
    Route("POST", f"{PREFIX}/recover", lambda service, call: {"leftovers": service.recover()}),
    Route("GET", f"{PREFIX}/pins", lambda service, call: {"pins": service.pins()}),
    Route("PUT", f"{PREFIX}/pins/{{name}}", _pin, body=True),
    Route("DELETE", f"{PREFIX}/pins/{{name}}", _unpin),
    Route("GET", f"{PREFIX}/cache", lambda service, call: service.cache()),
    Route("POST", f"{PREFIX}/cache/evict", _evict, body=True),
    Route("GET", f"{PREFIX}/traces", lambda service, call: {"traces": service.traces()}),
    Route("POST", f"{PREFIX}/traces", _start_trace, body=True),
    Route("DELETE", f"{PREFIX}/traces/{{id}}", lambda service, call: service.stop_trace(call.name)),
    Route("POST", f"{PREFIX}/stop", _stop, body=True),
    Route("GET", "/metrics", lambda service, call: service.metrics(), media_type=METRICS_TYPE),
)
_CHECKS: Mapping[str, Callable[[str], object]] = {"{id}": check_id, "{name}": _check_image}
_FIXED: dict[str, dict[str, Route]] = {}
_VARIABLE: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    _prefix, _brace, _ = _route.path.partition("{")
    (_VARIABLE if _brace else _FIXED).setdefault(_prefix, {})[_route.method] = _route

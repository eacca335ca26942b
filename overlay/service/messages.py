"""What both ends of the API know: its errors, its media types and its limits.

An error is ``{"error": {"kind": "conflict", "message": "one line"}}``. The kind says which class of
:mod:`layerstore.errors` it is, so that a caller behind the socket decides as one in the process would; the HTTP status
is for tools that know nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from layerstore import errors
from layerstore.errors import ImgtoolError

PREFIX = "/v1"
JSON = "application/json"
LINES = "application/x-ndjson"
"""Asked for with ``Accept``: lines of ``{"progress": …}``, at last one of ``{"result": …}`` or ``{"error": …}``."""
MAX_BODY = 1 << 20
"""Bytes of a request's body."""
MAX_MESSAGE = 4000
"""Characters of an error's message."""
INTERNAL = "internal"
"""The kind of what isn't the caller's fault and has no class."""


class Kind(NamedTuple):
    """How errors of a class travel."""

    name: str
    error: type[ImgtoolError]
    status: int


KINDS: tuple[Kind, ...] = (
    Kind("usage", errors.UsageError, 400),
    Kind("permission", errors.PermissionError_, 403),
    Kind("not-found", errors.NotFoundError, 404),
    Kind("conflict", errors.ConflictError, 409),
    Kind("limit", errors.LimitError, 413),
    Kind("malformed", errors.MalformedError, 422),
    Kind("unsupported", errors.UnsupportedError, 501),
    Kind("corrupt", errors.CorruptError, 502),
    Kind("unavailable", errors.UnavailableError, 503),
    Kind("no-space", errors.NoSpaceError, 507),
)
_OF_CLASS = {kind.error: kind for kind in KINDS}
_OF_NAME = {kind.name: kind for kind in KINDS}
_INTERNAL = Kind(INTERNAL, ImgtoolError, 500)


def kind_of_error(error: ImgtoolError) -> Kind:
    """That of the error's class, or of its nearest ancestor."""
    for cls in type(error).__mro__:
        kind = _OF_CLASS.get(cls)
        if kind is not None:
            return kind
    return _INTERNAL


def error_document(error: ImgtoolError) -> dict[str, object]:
    """``error`` as the API says it."""
    return {"error": {"kind": kind_of_error(error).name, "message": one_line(str(error), MAX_MESSAGE)}}


def error_of(document: Mapping[str, object]) -> ImgtoolError:
    """The error that :func:`error_document` was made of; one of an unknown kind is a plain ImgtoolError."""
    inner = document.get("error")
    if not isinstance(inner, Mapping):
        inner = {}
    kind = _OF_NAME.get(str(inner.get("kind")), _INTERNAL)
    return kind.error(one_line(str(inner.get("message", "the node service gives no reason")), MAX_MESSAGE))


def one_line(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``, all of them printable."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)

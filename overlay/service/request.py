"""What one asks the service for: a sandbox, or several alike."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from layerstore.errors import UsageError, about, printable
from layerstore.store.names import check_name
from overlay.service.fields import Fields

Mode = Literal["auto", "eager", "lazy", "direct"]
Backend = Literal["fanotify", "fuse"]
Isolation = Literal["container", "none"]
MODES: tuple[Mode, ...] = get_args(Mode)
BACKENDS: tuple[Backend, ...] = get_args(Backend)
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)

ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""The grammar of sandbox ids, which is that of :data:`overlay.layers.USER`: here without all that mounting imports."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""As in :mod:`layerstore.store.opening`: here without all that stores import."""
NAME_LIMIT = 512
"""Characters of a name or digest of an image."""
PATH_LIMIT = 4095
"""PATH_MAX of Linux, without the NUL."""
MAX_TOOLKITS = 400
"""overlayfs takes 500 lower directories."""
MAX_COUNT = 10_000
MAX_SCRATCH = 1 << 44
"""16 TiB, the largest ext4 of 4 KiB blocks."""
MAX_TTL = 10 * 366 * 86_400.0
MAX_CARRIED = 64 << 10
"""Bytes, as JSON, of what is not ours: it goes into the receipt of every sandbox."""
MAX_WORDS = 1024
"""Of a command; and WORD_LIMIT characters of each: the header of a trace has it, for people."""
WORD_LIMIT = 4096
AUTO_PLAN, NO_PLAN = "auto", "none"
"""What ``plan`` can be besides a name."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a sandbox reads is to be recorded.

    Attributes:
        name: of the trace; None: that of the sandbox.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """One request, checked when it is made: whoever holds one needs to check no form, only whether things exist.

    Attributes:
        base: name or manifest digest of an image. Alone it may be a stack already; with a workspace or toolkits it is
            a single layer.
        store: location of the store that has the images: an absolute path or a URL.
        workspace: the layer above the base.
        toolkits: layers on top, the last one wins.
        id: the sandbox's name; None: made up.
        mode: auto chooses what this machine does best.
        backend: of lazy mode; None: chosen.
        read_only: nothing can be written in it, and there is no upper.
        scratch: bytes that can be written in it; None: what the node has.
        count: how many sandboxes alike; with an id they are called id-1, id-2 and so on.
        ttl: seconds after which the service removes it; None: never.
        isolation: what runs in it is kept apart by an OCI runtime, or whoever asks takes the root filesystem alone.
        receipts: an existing directory, absolute, that gets a copy of the receipt at the start and at the end.
        carried: fields that are other parts of a platform's business; kept in the receipt.
        force: take layers that were made over another base.
        record: what it reads; None: that is not recorded.
        command: what is going to run in it, for the header of its trace.
        plan: which plan says what is fetched ahead: auto is the one for its layers, none is none, others are names.
        wait_prefetch: the plan's data are all there before the sandbox is.

    Raises:
        UsageError: a field is out of its range, or two contradict each other.
    """

    base: str
    store: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    id: str | None = None
    mode: Mode = "auto"
    backend: Backend | None = None
    read_only: bool = False
    scratch: int | None = None
    count: int = 1
    ttl: float | None = None
    isolation: Isolation = "container"
    receipts: str | None = None
    carried: Mapping[str, object] = field(default_factory=dict)
    force: bool = False
    record: Record | None = None
    command: tuple[str, ...] = ()
    plan: str = AUTO_PLAN
    wait_prefetch: bool = False

    def __post_init__(self) -> None:
        checked = SandboxRequest._checked(Fields(self._fields(), "sandbox request", _FIELDS))
        for name, value in checked.items():  # floats where integers came, tuples where lists came
            object.__setattr__(self, name, value)
        _check_together(self)

    def ids(self) -> tuple[str | None, ...]:
        """The name of each of the ``count`` sandboxes; None: to be made up."""
        if self.id is None or self.count == 1:
            return (self.id,) * self.count
        return tuple(f"{self.id}-{number}" for number in range(1, self.count + 1))

    def traces(self) -> tuple[str | None, ...]:
        """The name of the trace of each of the ``count`` sandboxes; None: that of the sandbox."""
        name = None if self.record is None else self.record.name
        if name is None or self.count == 1:
            return (name,) * self.count
        return tuple(f"{name}-{number}" for number in range(1, self.count + 1))

    def to_json(self) -> dict[str, object]:
        return {
            **self._fields(),
            "toolkits": list(self.toolkits),
            "carried": dict(self.carried),
            "command": list(self.command),
        }

    @classmethod
    def from_json(cls, document: object) -> SandboxRequest:
        """The request of a JSON object: ``base`` and ``store`` have to be there, null is as good as nothing.

        Raises:
            UsageError: an unknown field, one of a wrong type or out of its range.
        """
        Fields(document, "sandbox request", _FIELDS)  # an object with these fields; what is in them is checked once
        assert isinstance(document, dict)
        return cls(**{"base": None, "store": None, **document})

    def _fields(self) -> dict[str, object]:
        """What it has, as JSON has it but for tuples."""
        record = None if self.record is None else _as_document(self.record)
        return {name: getattr(self, name) for name in _FIELDS} | {"record": record}

    @staticmethod
    def _checked(fields: Fields) -> dict[str, object]:
        return {
            "base": fields.text("base", limit=NAME_LIMIT),
            "store": fields.text("store", limit=PATH_LIMIT),
            "workspace": fields.optional_text("workspace", limit=NAME_LIMIT),
            "toolkits": fields.texts("toolkits", limit=NAME_LIMIT, count=MAX_TOOLKITS),
            "id": fields.optional_text("id", limit=63),
            "mode": cast(Mode, fields.choice("mode", MODES, "auto")),
            "backend": cast("Backend | None", fields.optional_choice("backend", BACKENDS)),
            "read_only": fields.flag("read_only"),
            "scratch": fields.whole("scratch", None, least=1, most=MAX_SCRATCH),
            "count": fields.whole("count", 1, least=1, most=MAX_COUNT),
            "ttl": fields.seconds("ttl", None, most=MAX_TTL),
            "isolation": cast(Isolation, fields.choice("isolation", ISOLATIONS, "container")),
            "receipts": fields.optional_text("receipts", limit=PATH_LIMIT),
            "carried": fields.mapping("carried"),
            "force": fields.flag("force"),
            "record": _record(fields),
            "command": fields.texts("command", limit=WORD_LIMIT, count=MAX_WORDS),
            "plan": fields.optional_text("plan", limit=NAME_LIMIT) or AUTO_PLAN,
            "wait_prefetch": fields.flag("wait_prefetch"),
        }


_FIELDS = tuple(SandboxRequest.__dataclass_fields__)


def _record(fields: Fields) -> Record | None:
    document = fields.optional_object("record")
    if document is None:
        return None
    return Record(Fields(document, "sandbox request: record", ("name",)).optional_text("name", limit=NAME_LIMIT))


def _as_document(record: object) -> object:
    return {"name": record.name} if isinstance(record, Record) else record


def _check_together(request: SandboxRequest) -> None:
    for name in filter(None, request.ids()):
        check_id(name)
    if not os.path.isabs(request.store) and not _URL.match(request.store):
        raise UsageError(
            f"sandbox request: store is {printable(request.store)!r}; it has to be an absolute path or a URL"
        )
    if request.receipts is not None and not os.path.isabs(request.receipts):
        raise UsageError(f"sandbox request: receipts is {printable(request.receipts)!r}; it has to be an absolute path")
    if request.backend is not None and request.mode not in ("auto", "lazy"):
        raise UsageError(f"mode {request.mode} has no backend: {request.backend} is one of mode lazy")
    if request.read_only and request.scratch is not None:
        raise UsageError("a read-only sandbox takes no writes, so there is no scratch to bound")
    for name in filter(None, request.traces()):
        check_file(name, "trace")
    check_file(request.plan, "plan")
    if request.wait_prefetch and request.plan == NO_PLAN:
        raise UsageError("without a plan nothing is fetched ahead that could be waited for")
    try:
        size = len(json.dumps(request.carried, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise UsageError("sandbox request: carried holds something that isn't JSON") from None
    if size > MAX_CARRIED:
        raise UsageError(f"sandbox request: carried has {size} bytes as JSON; at most {MAX_CARRIED} are taken")


def check_id(text: str) -> str:
    """The id itself.

    Raises:
        UsageError: it breaks the grammar.
    """
    if not ID.fullmatch(text):
        raise UsageError(
            f"not a sandbox id: {printable(text)!r}; it takes 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "and starts with a letter or digit"
        )
    return text


def check_file(name: str, kind: str) -> str:
    """The name itself of a trace or plan, which is a file's: a reference name without a slash.

    Raises:
        UsageError: it breaks the grammar.
    """
    with about(f"name of a {kind}"):
        if "/" in name:
            raise UsageError(f"{printable(name)!r} has a slash, and can't be a file's name")
        return check_name(name)

"""What the API answers, as values with types. Each keeps the whole JSON in ``raw``: a newer service may say more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from layerstore.errors import MalformedError

T = TypeVar("T")
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What is in the node's cache; sizes are bytes on disk.

    Attributes:
        bytes: of everything in it.
        limit: that it may have; None: as many as the disk has.
        packs: in it.
        metadata_images: in it.
        in_use_bytes: of what sandboxes use.
        pinned_bytes: of what is pinned.
        raw: the whole answer.
    """

    bytes: int
    limit: int | None
    packs: int
    metadata_images: int
    in_use_bytes: int
    pinned_bytes: int
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> CacheInfo:
        take = _Taken(document, "cache")
        return cls(
            bytes=take("bytes", int),
            limit=take.optional("limit", int),
            packs=take("packs", int),
            metadata_images=take("metadata_images", int),
            in_use_bytes=take("in_use_bytes", int),
            pinned_bytes=take("pinned_bytes", int),
            raw=take.document,
        )


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How the service is.

    Attributes:
        version: its release.
        root: whose service it is.
        started: RFC 3339.
        uptime: seconds.
        pids: of its processes, by what they are.
        restarts: how often each was started again.
        backend: what sandboxes get that ask for no mode: fanotify, fuse or eager.
        why: one line: why it is this one.
        sandboxes: how many there are.
        cache: what is in it.
        stopping: it takes no more requests.
        raw: the whole answer.
    """

    version: str
    root: str
    started: str
    uptime: float
    pids: Mapping[str, int]
    restarts: Mapping[str, int]
    backend: str
    why: str
    sandboxes: int
    cache: CacheInfo
    stopping: bool
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> NodeStatus:
        take = _Taken(document, "status")
        preferred = _Taken(take("preferred", dict), "status: preferred")
        return cls(
            version=take("version", str),
            root=take("root", str),
            started=take("started", str),
            uptime=float(take("uptime", (int, float))),
            pids=take("pids", dict),
            restarts=take("restarts", dict),
            backend=preferred("backend", str),
            why=preferred("why", str),
            sandboxes=_Taken(take("sandboxes", dict), "status: sandboxes")("total", int),
            cache=CacheInfo.from_json(take("cache", dict)),
            stopping=take("stopping", bool),
            raw=take.document,
        )


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox.

    Attributes:
        id: its name.
        rootfs: where it stands.
        mode: eager, lazy or direct.
        backend: how its data are reached: fanotify, fuse, files or raw packs.
        why: one line: why it is this one.
        mounted: whether it stands now.
        condition: ok, or what is wrong: "not mounted", "impaired: …", "suspect: …".
        image: name and manifest, as it was asked for.
        layers: digests of metadata images, bottom first.
        chain: digest over the layers.
        read_only: nothing can be written in it.
        scratch: bytes that can; None: what the node has.
        upper: where writes go; None when read-only.
        created: seconds since 1970.
        trace: name of the trace that is being recorded of it; None: none is.
        prefetch: what a plan brings for it, see docs/api.md; None: nothing is fetched ahead by plan.
        raw: the whole answer.
    """

    id: str
    rootfs: str
    mode: str
    backend: str
    why: str
    mounted: bool
    condition: str
    image: Document
    layers: tuple[str, ...]
    chain: str
    read_only: bool
    scratch: int | None
    upper: str | None
    created: int
    trace: str | None
    prefetch: Document | None
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> SandboxInfo:
        take = _Taken(document, "sandbox")
        return cls(
            id=take("id", str),
            rootfs=take("rootfs", str),
            mode=take("mode", str),
            backend=take("backend", str),
            why=take("why", str),
            mounted=take("mounted", bool),
            condition=take("condition", str),
            image=take("image", dict),
            layers=take.texts("layers"),
            chain=take("chain", str),
            read_only=take("read_only", bool),
            scratch=take.optional("scratch", int),
            upper=take.optional("upper", str),
            created=take("created", int),
            trace=take.optional("trace", str),
            prefetch=take.optional("prefetch", dict),
            raw=take.document,
        )


@dataclass(frozen=True, slots=True)
class RemovalInfo:
    """What removing a sandbox met.

    Attributes:
        id: the sandbox.
        existed: False when it was gone already.
        stopped: runs that were killed.
        holders: processes that still use its files, in words.
        raw: the whole answer.
        trace: that has ended with it; None: it wasn't being recorded.
    """

    id: str
    existed: bool
    stopped: tuple[str, ...]
    holders: tuple[str, ...]
    raw: Document
    trace: TraceInfo | None = None

    @classmethod
    def from_json(cls, document: object) -> RemovalInfo:
        take = _Taken(document, "removal")
        trace = take.optional("trace", dict)
        return cls(
            take("id", str),
            take("existed", bool),
            take.texts("stopped"),
            take.texts("holders"),
            take.document,
            None if trace is None else TraceInfo.from_json(trace),
        )


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """A trace that is being recorded.

    Attributes:
        sandbox: whose reads it has.
        name: of the trace.
        way: how they are seen: events of the kernel, or passthrough of a server that is read through.
        path: where it is written, until it ends.
        raw: the whole answer.
    """

    sandbox: str
    name: str
    way: str
    path: str
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> RecordingInfo:
        take = _Taken(document, "recording")
        return cls(take("sandbox", str), take("name", str), take("way", str), take("path", str), take.document)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A trace that has ended.

    Attributes:
        sandbox: whose reads it has.
        name: of the trace.
        path: of its file.
        accesses: ranges that were read.
        bytes: of these, each counted once.
        complete: False where its recorder ended before.
        raw: the whole answer.
    """

    sandbox: str
    name: str
    path: str
    accesses: int
    bytes: int
    complete: bool
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> TraceInfo:
        take = _Taken(document, "trace")
        return cls(
            sandbox=take("sandbox", str),
            name=take("name", str),
            path=take("path", str),
            accesses=take("accesses", int),
            bytes=take("bytes", int),
            complete=take("complete", bool),
            raw=take.document,
        )


@dataclass(frozen=True, slots=True)
class LeftoverInfo:
    """Something that a crash left: what kind of thing, where, and what was done about it."""

    kind: str
    path: str
    action: str
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> LeftoverInfo:
        take = _Taken(document, "leftover")
        return cls(take("kind", str), take("path", str), take("action", str), take.document)


@dataclass(frozen=True, slots=True)
class PinInfo:
    """An image that the cache keeps: its name, and the hex of its packs and metadata images."""

    name: str
    content: tuple[str, ...]
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> PinInfo:
        take = _Taken(document, "pin")
        return cls(take("name", str), take.texts("content"), take.document)


@dataclass(frozen=True, slots=True)
class StopInfo:
    """The service is stopping; ``killed`` are the processes, by pid, that used a sandbox which had to be unmounted."""

    killed: tuple[int, ...]
    raw: Document

    @classmethod
    def from_json(cls, document: object) -> StopInfo:
        take = _Taken(document, "stop")
        return cls(take.numbers("killed"), take.document)


def list_of(document: object, key: str, made: Callable[[object], T]) -> list[T]:
    """The items of the array that ``document`` has as ``key``.

    Raises:
        MalformedError: it has none.
    """
    return [made(item) for item in _Taken(document, "list")(key, list)]


def whole(document: object, key: str) -> int:
    """The integer that ``document`` has as ``key``.

    Raises:
        MalformedError: it has none.
    """
    value: int = _Taken(document, "number")(key, int)
    return value


class _Taken:
    """Fields of an answer. MalformedError where one is missing or of another type."""

    def __init__(self, document: object, what: str) -> None:
        if not isinstance(document, dict):
            raise MalformedError(f"answer of the node service: {what} is no object")
        self.document: dict[str, Any] = document
        self._what = what

    def __call__(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self.document.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MalformedError(
                f"answer of the node service: {self._what} has no proper {key}; is it of this release?"
            )
        return value

    def optional(self, key: str, kind: type) -> Any:
        return None if self.document.get(key) is None else self(key, kind)

    def numbers(self, key: str) -> tuple[int, ...]:
        return self._items(key, int)

    def texts(self, key: str) -> tuple[str, ...]:
        return self._items(key, str)

    def _items(self, key: str, kind: type[T]) -> tuple[T, ...]:
        values = self(key, list)
        if not all(isinstance(value, kind) for value in values):
            raise MalformedError(f"answer of the node service: {self._what} has no proper {key}")
        return tuple(values)

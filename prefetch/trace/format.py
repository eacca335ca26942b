"""The file of a trace: JSON lines, written as things happen, so that a crash keeps what was seen.

==========  ============================================================================================
line        fields
==========  ============================================================================================
the first   ``magic``, ``version``, ``incompatible``, ``compatible`` as in every document of ours;
            ``image``, ``manifest``, ``mode``, ``backend``, ``command``, ``started``, ``origin``;
            ``layers``: of each, bottom first, ``metadata`` and ``packs``, digests
access      ``at``, ``layer``, ``device``, ``offset``, ``length``; ``waited``, ``times``, ``comm``, ``path``,
            ``file_offset`` where they are known
wait        ``waited_from``, ``waited_until``
the last    ``ended``: how long the run took. Missing where the recording was cut off
==========  ============================================================================================

Times are whole microseconds since the recording began. ``layer`` counts ``layers`` from 0, ``device`` the layer's packs
from 1, as the device table does. ``offset`` and ``length`` are bytes of the raw pack, multiples of 4096.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, LimitError, MalformedError, UnsupportedError, about, printable
from layerstore.oci.document import dump, parse
from layerstore.pack.format import BLOCK_SIZE

MAGIC = "imgtool trace"
VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""The incompatible features that this release knows."""

TRACE_BYTES = 256 << 20
"""Largest trace that is read: two million accesses."""
HEADER_BYTES = 4 << 20
LINE_BYTES = 64 << 10
MAX_TIME = 1 << 53
"""Microseconds; more than any run takes, and what a JSON number holds exactly everywhere."""
MAX_PACK = 1 << 44
"""Bytes of a raw pack, as :mod:`layerstore.pack.stored` takes them."""


class Access(NamedTuple):
    """A range that was read.

    Attributes:
        at: when first, microseconds since the recording began.
        layer: counted from 0, bottom first.
        device: of the layer, counted from 1.
        offset: into the raw pack, bytes.
        length: bytes.
        waited: microseconds that readers waited for it because it wasn't on the node.
        times: how often it was read from the pack.
        comm: name of the program that read it first, at most 15 characters; empty if unknown.
        path: of the file that holds it, printable, without a leading slash; None if unknown.
        file_offset: where in the file it begins.
    """

    at: int
    layer: int
    device: int
    offset: int
    length: int
    waited: int = 0
    times: int = 1
    comm: str = ""
    path: str | None = None
    file_offset: int = 0

    @property
    def end(self) -> int:
        """Behind its last byte, in the pack."""
        return self.offset + self.length


class Wait(NamedTuple):
    """From when to when some reader waited, in microseconds; waits of several readers may overlap."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer by its identity: the digests of its metadata image and of its packs, in device order."""

    metadata: Digest
    packs: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is of.

    Attributes:
        layers: bottom first.
        image: name, as it was asked for.
        manifest: digest of the image, where it is a single one.
        mode: eager, lazy or direct; empty for an imported trace.
        backend: as for a sandbox.
        command: what was run, where that is known.
        started: RFC 3339, UTC.
        origin: ``recorded``, or the format that it was imported from.
    """

    layers: tuple[TracedLayer, ...]
    image: str = ""
    manifest: str | None = None
    mode: str = ""
    backend: str = ""
    command: tuple[str, ...] = ()
    started: str = ""
    origin: str = "recorded"

    def line(self) -> bytes:
        return _line(
            {
                "magic": MAGIC,
                "version": VERSION,
                "incompatible": [],
                "compatible": [],
                "image": self.image,
                "manifest": self.manifest,
                "mode": self.mode,
                "backend": self.backend,
                "command": list(self.command),
                "started": self.started,
                "origin": self.origin,
                "layers": [
                    {"metadata": str(layer.metadata), "packs": [str(pack) for pack in layer.packs]}
                    for layer in self.layers
                ],
            }
        )

    @classmethod
    def parse(cls, data: bytes, what: str) -> TraceHeader:
        """Raises MalformedError, UnsupportedError or LimitError."""
        document = parse(data, what, limit=HEADER_BYTES)
        if document.get("magic") != MAGIC:
            raise MalformedError(f"{what} is not a trace: its first line lacks the magic")
        version, incompatible = document.get("version"), document.get("incompatible")
        if type(version) is not int or version != VERSION:
            raise UnsupportedError(f"{what} has version {version!r}, this release reads {VERSION}")
        if not isinstance(incompatible, list) or set(map(str, incompatible)) - FEATURES:
            raise UnsupportedError(f"{what} needs features that this release lacks: {incompatible!r}")
        texts: dict[str, str] = {}
        for name in ("image", "mode", "backend", "started", "origin"):
            value = document.get(name, "")
            if not isinstance(value, str):
                raise MalformedError(f"{what}: {name} is no text")
            texts[name] = value
        manifest, command, layers = document.get("manifest"), document.get("command", []), document.get("layers")
        if manifest is not None and not isinstance(manifest, str):
            raise MalformedError(f"{what}: manifest is no text")
        if not isinstance(command, list) or not all(isinstance(item, str) for item in command):
            raise MalformedError(f"{what}: command is no list of texts")
        if not isinstance(layers, list):
            raise MalformedError(f"{what} names no layers")
        with about(what):
            traced = tuple(_layer(layer) for layer in layers)
        return cls(traced, manifest=manifest, command=tuple(command), **texts)


@dataclass(frozen=True, slots=True)
class Trace:
    """One run. ``accesses`` are in the order of their times; ``ended`` is None where the recording was cut off."""

    header: TraceHeader
    accesses: tuple[Access, ...]
    waits: tuple[Wait, ...] = ()
    ended: int | None = None
    unknown: Mapping[str, int] = field(default_factory=dict)
    """What was dropped while reading, and how often: lines that a crash cut, ranges of packs that the header lacks."""

    def lines(self) -> Iterable[bytes]:
        """The file."""
        yield self.header.line()
        for access in self.accesses:
            yield access_line(access)
        for wait in self.waits:
            yield wait_line(wait)
        if self.ended is not None:
            yield end_line(self.ended)


def access_line(access: Access) -> bytes:
    fields: dict[str, object] = {
        "at": access.at,
        "layer": access.layer,
        "device": access.device,
        "offset": access.offset,
        "length": access.length,
    }
    if access.waited:
        fields["waited"] = access.waited
    if access.times != 1:
        fields["times"] = access.times
    if access.comm:
        fields["comm"] = access.comm
    if access.path is not None:
        fields |= {"path": access.path, "file_offset": access.file_offset}
    return _line(fields)


def wait_line(wait: Wait) -> bytes:
    return _line({"waited_from": wait.start, "waited_until": wait.end})


def end_line(ended: int) -> bytes:
    return _line({"ended": ended})


def parse_trace(data: bytes, what: str) -> Trace:
    """Read a trace; ``what`` names it in messages.

    A last line that was cut is dropped, and so are ranges that no pack of the header can have.

    Raises:
        LimitError: larger than TRACE_BYTES.
        MalformedError: not a trace, or damaged before its last line.
        UnsupportedError: of another version.
    """
    if len(data) > TRACE_BYTES:
        raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {TRACE_BYTES}")
    start = data.find(b"\n") + 1 or len(data)
    header = TraceHeader.parse(data[:start], what)
    accesses: list[Access] = []
    waits: list[Wait] = []
    ended: int | None = None
    unknown: dict[str, int] = {}
    number = 1
    while start < len(data):
        end = data.find(b"\n", start)
        if end < 0:
            unknown["cut lines"] = 1
            break
        line, start, number = data[start:end], end + 1, number + 1
        here = f"{what}, line {number}"
        fields = parse(line, here, limit=LINE_BYTES)
        if "at" in fields:
            access = _access(fields, here)
            if access.layer < len(header.layers) and access.device <= len(header.layers[access.layer].packs):
                accesses.append(access)
            else:
                unknown["unknown packs"] = unknown.get("unknown packs", 0) + 1
        elif "waited_from" in fields:
            wait = Wait(*(_number(fields, name, MAX_TIME, here) for name in ("waited_from", "waited_until")))
            if wait.end < wait.start:
                raise MalformedError(f"{here}: a wait that ends before it begins")
            waits.append(wait)
        elif "ended" in fields:
            ended = _number(fields, "ended", MAX_TIME, here)
        else:
            unknown["unknown lines"] = unknown.get("unknown lines", 0) + 1
    accesses.sort(key=lambda access: access.at)
    waits.sort()
    return Trace(header, tuple(accesses), tuple(waits), ended, unknown)


def _access(fields: Mapping[str, object], what: str) -> Access:
    offset, length = (_number(fields, name, MAX_PACK, what) for name in ("offset", "length"))
    device = _number(fields, "device", 1 << 16, what)
    if offset % BLOCK_SIZE or length % BLOCK_SIZE or not length or offset + length > MAX_PACK or not device:
        raise MalformedError(f"{what}: {length} bytes at {offset} of device {device} are no blocks of a pack")
    comm, path = fields.get("comm", ""), fields.get("path")
    if not isinstance(comm, str) or not (path is None or isinstance(path, str)):
        raise MalformedError(f"{what}: comm and path have to be texts")
    return Access(
        _number(fields, "at", MAX_TIME, what),
        _number(fields, "layer", 1 << 16, what),
        device,
        offset,
        length,
        _number(fields, "waited", MAX_TIME, what, 0),
        _number(fields, "times", MAX_TIME, what, 1) or 1,
        comm,
        path,
        _number(fields, "file_offset", MAX_TIME, what, 0),
    )


def _number(fields: Mapping[str, object], name: str, most: int, what: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise MalformedError(f"{what}: {name} has to be a whole number of 0 to {most}")
    return value


def _layer(value: object) -> TracedLayer:
    if not isinstance(value, dict) or not isinstance(packs := value.get("packs"), list):
        raise MalformedError("a layer has to have metadata and packs")
    try:
        return TracedLayer(Digest.parse(value.get("metadata")), tuple(Digest.parse(pack) for pack in packs))
    except ImgtoolError as error:
        raise MalformedError(f"a layer: {error}") from error


def _line(fields: Mapping[str, object]) -> bytes:
    try:
        return dump(fields) + b"\n"
    except UnicodeEncodeError:  # arguments of a command and names of programs are bytes, which need not be UTF-8
        return dump(_encodable(fields)) + b"\n"


def _encodable(value: object) -> object:
    """The same with those texts as :func:`printable` shows them that aren't UTF-8."""
    if isinstance(value, Mapping):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return printable(value)
    return value

"""The document of a plan: one JSON object, made the same from the same traces, so that plans can be compared.

``ranges`` of a part are arrays of [device, offset, length, due, chance in ten-thousandths, path, file_offset]; the last
two are missing where no path is known. ``device`` counts the part's packs from 1; ``offset`` and ``length`` are bytes
of the raw pack, multiples of 4096; ``due`` is in microseconds from the start. They are sorted by due, device, offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, LimitError, MalformedError, UnsupportedError, about
from layerstore.oci.document import dump, parse, shown
from layerstore.pack.format import BLOCK_SIZE
from prefetch.trace.format import MAX_PACK, MAX_TIME

MAGIC = "imgtool plan"
VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""The incompatible features that this release knows."""
PLAN_MEDIA_TYPE = "application/vnd.imgtool.plan.v1+json"

PLAN_BYTES = 8 << 20
"""Largest plan that is read: a hundred thousand ranges, which load in a third of a second."""
CERTAIN = 10_000
"""The chance of what every run reads."""


class PlannedRange(NamedTuple):
    """Blocks of one pack.

    Attributes:
        device: of the part's packs, counted from 1.
        offset: into the raw pack, bytes.
        length: bytes.
        due: microseconds from the start after which the first runs need it.
        chance: that a run reads it, in ten-thousandths: 1 to CERTAIN.
        path: of the file that held it, printable, without a leading slash; None if unknown.
        file_offset: where in the file it began.
    """

    device: int
    offset: int
    length: int
    due: int
    chance: int = CERTAIN
    path: str | None = None
    file_offset: int = 0

    @property
    def end(self) -> int:
        """Behind its last byte, in the pack."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PlanPart:
    """What is planned of one layer.

    Attributes:
        metadata: the layer's identity.
        packs: of the layer, in device order.
        ranges: sorted by due, device and offset.
    """

    metadata: Digest
    packs: tuple[Digest, ...]
    ranges: tuple[PlannedRange, ...]

    @property
    def bytes(self) -> int:
        return sum(planned.length for planned in self.ranges)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch for a stack.

    Attributes:
        parts: of its layers, bottom first; layers of which nothing is planned have none.
        name: what it was trained as.
        image: name of the image whose runs it was learned from.
        manifest: digest of that image, where it was a single one.
        learned: how: at least ``learner`` and ``runs``; ``tried`` lists what else was, with its score.
        score: on runs that it was not trained on, by figure; empty if it was trained on all.
    """

    parts: tuple[PlanPart, ...]
    name: str = ""
    image: str = ""
    manifest: str | None = None
    learned: Mapping[str, object] = field(default_factory=dict)
    score: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {
            "magic": MAGIC,
            "version": VERSION,
            "incompatible": [],
            "compatible": [],
            "name": self.name,
            "image": self.image,
            "manifest": self.manifest,
            "learned": dict(self.learned),
            "score": dict(self.score),
            "parts": [
                {
                    "metadata": str(part.metadata),
                    "packs": [str(pack) for pack in part.packs],
                    "ranges": [list(planned if planned.path is not None else planned[:5]) for planned in part.ranges],
                }
                for part in self.parts
            ],
        }

    def to_bytes(self) -> bytes:
        return dump(self.to_json()) + b"\n"

    @property
    def digest(self) -> Digest:
        return Digest.of(self.to_bytes())


def number(value: object) -> float | None:
    """A figure of a score, whoever wrote it; None for what is no number, or none that anything comes to."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MAX_TIME:
        return None
    return float(value)


def encode_plan(plan: Plan, what: str) -> bytes:
    """The document of a plan that others are to read; ``what`` names it in messages.

    Raises:
        LimitError: it is larger than readers take.
        MalformedError: it is none that readers take, such as one with two parts of a layer.
    """
    data = plan.to_bytes()
    parse_plan(data, what)
    return data


def order(ranges: Iterable[PlannedRange]) -> tuple[PlannedRange, ...]:
    """Ranges as a part has them: the same for the same ranges, however they came."""
    return tuple(sorted(ranges, key=_place))


def _place(planned: PlannedRange) -> tuple[int, int, int, int, int, str, int]:
    device, offset, length, due, chance, path, file_offset = planned
    return due, device, offset, length, chance, path or "", file_offset


def parse_plan(data: bytes, what: str) -> Plan:
    """Read a plan; ``what`` names it in messages.

    Raises:
        LimitError: larger than PLAN_BYTES.
        MalformedError: not a plan, or damaged.
        UnsupportedError: of another version, or with a feature that isn't known.
    """
    if len(data) > PLAN_BYTES:
        raise LimitError(f"{what} has {len(data)} bytes, more than the limit of {PLAN_BYTES}")
    document = parse(data, what, limit=PLAN_BYTES)
    if document.get("magic") != MAGIC:
        raise MalformedError(f"{what} is not a plan: it lacks the magic")
    version, incompatible = document.get("version"), document.get("incompatible")
    if type(version) is not int or version != VERSION:
        raise UnsupportedError(f"{what} has version {shown(repr(version))}, this release reads {VERSION}")
    if not isinstance(incompatible, list) or set(map(str, incompatible)) - FEATURES:
        raise UnsupportedError(f"{what} needs features that this release lacks: {shown(repr(incompatible))}")
    name, image, manifest = document.get("name", ""), document.get("image", ""), document.get("manifest")
    if not isinstance(name, str) or not isinstance(image, str) or not (manifest is None or isinstance(manifest, str)):
        raise MalformedError(f"{what}: name, image and manifest have to be texts")
    learned, score, parts = document.get("learned", {}), document.get("score", {}), document.get("parts")
    if not isinstance(learned, dict) or not isinstance(score, dict) or not isinstance(parts, list):
        raise MalformedError(f"{what}: learned and score have to be objects, and parts a list")
    with about(what):
        planned = tuple(map(_part, parts))
        if len({part.metadata for part in planned}) != len(planned):
            raise MalformedError("two of its parts are of one layer")
        return Plan(planned, name, image, manifest, learned, score)


def _part(value: object) -> PlanPart:
    if not isinstance(value, dict):
        raise MalformedError("a part is no object")
    packs, ranges = value.get("packs"), value.get("ranges")
    if not isinstance(packs, list) or not isinstance(ranges, list):
        raise MalformedError("a part has to have packs and ranges")
    metadata, known = _digest(value.get("metadata")), tuple(map(_digest, packs))
    return PlanPart(metadata, known, order(_range(each, len(known)) for each in ranges))


def _digest(value: object) -> Digest:
    try:
        return Digest.parse(value)
    except ImgtoolError as error:
        raise MalformedError(f"a part has {shown(str(value))} where a digest belongs") from error


def _range(value: object, devices: int) -> PlannedRange:
    if not isinstance(value, list) or len(value) not in (5, 7):
        raise MalformedError("a range has 5 or 7 fields")
    numbers = value[:5] + value[6:]
    if not all(type(number) is int and 0 <= number <= MAX_TIME for number in numbers):
        raise MalformedError("the numbers of a range have to be whole, and not negative")
    device, offset, length, _, chance = value[:5]
    if not 1 <= device <= devices or not 1 <= chance <= CERTAIN:
        raise MalformedError(f"a range of device {device} with a chance of {chance}: there is no such thing")
    if offset % BLOCK_SIZE or length % BLOCK_SIZE or not length or offset + length > MAX_PACK:
        raise MalformedError(f"a range of {length} bytes at {offset}: these are no blocks of a pack")
    if len(value) == 7 and not isinstance(value[5], str):
        raise MalformedError("the path of a range is no text")
    return PlannedRange(*value)

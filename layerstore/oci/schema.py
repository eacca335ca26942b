"""JSON Schemas of the OCI documents that are read, after image-spec 1.1.

They are about structure. Two liberties, both taken because documents in the field need them: null stands for an
absent optional field (Go writes nil slices and maps that way), and unknown fields are allowed everywhere, as the
specification demands. :meth:`layerstore.oci.descriptor.Descriptor.parse` checks the same of descriptors by hand,
because it also runs where importing jsonschema would be most of the work; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from layerstore.errors import MalformedError
from layerstore.oci.descriptor import SIZE_LIMIT
from layerstore.oci.document import kind_of, shown

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_TEXT = {"type": ["string", "null"]}
_TEXTS = {"type": ["array", "null"], "items": {"type": "string"}}
_ANNOTATIONS = {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
_PLATFORM = {
    "type": ["object", "null"],
    "properties": {
        "os": _TEXT,
        "architecture": _TEXT,
        "variant": _TEXT,
        "os.version": _TEXT,
        "os.features": _TEXTS,
    },
}
_DESCRIPTOR: dict[str, Any] = {
    "type": "object",
    "required": ["mediaType", "digest", "size"],
    "properties": {
        "mediaType": {"type": "string", "minLength": 1},
        "digest": {"type": "string", "pattern": "^[a-z0-9]+([.+_-][a-z0-9]+)*:[a-zA-Z0-9=_-]+$"},
        "size": {"type": "integer", "minimum": 0, "exclusiveMaximum": SIZE_LIMIT},
        "annotations": _ANNOTATIONS,
        "urls": _TEXTS,
        "data": _TEXT,
        "artifactType": _TEXT,
    },
}
_COMMON = {
    "schemaVersion": {"const": 2},
    "mediaType": _TEXT,
    "artifactType": _TEXT,
    "subject": {"anyOf": [{"type": "null"}, _DESCRIPTOR]},
    "annotations": _ANNOTATIONS,
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "descriptor": _DESCRIPTOR,
    "platform": _PLATFORM,
    "manifest": {
        "type": "object",
        "required": ["schemaVersion", "config", "layers"],
        "properties": {
            **_COMMON,
            "config": _DESCRIPTOR,
            "layers": {"type": ["array", "null"], "items": _DESCRIPTOR},
        },
    },
    "index": {
        "type": "object",
        "required": ["schemaVersion", "manifests"],
        "properties": {
            **_COMMON,
            "manifests": {
                "type": ["array", "null"],
                "items": {**_DESCRIPTOR, "properties": {**_DESCRIPTOR["properties"], "platform": _PLATFORM}},
            },
        },
    },
}


def validate(kind: str, document: Any, what: str) -> None:
    """Check ``document`` against one of :data:`SCHEMAS`.

    Raises:
        MalformedError: naming the first place that breaks it, such as ``layers[2].size``.
    """
    for error in _validator(kind).iter_errors(document):
        # The branch that says null is never the interesting one.
        deepest = max(error.context or [error], key=lambda e: len(e.absolute_path))
        place = what + _path(deepest.absolute_path)
        raise MalformedError(f"{place} {_complaint(str(deepest.validator), deepest.validator_value, deepest.instance)}")


def _path(steps: Iterable[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{shown(step)[1:-1]}" for step in steps)
    return f": {text.removeprefix('.')}" if text else ""


def _complaint(keyword: str, value: Any, instance: Any) -> str:
    match keyword:
        case "required":
            missing = next(name for name in value if name not in instance)
            return f"has no {missing!r}"
        case "type":
            wanted = value if isinstance(value, str) else value[0]
            return f"is {kind_of(instance)} where {'an' if wanted[0] in 'aeiou' else 'a'} {wanted} belongs"
        case "const":
            return f"is {shown(str(instance))} and has to be {value!r}"
        case "minimum" | "exclusiveMaximum":
            return f"is out of range: {str(instance)[:40]}"
        case "minLength":
            return "is empty"
        case _:
            return f"is not valid: {shown(str(instance))}"


@cache
def _validator(kind: str) -> Validator:
    # Imported late: it takes longer than everything else that most commands do.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    # JSON Schema calls 1.0 an integer. Here it is a fraction, as for every Go reader.
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = extend(Draft202012Validator, type_checker=checker)  # type: ignore[no-untyped-call]
    validator: Validator = strict(SCHEMAS[kind])
    return validator

"""JSON Schemas of OCI documents, after image-spec 1.1: what the parsers of layerstore.oci are held against.

Two liberties, as in the parsers: null stands for an absent optional field (Go writes nil slices and maps that way), and
unknown fields are allowed everywhere, as the specification demands. What a schema can't say, such as the length of a
digest, is not here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import extend

SIZE_LIMIT = 1 << 63  # int64

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


def is_valid(kind: str, document: Any) -> bool:
    """Whether ``document`` fits one of :data:`SCHEMAS`."""
    return _validator(kind).is_valid(document)


@cache
def _validator(kind: str) -> Validator:
    # JSON Schema calls 1.0 an integer. Here it is a fraction, as for every Go reader.
    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = extend(Draft202012Validator, type_checker=checker)  # type: ignore[no-untyped-call]
    validator: Validator = strict(SCHEMAS[kind])
    return validator

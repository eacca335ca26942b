"""Descriptors: what OCI documents use to point at bytes (image-spec 1.1, descriptor.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerstore.digest import Digest


@dataclass(frozen=True, slots=True)
class Descriptor:
    """``size`` bytes named ``digest``; the media type says what they mean. Unknown fields live in ``extra``."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Keys in the order of the specification; annotations sorted; empty ones left out."""
        document: dict[str, object] = {
            "mediaType": self.media_type,
            "digest": str(self.digest),
            "size": self.size,
        }
        document.update(self.extra)
        if self.annotations:
            document["annotations"] = dict(sorted(self.annotations.items()))
        return document

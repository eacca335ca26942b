"""Platforms: which of an index's images is meant (image-spec 1.1, image-index.md).

Values are normalised when they are made, by containerd's rules: ``x86_64`` is amd64, ``aarch64`` is arm64,
``arm64/v8`` is arm64, ``arm`` is arm/v7. A request accepts what such a machine can run and ranks it: the same
variant first, then lower ones downwards (arm/v7 takes v6 and v5, arm64/v9 takes v8, amd64/v3 takes v2 and plain).
Other architectures are never taken instead: containerd gives 386 to who asks for amd64 and arm/v7 for arm64, but a
conversion that silently changes its architecture is a wrong one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from layerstore.errors import MalformedError, UsageError
from layerstore.oci.document import kind_of, shown

_ARCHITECTURES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "i386": "386",
    "i686": "386",
    "aarch64": "arm64",
    "loongarch64": "loong64",
}
_ARM_ALIASES = {"armhf": "v7", "armv7l": "v7", "armv8l": "v7", "armel": "v6", "armv6l": "v6", "armv5tel": "v5"}
_NUMBERED_ARCHITECTURES = frozenset({"amd64", "arm", "arm64"})
_DEFAULT_VERSION = {"amd64": (1, 0), "arm": (7, 0), "arm64": (8, 0)}
_VARIANT = re.compile(r"v?([0-9]{1,3})(?:\.([0-9]{1,3}))?")
_COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")
_OS = re.compile(r"([A-Za-z0-9_.-]+)(?:\(([^()/+]*)((?:\+[^()/+]+)*)\))?")


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system on a kind of processor, in normal form; an empty string is "not said"."""

    os: str
    architecture: str
    variant: str = ""
    os_version: str = ""
    os_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        system = self.os.lower()
        architecture, variant = self.architecture.lower(), self.variant.lower()
        if architecture in _ARM_ALIASES:
            architecture, variant = "arm", _ARM_ALIASES[architecture]
        architecture = _ARCHITECTURES.get(architecture, architecture)
        if architecture in _NUMBERED_ARCHITECTURES:
            variant = _normal_variant(architecture, variant)
        object.__setattr__(self, "os", {"macos": "darwin"}.get(system, system))
        object.__setattr__(self, "architecture", architecture)
        object.__setattr__(self, "variant", variant)
        object.__setattr__(self, "os_features", tuple(sorted(set(self.os_features))))

    @classmethod
    def parse(cls, text: str) -> Platform:
        """``os/architecture[/variant]`` as given to ``--platform``; the OS may be ``os(version+feature…)``.

        Raises:
            UsageError: anything else.
        """
        parts = text.split("/")
        system = _OS.fullmatch(parts[0])
        if len(parts) not in (2, 3) or not system or not all(_COMPONENT.fullmatch(part) for part in parts[1:]):
            raise UsageError(f"not a platform: {shown(text)}; write os/architecture[/variant], such as linux/arm64/v8")
        features = tuple(feature for feature in (system[3] or "").split("+") if feature)
        return cls(system[1], parts[1], parts[2] if len(parts) == 3 else "", system[2] or "", features)

    @classmethod
    def from_json(cls, document: object, what: str) -> Platform:
        """The ``platform`` of a descriptor, or an image config, which has the same fields; null counts as absent.

        Raises:
            MalformedError: a field has the wrong type.
        """
        if not isinstance(document, dict):
            raise MalformedError(f"{what} is {kind_of(document)} where a platform belongs")
        names = ("os", "architecture", "variant", "os.version")
        system, architecture, variant, version = (_text(document, name, what) for name in names)
        features = document.get("os.features")
        if features is None:
            features = []
        if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
            raise MalformedError(f"{what}: 'os.features' is not an array of strings")
        return cls(system, architecture, variant, version, tuple(features))

    @property
    def is_unknown(self) -> bool:
        """``unknown/unknown``: BuildKit's mark on attestations, so that nobody picks them."""
        return self.os == "unknown" and self.architecture == "unknown"

    def rank(self, offered: Platform) -> tuple[int, int] | None:
        """How well ``offered`` serves this request: None for not at all, else greater is better.

        An offer that needs an OS feature which the request doesn't name is no match; an OS version counts only
        when the request names one.
        """
        if (offered.os, offered.architecture) != (self.os, self.architecture):
            return None
        if not set(offered.os_features) <= set(self.os_features):
            return None
        if self.os_version and offered.os_version != self.os_version:
            return None
        wanted, given = self._version(), offered._version()
        if wanted is None or given is None:
            return (0, 0) if self.variant == offered.variant else None
        if self.architecture == "arm64" and wanted[0] == 9 and given[0] == 8:
            # v9.x is a superset of v8.(x+5): Arm ARM, "Armv9-A" overview.
            return given if given[1] <= wanted[1] + 5 else None
        if self.architecture == "arm64" and given[0] != wanted[0]:
            return None
        return given if given <= wanted else None

    def _version(self) -> tuple[int, int] | None:
        """The variant as a number that can be compared; None where variants are just names."""
        if self.architecture not in _NUMBERED_ARCHITECTURES:
            return None
        if not self.variant:
            return _DEFAULT_VERSION[self.architecture]
        match = _VARIANT.fullmatch(self.variant)
        return (int(match[1]), int(match[2] or 0)) if match else None

    def __str__(self) -> str:
        system = self.os or "?"
        if self.os_version or self.os_features:
            system += f"({self.os_version}{''.join('+' + feature for feature in self.os_features)})"
        text = "/".join(part for part in (system, self.architecture or "?", self.variant) if part)
        return shown(text)[1:-1]


def host() -> Platform:
    """This machine's platform, without a variant except for 32-bit ARM."""
    name = os.uname()
    return Platform(name.sysname, name.machine)


def _normal_variant(architecture: str, variant: str) -> str:
    match = _VARIANT.fullmatch(variant) if variant else None
    if variant and not match:
        return variant
    version = (int(match[1]), int(match[2] or 0)) if match else _DEFAULT_VERSION[architecture]
    if architecture != "arm" and version == _DEFAULT_VERSION[architecture]:
        return ""
    return f"v{version[0]}.{version[1]}" if version[1] else f"v{version[0]}"


def _text(document: Mapping[str, object], name: str, what: str) -> str:
    value = document.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedError(f"{what}: {name!r} is {kind_of(value)} where a string belongs")
    return value

"""Media types of OCI and Docker documents and layers, and what they claim.

A layer's media type says that it is a tar; how it is compressed is decided by its first bytes, because the claim is
often wrong: ``docker save`` makes none, and BuildKit pushes zstd under Docker's gzip type.
"""

from __future__ import annotations

import re

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"

INDEXES = frozenset({OCI_INDEX, DOCKER_LIST})
MANIFESTS = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
CONFIGS = frozenset({OCI_CONFIG, DOCKER_CONFIG})
SCHEMA1 = frozenset(
    {
        "application/vnd.docker.distribution.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
    }
)

VAGUE = frozenset({"", "application/json", "application/octet-stream", "text/plain", "binary/octet-stream"})
"""What servers say when they don't know; it contradicts nothing."""

_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.(?:nondistributable\.)?v1\.tar"
    r"|docker\.image\.rootfs\.(?:foreign\.)?diff\.tar)(?:[.+]([a-z0-9]+))?"
)
_FOREIGN = re.compile(r"application/vnd\.(oci\.image\.layer\.nondistributable|docker\.image\.rootfs\.foreign)\.")


def is_layer(media_type: str) -> bool:
    """Whether it claims to be a tar layer, compressed in whatever way."""
    return _LAYER.fullmatch(media_type) is not None


def is_foreign(media_type: str) -> bool:
    """Whether it claims to be had elsewhere, under ``urls``."""
    return _FOREIGN.match(media_type) is not None


def is_encrypted(media_type: str) -> bool:
    return media_type.endswith(("+encrypted", "+enc"))


def compression(media_type: str) -> str:
    """The claimed compression of a layer: ``gzip``, ``zstd``, …; empty for a plain tar."""
    match = _LAYER.fullmatch(media_type)
    return match[1] or "" if match else ""


def layer_type(compression: str) -> str:
    """The OCI media type of a tar layer with this compression."""
    return f"{OCI_LAYER}+{compression}" if compression else OCI_LAYER


def normal(media_type: str) -> str:
    """Without parameters, and in lower case: ``Content-Type: Application/JSON; charset=utf-8``."""
    return media_type.partition(";")[0].strip().lower()

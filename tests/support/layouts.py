"""Builders of OCI layouts and docker archives, valid unless told otherwise, the same bytes each time.

::

    layout = Layout(tmp_path / "oci")
    layout.image([tar_of({"etc/": None, "etc/hosts": b"…"})], tag="v1")
    name = layout.name("v1")                       # "oci:…/oci:v1"
    archive = layout.archive(tmp_path / "oci.tar", compression="zstd")
    docker_archive(tmp_path / "docker.tar", [Saved([tar], tags=["debian:12"])])
"""

from __future__ import annotations

import bz2
import copy
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

Json = dict[str, Any]

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
REF_NAME = "org.opencontainers.image.ref.name"

LINUX_AMD64 = {"architecture": "amd64", "os": "linux"}
ATTESTATION = {
    "platform": {"architecture": "unknown", "os": "unknown"},
    "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
}


def tar_of(entries: Mapping[str, bytes | str | None]) -> bytes:
    """A plain tar: bytes are files, a name that ends in a slash a directory, ``"-> target"`` a symbolic link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in entries.items():
            member = tarfile.TarInfo(name.rstrip("/"))
            member.mode = 0o755 if name.endswith("/") else 0o644
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type = tarfile.SYMTYPE
                member.linkname = content.removeprefix("-> ")
            data = content if isinstance(content, bytes) else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def compress(data: bytes, compression: str) -> bytes:
    """Compress by the name that media types use; "" is not at all."""
    match compression:
        case "":
            return data
        case "gzip":
            return gzip.compress(data, 6, mtime=0)
        case "zstd":
            return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
        case "xz":
            return lzma.compress(data)
        case "bzip2":
            return bz2.compress(data)
    raise ValueError(compression)


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def encode(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def config_of(diff_ids: Sequence[str], **fields: Any) -> Json:
    """An image config for linux/amd64; a field given as None is left out."""
    config: Json = {
        **LINUX_AMD64,
        "config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        **fields,
    }
    return {name: value for name, value in config.items() if value is not None}


@dataclass(frozen=True)
class Layer:
    """A stored layer."""

    descriptor: Json
    diff_id: str
    data: bytes


class Layout:
    """A layout directory under construction; index.json is always up to date."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Json] = []
        path.mkdir(parents=True)
        (path / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')
        self._write_index()

    def name(self, tag: str | None = None) -> str:
        return f"oci:{self.path}" + (f":{tag}" if tag is not None else "")

    def blob(self, data: bytes, media_type: str, algorithm: str = "sha256", **fields: Any) -> Json:
        """Store bytes; returns their descriptor."""
        digest = digest_of(data, algorithm)
        path = self.blob_path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **fields}

    def blob_path(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        return self.path / "blobs" / algorithm / value

    def layer(
        self, tar: bytes, compression: str = "gzip", *, media_type: str | None = None, algorithm: str = "sha256"
    ) -> Layer:
        """Store a layer; ``media_type`` may say what it isn't."""
        if media_type is None:
            media_type = f"{OCI_LAYER}+{compression}" if compression else OCI_LAYER
        data = compress(tar, compression)
        return Layer(self.blob(data, media_type, algorithm), digest_of(tar, algorithm), data)

    def image(
        self,
        layers: Sequence[bytes | Layer],
        *,
        tag: str | None = None,
        listed: bool = True,
        config: Mapping[str, Any] | None = None,
        config_type: str = OCI_CONFIG,
        manifest: Mapping[str, Any] | None = None,
        algorithm: str = "sha256",
        platform: Mapping[str, Any] | None = None,
    ) -> Json:
        """Store an image; returns the descriptor of its manifest.

        Args:
            layers: tars, to be stored with gzip, or stored layers; lowest first.
            tag: adds it to index.json under this name.
            listed: adds it to index.json even without a tag.
            config: fields to replace in the config; None takes one out.
            config_type: media type of the config.
            manifest: the same for the manifest.
            algorithm: of the digests of config and manifest.
            platform: of the descriptor.
        """
        stored = [item if isinstance(item, Layer) else self.layer(item) for item in layers]
        document = config_of([layer.diff_id for layer in stored], **(config or {}))
        body: Json = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": self.blob(encode(document), config_type, algorithm),
            "layers": [layer.descriptor for layer in stored],
            **(manifest or {}),
        }
        body = {name: value for name, value in body.items() if value is not None}
        descriptor = self.blob(encode(body), body.get("mediaType", OCI_MANIFEST), algorithm)
        if platform is not None:
            descriptor["platform"] = dict(platform)
        if listed or tag is not None:
            self.add(descriptor, tag)
        return descriptor

    def attestation(self, subject: Json) -> Json:
        """Store an attestation as BuildKit makes them; returns its descriptor, which no index lists yet."""
        layer = Layer(self.blob(b'{"_type":"statement"}', "application/vnd.in-toto+json"), digest_of(b"{}"), b"")
        descriptor = self.image([layer], listed=False, config={"architecture": "unknown", "os": "unknown"})
        extra = copy.deepcopy(ATTESTATION)
        extra["annotations"]["vnd.docker.reference.digest"] = subject["digest"]
        return {**descriptor, **extra}

    def index(
        self, entries: Sequence[Json], *, tag: str | None = None, listed: bool = True, media_type: str = OCI_INDEX
    ) -> Json:
        """Store an index of these descriptors."""
        body = encode({"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)})
        descriptor = self.blob(body, media_type)
        if listed or tag is not None:
            self.add(descriptor, tag)
        return descriptor

    def add(self, descriptor: Json, tag: str | None = None) -> None:
        """Add an entry to index.json."""
        entry = copy.deepcopy(descriptor)
        if tag is not None:
            entry.setdefault("annotations", {})[REF_NAME] = tag
        self.entries.append(entry)
        self._write_index()

    def archive(self, path: Path, *, compression: str = "") -> Path:
        """Pack the layout; returns ``path``."""
        files = sorted(file for file in self.path.rglob("*") if file.is_file())
        path.write_bytes(
            compress(tar_of({str(file.relative_to(self.path)): file.read_bytes() for file in files}), compression)
        )
        return path

    def _write_index(self) -> None:
        (self.path / "index.json").write_bytes(encode({"schemaVersion": 2, "manifests": self.entries}))


@dataclass
class Saved:
    """An image for a docker archive. ``layers`` are tars; ``compression`` is that of all of them."""

    layers: Sequence[bytes]
    tags: Sequence[str] | None = None
    compression: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def docker_archive(
    path: Path,
    images: Sequence[Saved],
    *,
    style: str = "id",
    compression: str = "",
    extra: Mapping[str, bytes | str | None] | None = None,
) -> Path:
    """Write a docker archive; returns ``path``.

    Args:
        path: where to.
        images: what to put in.
        style: how layers are named. "id": ``ID/layer.tar``, the second and later uses of a layer being symbolic links,
            as Docker did; "flat": ``HEX.tar`` as skopeo does; "blobs": ``blobs/sha256/HEX`` as Docker 25 does.
        compression: of the archive.
        extra: more members, or the same ones with other content; None takes one out.
    """
    members: dict[str, bytes | str | None] = {}
    manifest = []
    for number, image in enumerate(images):
        names: list[str] = []
        for depth, tar in enumerate(image.layers):
            data = compress(tar, image.compression)
            names.append(_layer_name(members, data, style, f"{number:032x}{depth:032x}"))
        config = encode(config_of([digest_of(tar) for tar in image.layers], **image.config))
        value = digest_of(config).partition(":")[2]
        config_name = f"blobs/sha256/{value}" if style == "blobs" else f"{value}.json"
        members[config_name] = config
        tags = list(image.tags) if image.tags is not None else None
        manifest.append({"Config": config_name, "RepoTags": tags, "Layers": names})
    members["manifest.json"] = encode(manifest)
    members.update(extra or {})
    kept = {name: content for name, content in members.items() if content is not None or name.endswith("/")}
    path.write_bytes(compress(tar_of(kept), compression))
    return path


def _layer_name(members: dict[str, bytes | str | None], data: bytes, style: str, identifier: str) -> str:
    value = digest_of(data).partition(":")[2]
    if style != "id":
        name = f"blobs/sha256/{value}" if style == "blobs" else f"{value}.tar"
        members[name] = data
        return name
    name = f"{identifier}/layer.tar"
    twin = next((known for known, content in members.items() if content == data), None)
    members[f"{identifier}/"] = None
    members[f"{identifier}/VERSION"] = b"1.0"
    members[name] = data if twin is None else f"-> ../{twin}"
    return name

"""An OCI image layout (image-spec 1.1) that layers and tags are added to."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_TAG = "org.opencontainers.image.ref.name"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
ENVIRONMENT = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)


@dataclass(frozen=True)
class Layer:
    """One gzip layer: ``digest`` and ``size`` of the blob, ``diff_id`` of the tar in it."""

    digest: str
    size: int
    diff_id: str
    created_by: str


class Layout:
    """The layout in ``directory``, made when it is not there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs" / "sha256"
        self.blobs.mkdir(parents=True, exist_ok=True)
        self._write("oci-layout", {"imageLayoutVersion": "1.0.0"})
        if not (directory / "index.json").exists():
            self._write_index([])

    def tags(self) -> dict[str, dict[str, Any]]:
        """Manifest descriptors by tag."""
        index = json.loads((self.directory / "index.json").read_bytes())
        return {descriptor["annotations"][_TAG]: descriptor for descriptor in index["manifests"]}

    def layers(self, tag: str) -> tuple[Layer, ...]:
        manifest = json.loads(self._blob(self.tags()[tag]["digest"]).read_bytes())
        config = json.loads(self._blob(manifest["config"]["digest"]).read_bytes())
        return tuple(
            Layer(descriptor["digest"], descriptor["size"], diff_id, history["created_by"])
            for descriptor, diff_id, history in zip(
                manifest["layers"], config["rootfs"]["diff_ids"], config["history"], strict=True
            )
        )

    def add_layer(self, tar_command: list[str], created_by: str) -> Layer:
        """The output of ``tar_command`` through ``gzip -6``."""
        diff_id = hashlib.sha256()
        partial = self.blobs / ".partial"
        with partial.open("wb") as blob:
            tar = subprocess.Popen(tar_command, stdout=subprocess.PIPE)
            gzip = subprocess.Popen(["gzip", "-6", "-n"], stdin=subprocess.PIPE, stdout=blob)
            assert tar.stdout is not None and gzip.stdin is not None
            while block := tar.stdout.read(1 << 20):
                diff_id.update(block)
                gzip.stdin.write(block)
            gzip.stdin.close()
            if tar.wait() or gzip.wait():
                raise SystemExit(f"{' '.join(tar_command[:4])} … | gzip failed for {created_by}")
        with partial.open("rb") as blob:
            digest = hashlib.file_digest(blob, "sha256").hexdigest()
        size = partial.stat().st_size
        partial.rename(self.blobs / digest)
        return Layer(f"sha256:{digest}", size, f"sha256:{diff_id.hexdigest()}", created_by)

    def tag(self, name: str, layers: tuple[Layer, ...], **run: Any) -> None:
        """Point ``name`` at an image of these layers; ``run`` goes into the config (Cmd, WorkingDir, User …)."""
        machine = os.uname().machine
        config = {
            "architecture": _MACHINES.get(machine, machine),
            "os": "linux",
            "config": {"Env": list(ENVIRONMENT), "Cmd": ["/bin/sh"], **run},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created_by": layer.created_by} for layer in layers],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._add_json(config, _CONFIG),
            "layers": [{"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in layers],
        }
        tags = self.tags()
        tags[name] = {**self._add_json(manifest, _MANIFEST), "annotations": {_TAG: name}}
        self._write_index([tags[tag] for tag in sorted(tags)])

    def _blob(self, digest: str) -> Path:
        return self.blobs / digest.removeprefix("sha256:")

    def _add_json(self, document: dict[str, Any], media_type: str) -> dict[str, Any]:
        content = json.dumps(document, separators=(",", ":")).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._blob(digest).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        self._write("index.json", {"schemaVersion": 2, "manifests": manifests})

    def _write(self, name: str, document: dict[str, Any]) -> None:
        partial = self.directory / f".{name}"
        partial.write_text(json.dumps(document))
        partial.rename(self.directory / name)

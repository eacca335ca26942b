"""A node: one root directory with a cache and sandboxes. Brings a published image to where it can be mounted."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerstore.cache.metadata import MetadataCache
from layerstore.cache.packs import PackCache
from layerstore.digest import Digest
from layerstore.errors import os_errors
from layerstore.image import find_target, parse_image, read_document
from layerstore.oci.config import ImageConfig
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store
from layerstore.version import FORMAT_VERSION, VERSION
from overlay.layers import Leftover, MountableLayer
from overlay.sandbox import Sandbox, Sandboxes
from prefetch.fetch import Fetched, fetch
from prefetch.plan import plan_eager


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image whose layers are on the node, so that sandboxes of it start without the store.

    Attributes:
        name: as it was asked for.
        manifest: its digest.
        layers: bottom first.
        config: how its programs are run.
        fetched: what had to be taken from the store.
    """

    name: str
    manifest: Digest
    layers: tuple[MountableLayer, ...]
    config: ImageConfig
    fetched: Fetched

    @property
    def identity(self) -> Mapping[str, object]:
        return {"name": self.name, "manifest": str(self.manifest)}


class Node:
    """``root`` holds ``cache/``, ``layers/`` and ``sandboxes/``; several processes may use it at once."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.metadata = MetadataCache(os.path.join(root, "cache", "meta"))
        self.packs = PackCache(os.path.join(root, "cache", "packs"))
        self.sandboxes = Sandboxes(root)

    def prepare(self, store: Store, name: str, *, jobs: int = 2, progress: Progress = SILENT) -> ReadyImage:
        """Fetch and verify everything that image ``name`` needs and the cache lacks (mode eager).

        Raises:
            NotFoundError: no such image, or a blob of it is missing.
            CorruptError: something in the store isn't what its digest says; it is not in the cache then.
        """
        target = find_target(store, name)
        image = parse_image(read_document(store, target, f"manifest of {name!r}"))
        what = f"config of {name!r}"
        config = ImageConfig.parse(read_document(store, image.config, what), what)
        paths = [self.metadata.ensure(layer, store) for layer in image.layers]
        plan = plan_eager(image.layers, store, self.metadata, self.packs)
        fetched = fetch(plan, store, self.packs, jobs=jobs, progress=progress) if plan else Fetched()
        layers = tuple(
            MountableLayer(
                layer.metadata.hex,
                path,
                tuple(self.packs.data_path(pack) for pack in layer.packs),
            )
            for layer, path in zip(image.layers, paths, strict=True)
        )
        return ReadyImage(name, target.digest, layers, config, fetched)

    def up(
        self,
        image: ReadyImage,
        *,
        id: str | None = None,
        read_only: bool = False,
        scratch: int | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Sandbox:
        """Make a sandbox of an image that is ready. See :meth:`Sandboxes.create` for what it raises."""
        return self.sandboxes.create(
            image.layers,
            image=image.identity,
            mode="eager",
            id=id,
            read_only=read_only,
            scratch=scratch,
            receipt={**receipt(image), **(extra or {})},
        )

    def recover(self) -> list[Leftover]:
        """Clear what crashes left: see :meth:`Sandboxes.recover`, and unfinished files of the cache."""
        found = self.sandboxes.recover()
        with os_errors(f"clear {self.root}/cache"):
            freed = self.metadata.reclaim() + self.packs.reclaim()
        if freed:
            found.append(Leftover("unfinished files", f"{self.root}/cache", f"removed, {freed} bytes"))
        return found


def receipt(image: ReadyImage) -> dict[str, object]:
    """What has to be known to trust a sandbox, and to make the same one again."""
    return {
        "manifest": str(image.manifest),
        "layers": _prefixed([layer.digest for layer in image.layers]),
        "mode": "eager",
        "backend": "file-backed erofs",
        "verified": "every frame by sha256 before it entered the cache; the metadata image by digest and structure",
        "kernel": platform.release(),
        "imgtool": VERSION,
        "format_version": FORMAT_VERSION,
        "fetched_bytes": image.fetched.compressed,
        "fetched_requests": image.fetched.requests,
    }


def _prefixed(hexes: Sequence[str]) -> list[str]:
    return [f"sha256:{digest}" for digest in hexes]

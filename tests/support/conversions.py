"""A directory store, sources beside it, conversions between them, and what can be read back.

::

    site = Site(tmp_path)
    report = site.convert(site.tar(file("a", b"x")), tag="a")      # a layer archive
    report = site.convert(site.image([tar(...), tar(...)]))         # an OCI layout of these layers
    site.rows(report)[b"a"]                                         # all that is visible of it, content included
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from layerstore.convert import Conversion, Report, convert
from layerstore.digest import Digest
from layerstore.image import Image, Layer, Role, load_image
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci.source_name import SourceName
from layerstore.opened import open_layer, open_tree
from layerstore.progress import SILENT, Progress
from layerstore.store.clock import Clock
from layerstore.store.directory import DirectoryStore
from layerstore.tar.reader import MemberReader
from layerstore.tree.inode import Directory
from layerstore.tree.merge import Merge
from layerstore.tree.union import merge_overlay
from support.layouts import Layer as StoredLayer
from support.layouts import Layout, compress
from support.tars import tar
from support.trees import Bytes, Row, manifest

PHASES = ("unpack", "hash", "verify", "compress", "metadata")
"""The steps of a conversion from an archive, as its progress names them.

Where there is nothing to refer to, "pack" stands for "hash" and "compress", and there is no "verify".
"""


class Site:
    """One store at ``path/store``; sources get names of their own in ``path``."""

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.store = DirectoryStore.create(str(path / "store"), clock=clock)
        self._count = 0

    def tar(self, *parts: bytes, end: bytes | None = None, compression: str = "") -> str:
        """A source name of an archive of these parts."""
        data = tar(*parts) if end is None else tar(*parts, end=end)
        return self.raw_tar(compress(data, compression))

    def raw_tar(self, data: bytes) -> str:
        path = self._next("layer.tar")
        path.write_bytes(data)
        return f"tar:{path}"

    def layout(self) -> Layout:
        return Layout(self._next("layout"))

    def image(self, layers: Sequence[bytes | StoredLayer], **fields: Any) -> str:
        """A source name of a layout with this image alone."""
        layout = self.layout()
        layout.image(layers, tag="it", **fields)
        return layout.name("it")

    def convert(
        self,
        source: str,
        role: Role = Role.BASE,
        *,
        tag: str | None = None,
        progress: Progress = SILENT,
        warn: Callable[[str], None] = lambda text: None,
        **fields: Any,
    ) -> Report:
        conversion = Conversion(SourceName.parse(source), role, **{"jobs": 2, **fields})
        return convert(conversion, self.store, tag=tag, progress=progress, warn=warn)

    @contextmanager
    def trees(self, *layers: Layer) -> Iterator[list[Directory]]:
        with ExitStack() as stack:
            yield [stack.enter_context(open_layer(self.store, layer)).tree() for layer in layers]

    def rows(self, what: Report | Image | str) -> dict[bytes, Row]:
        """What a sandbox of the image would see; the delta itself for a layer over a base."""
        image = what.image if isinstance(what, Report) else what
        with open_tree(self.store, load_image(self.store, image) if isinstance(image, str) else image) as tree:
            return manifest(tree)

    def union(self, *reports: Report) -> dict[bytes, Row]:
        """What a stack of these layers shows, bottom first."""
        with self.trees(*(report.layer for report in reports)) as trees:
            return manifest(merge_overlay(trees))

    def blobs(self) -> dict[Digest, int]:
        return {blob.digest: blob.size for blob in self.store.blobs()}

    def blob_path(self, digest: Digest) -> Path:
        return Path(self.store.root, "blobs", digest.algorithm, digest.hex)

    def flip(self, digest: Digest, offset: int = -1) -> None:
        """Change one bit of a blob."""
        path = self.blob_path(digest)
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    def leftovers(self) -> list[str]:
        """Temporary names and leases anywhere in the store."""
        found = [
            os.path.join(directory, name)
            for directory, directories, files in os.walk(self.store.root)
            for name in (*directories, *files)
            if name.startswith(".tmp-")
        ]
        return sorted(found + os.listdir(os.path.join(self.store.root, "leases")))

    def snapshot(self) -> tuple[dict[Digest, int], dict[str, Digest], list[str]]:
        """Blobs, references and leftovers: equal before and after something that must have changed nothing."""
        references = {reference.name: reference.target.digest for reference in self.store.references()}
        return self.blobs(), references, self.leftovers()

    def _next(self, name: str) -> Path:
        self._count += 1
        return self.path / f"{self._count}-{name}"


def expected_rows(*layers: bytes) -> dict[bytes, Row]:
    """What the decompressed layers come to, without a conversion."""
    merge = Merge(warn=lambda text: None, limits=DEFAULT_LIMITS)
    for layer in layers:
        merge.apply(_members(layer), Bytes(layer))
    return manifest(merge.tree())


def _members(layer: bytes) -> MemberReader:
    return MemberReader(
        lambda offset, length: layer[offset : offset + length], limits=DEFAULT_LIMITS, warn=lambda text: None
    )


class Stop(KeyboardInterrupt):
    """Ctrl-C at a known point."""


class Interrupting:
    """A progress that raises :class:`Stop` when a step begins, or with ``pieces`` after so many pieces of it."""

    def __init__(self, step: str, pieces: int | None = None) -> None:
        self.steps: list[str] = []
        self.stopped = False
        self._step = step
        self._left = pieces

    def start(self, step: str, total: int | None) -> None:
        self.steps.append(step)
        if step == self._step and self._left is None:
            self._stop()

    def advance(self, count: int) -> None:
        if self.steps and self.steps[-1] == self._step and self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._stop()

    def _stop(self) -> None:
        self.stopped = True
        raise Stop


class Calling:
    """A progress that calls back once when a step begins."""

    def __init__(self, step: str, call: Callable[[], object]) -> None:
        self._step = step
        self._call = call
        self.called = False

    def start(self, step: str, total: int | None) -> None:
        if step == self._step and not self.called:
            self.called = True
            self._call()

    def advance(self, count: int) -> None: ...


def noise(count: int, seed: int) -> bytes:
    """Bytes that nothing compresses and no other seed has: ``count`` of them, the same each time."""
    return random.Random(seed).randbytes(count)

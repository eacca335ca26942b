"""Sources, read into trees: the first half of a conversion.

A tree that comes from an archive reads its file data from the archive's spool, so the archives stay open, on the
caller's ExitStack, until the data has been packed.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from layerstore.content import same_content
from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, UsageError, about, os_errors, printable
from layerstore.image import Layer
from layerstore.limits import Limits
from layerstore.oci.config import ImageConfig
from layerstore.oci.document import dump
from layerstore.oci.files import RangeReader
from layerstore.oci.platform import Platform
from layerstore.oci.source import SourceImage
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source
from layerstore.progress import Progress
from layerstore.tar.archive import LayerArchive
from layerstore.tree.difference import delta
from layerstore.tree.inode import Directory, File, walk
from layerstore.tree.local import scan
from layerstore.tree.merge import Merge


@dataclass(frozen=True, slots=True)
class Material:
    """A tree to be laid out, and where it came from.

    Attributes:
        tree: whole, or over a base what is added to it and taken from it.
        config: the source's, or one made up for what has none.
        size: bytes read, compressed as they were.
        digest: of the source's manifest or archive; a directory has none.
        diff_ids: of the source's layers, those of the base included.
    """

    tree: Directory
    config: ImageConfig
    size: int
    digest: Digest | None
    diff_ids: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Base:
    """What a source is read over.

    Attributes:
        name: as it was asked for, for messages.
        layer: the published base.
        tree: what it holds.
        rebase: the source wasn't built on it: take the difference of the trees.
    """

    name: str
    layer: Layer
    tree: Directory
    rebase: bool


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads one source.

    Attributes:
        scratch: directory for spools.
        stack: closes what the tree's data is read from.
        platform: which image of an index, and the platform of a source that has none.
    """

    scratch: str
    stack: ExitStack
    platform: Platform | None
    limits: Limits
    progress: Progress
    warn: Callable[[str], None]

    def read(self, source: SourceName, base: Base | None) -> Material:
        """The source's tree, collapsed, or as an overlay over ``base``.

        A ``tree:`` over a base adds to it and deletes nothing, unless the difference is asked for.

        Raises:
            ConflictError: an image that isn't built on the base.
        """
        lower = base.tree if base is not None and not base.rebase else None
        if source.transport == "tree":
            material = self._read_directory(source.path)
        elif source.transport == "tar":
            material = self._read_tar(source.path, lower)
        else:
            opened = self.stack.enter_context(
                open_source(
                    source,
                    scratch=self.scratch,
                    limits=self.limits,
                    warn=self.warn,
                )
            )
            image = opened.image(self.platform)
            skip = _layers_of_base(image, source, base) if base is not None and not base.rebase else 0
            material = self._read_image(image, skip, lower)
        if base is not None and base.rebase:
            self.progress.start("compare", None)
            return replace(material, tree=delta(base.tree, material.tree, same_content))
        return material

    def _read_directory(self, path: str) -> Material:
        self.progress.start("scan", None)
        tree = scan(path, warn=self.warn)
        size = sum(extent.length for file in survey(tree)[1] for extent in file.extents)
        return Material(tree, _plain_config(self.platform), size, None, ())

    def _read_tar(self, path: str, lower: Directory | None) -> Material:
        stream: io.FileIO | str = path
        if path == "-":
            # Unbuffered, so that an interrupted conversion need not wait for the other end of the pipe.
            stream = self.stack.enter_context(io.FileIO(0, closefd=False))
            self.progress.start("unpack", None)
        else:
            with os_errors("open the archive"):
                status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                raise UsageError(f"{printable(path)} is a directory, not an archive; write tree:{printable(path)}")
            self.progress.start("unpack", status.st_size)
        archive = self.stack.enter_context(
            LayerArchive(
                stream, scratch=self.scratch, limits=self.limits, warn=self.warn, progress=self.progress.advance
            )
        )
        merge = Merge(lower=lower, warn=self.warn, limits=self.limits)
        with about("standard input" if path == "-" else printable(path)):
            merge.apply(archive.members(), archive.source)
            digests = archive.finish()
        return Material(
            merge.tree(), _plain_config(self.platform), digests.blob_size, digests.diff_id, (digests.diff_id,)
        )

    def _read_image(self, image: SourceImage, skip: int, lower: Directory | None) -> Material:
        """The layers from number ``skip`` on, over what ``lower`` has of those before."""
        layers = image.layers[skip:]
        size = sum(layer.descriptor.size for layer in layers)
        self.progress.start("unpack", size)
        merge = Merge(lower=lower, warn=self.warn, limits=self.limits)
        for number, layer in enumerate(layers, skip):
            what = f"layer {number} ({layer.descriptor.digest})"
            file = image.layer_file(number)
            with about(what):
                archive = self.stack.enter_context(
                    LayerArchive(
                        file.path if file.is_whole else self.stack.enter_context(RangeReader(file, what)),
                        scratch=self.scratch,
                        limits=self.limits,
                        warn=partial(self._warn_of, what),
                        expected=layer.descriptor.digest,
                        expected_size=layer.descriptor.size,
                        diff_algorithm=layer.diff_id.algorithm,
                        progress=self.progress.advance,
                    )
                )
                merge.apply(archive.members(), archive.source)
                diff_id = archive.finish().diff_id
            if diff_id != layer.diff_id:
                raise CorruptError(f"diff ID of {what}", expected=str(layer.diff_id), actual=str(diff_id))
        diff_ids = tuple(layer.diff_id for layer in image.layers)
        return Material(merge.tree(), image.config, size, image.descriptor.digest, diff_ids)

    def _warn_of(self, what: str, text: str) -> None:
        self.warn(f"{what}: {text}")


def survey(tree: Directory) -> tuple[int, list[File]]:
    """How many names the tree has, and its regular files, each once, in the order their data is laid out."""
    seen: set[int] = set()
    files = []
    names = 0
    for _, inode in walk(tree):
        names += 1
        if isinstance(inode, File) and id(inode) not in seen:
            seen.add(id(inode))
            files.append(inode)
    return names, files


def _layers_of_base(image: SourceImage, source: SourceName, base: Base) -> int:
    """How many of the image's layers the base consists of."""
    expected = base.layer.diff_ids
    actual = tuple(layer.diff_id for layer in image.layers)
    if expected and actual[: len(expected)] == expected:
        return len(expected)
    why = "the base doesn't record the layers it was made from"
    if expected:
        shared = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), len(actual))
        why = f"of the base's {len(expected)} layers the image begins with {shared}"
    raise ConflictError(
        f"{source} isn't built on {base.name!r}: {why}; name its own base, or --rebase to compute the difference"
    )


def _plain_config(platform: Platform | None) -> ImageConfig:
    """The config of a source that has none; without a platform it fits every machine."""
    document: dict[str, object] = {"architecture": "unknown", "os": "linux"}
    if platform is not None:
        document |= {"architecture": platform.architecture, "os": platform.os}
        if platform.variant:
            document["variant"] = platform.variant
    document |= {"config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
    return ImageConfig.parse(dump(document), "config")

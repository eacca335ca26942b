"""From the name of a source to the source."""

from __future__ import annotations

from layerstore.errors import UnsupportedError, UsageError
from layerstore.limits import Limits
from layerstore.oci.archive import ArchiveFiles
from layerstore.oci.docker_archive import DockerArchiveSource
from layerstore.oci.files import DirectoryFiles, Files
from layerstore.oci.layout import LayoutSource
from layerstore.oci.source import ImageSource, Warn
from layerstore.oci.source_name import SourceName


def open_source(name: SourceName, *, scratch: str, limits: Limits, warn: Warn) -> ImageSource:
    """Open an image source; close it after use.

    Args:
        name: with the transport ``oci``, ``oci-archive`` or ``docker-archive``.
        scratch: an existing directory for decompressed archives, which are gone when the source is closed.
        limits: ``layer_bytes`` bounds a decompressed archive.
        warn: told of oddities that are no reason to refuse.

    Raises:
        NotFoundError: no such file or directory.
        MalformedError: it isn't what the transport says.
        UnsupportedError: a registry.
        UsageError: a source that isn't an image.
    """
    if name.transport == "docker":
        raise UnsupportedError(f"registries are not read yet: {name}; copy it to an OCI layout first")
    files: Files
    if name.transport == "oci":
        files = DirectoryFiles(name.path)
    elif name.transport in ("oci-archive", "docker-archive"):
        files = ArchiveFiles(name.path, scratch=scratch, limits=limits, warn=warn)
    else:
        raise UsageError(f"{name} is not an image")
    try:
        if name.transport == "docker-archive":
            return DockerArchiveSource(files, name, warn=warn)
        return LayoutSource(files, name, warn=warn)
    except BaseException:
        files.close()
        raise

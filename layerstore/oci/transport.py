"""From the name of a source to the source."""

from __future__ import annotations

from layerstore.errors import UsageError
from layerstore.limits import Limits
from layerstore.oci.archive import ArchiveFiles
from layerstore.oci.docker_archive import DockerArchiveSource
from layerstore.oci.files import DirectoryFiles, Files
from layerstore.oci.layout import LayoutSource
from layerstore.oci.source import ImageSource, Warn
from layerstore.oci.source_name import SourceName


def open_source(name: SourceName, *, scratch: str, limits: Limits, warn: Warn) -> ImageSource:
    """Open an image source; close it after use. Of a registry nothing is asked yet.

    Args:
        name: with any transport but ``tar`` and ``tree``.
        scratch: an existing directory for decompressed archives and downloaded layers, which are gone when the source
            is closed.
        limits: ``layer_bytes`` bounds a decompressed archive.
        warn: told of oddities that are no reason to refuse.

    Raises:
        NotFoundError: no such file or directory.
        MalformedError: it isn't what the transport says.
        UsageError: a source that isn't an image.
    """
    if name.reference is not None:
        # requests takes longer to import than most archives take to open.
        from layerstore.registry.source import RegistrySource

        return RegistrySource(name.reference, scratch=scratch, warn=warn)
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

"""Targets as a command line names them."""

from __future__ import annotations

import os

from layerstore.errors import UsageError
from layerstore.export.archivetarget import ArchiveTarget
from layerstore.export.layouttarget import LayoutTarget
from layerstore.export.target import Target
from layerstore.oci.document import shown
from layerstore.oci.source_name import SourceName


def open_target(text: str) -> Target:
    """The target that ``oci:DIR[:TAG]``, ``oci-archive:FILE[:TAG]`` or ``docker://REFERENCE`` names.

    Nothing is made, and nobody asked, before it is entered. Paths end as those of sources do
    (:mod:`layerstore.oci.source_name`): at the first colon behind something that is there.

    Raises:
        UsageError: no target, or one with a position or digest where a tag belongs.
    """
    transport = text.partition(":")[0]
    if transport not in ("oci", "oci-archive", "docker"):
        raise UsageError(
            f"not a target: {shown(text)}; write oci:DIR[:TAG], oci-archive:FILE[:TAG] or docker://REFERENCE"
        )
    name = SourceName.parse(text, exists=_exists)
    digest = name.digest if name.reference is None else name.reference.digest
    if name.position is not None or digest is not None:
        raise UsageError(f"{name}: a target has a tag; position and digest are what comes of it")
    if name.reference is not None:
        # requests takes a tenth of a second to import.
        from layerstore.export.registrytarget import RegistryTarget

        return RegistryTarget(name.reference)
    path = os.path.abspath(name.path)
    return LayoutTarget(path, name.tag) if transport == "oci" else ArchiveTarget(path, name.tag)


def _exists(transport: str, path: str) -> bool:
    """A directory is enough to be meant as one: a layout is made of an empty one."""
    return os.path.isdir(path) if transport == "oci" else os.path.isfile(path)

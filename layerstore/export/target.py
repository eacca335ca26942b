"""Where an exported image goes: takes blobs, and at last the manifest, all at once or not at all.

=========================  =====================  =============================================================
``oci:DIR[:TAG]``          ``layouttarget.py``    an OCI layout; other tags stay
``oci-archive:FILE[:TAG]`` ``archivetarget.py``   a tar of a layout with this image alone
``docker://REFERENCE``     ``registrytarget.py``  a repository of a registry
=========================  =====================  =============================================================
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from layerstore.oci.descriptor import Descriptor
from layerstore.oci.layout import REF_NAME
from layerstore.store.protocol import Upload


class Target(Protocol):
    """A context manager. What has not been published when it ends was never there."""

    @property
    def scratch(self) -> str:
        """A directory for temporary files without names, on the file system that the blobs go to."""
        ...

    def upload(self) -> Upload:
        """Start a blob; one at a time. Committing one that is there already succeeds."""
        ...

    def publish(self, manifest: bytes, entry: Descriptor) -> None:
        """Write the manifest, and give it its tag; durable on return. Once, and last."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def tagged(entry: Descriptor, tag: str | None) -> dict[str, object]:
    """The entry of an index for a manifest and its tag."""
    document = entry.to_json()
    if tag is not None:
        document["annotations"] = {REF_NAME: tag}
    return document

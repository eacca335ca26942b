"""OCI image layouts (image-spec 1.1, image-layout.md), as a directory or inside a tar.

::

    oci-layout            {"imageLayoutVersion": "1.0.0"}
    index.json            the images: tags are annotations of its entries, and of no deeper index's
    blobs/ALGORITHM/HEX   everything else

Names of blobs are made from parsed digests alone, so they can't leave ``blobs/``.
"""

from __future__ import annotations

from layerstore.errors import MalformedError, NotFoundError, UnsupportedError, UsageError
from layerstore.oci.blob import read_blob
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import CONFIG_BYTES, MANIFEST_BYTES, parse, shown
from layerstore.oci.files import FileRange, Files
from layerstore.oci.manifest import Index, Manifest, parse_document
from layerstore.oci.platform import Platform, host
from layerstore.oci.selection import Candidate, best, listed, platform_of, refusal, require_manifest, select
from layerstore.oci.source import SourceImage, Warn, assemble
from layerstore.oci.source_name import SourceName

REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
"""The whole reference, where containerd and Docker put only its tag into ref.name."""

LAYOUT_FILE_BYTES = 4096
INDEX_BYTES = CONFIG_BYTES


class LayoutSource:
    """The images of a layout. ``name`` chooses one by tag, position or digest; it owns ``files``."""

    def __init__(self, files: Files, name: SourceName, *, warn: Warn) -> None:
        self._files = files
        self._name = name
        self._warn = warn
        _check_version(files)
        file = files.find("index.json")
        if file is None:
            raise MalformedError(f"{files.location} is not an OCI layout: it has no index.json")
        what = f"index.json of {files.location}"
        document = parse_document(file.read(what, INDEX_BYTES), None, what, limit=INDEX_BYTES)
        if not isinstance(document, Index):
            raise MalformedError(f"{what} is a manifest where an index belongs")
        self.index = document

    def image(self, platform: Platform | None = None) -> SourceImage:
        name = str(self._name)
        descriptor = self._entry(platform)
        document = self._document(descriptor)
        if isinstance(document, Index):
            descriptor = select(document, platform, self.read, name)
            document = self._document(descriptor)
        manifest = require_manifest(document, f"manifest {descriptor.digest}")
        manifest.require_image(name)
        config = self.read(manifest.config, limit=CONFIG_BYTES)
        return assemble(
            name=name,
            descriptor=descriptor,
            manifest=manifest,
            config=ImageConfig.parse(config, f"config of {name}", warn=self._warn),
            indexed=platform_of(descriptor),
            wanted=platform,
            locate=self.locate,
            warn=self._warn,
        )

    def read(self, descriptor: Descriptor, *, limit: int = MANIFEST_BYTES) -> bytes:
        """A verified document: the descriptor's own copy, or the blob.

        Raises:
            NotFoundError: the layout doesn't have it.
            CorruptError: the blob is something else.
        """
        what = f"{descriptor.digest} in {self._files.location}"
        data = descriptor.data
        if data is not None and len(data) <= limit:
            return data
        return read_blob(self.locate(descriptor, "a document"), descriptor, what, limit=limit)

    def locate(self, descriptor: Descriptor, what: str) -> FileRange:
        """Where a blob lies; neither its size nor its content is verified."""
        folder = f"blobs/{descriptor.digest.algorithm}"
        file = self._files.find(f"{folder}/{descriptor.digest.hex}")
        if file is None:
            raise NotFoundError(f"{what} is missing: {descriptor.digest} is not in {self._files.location}/{folder}")
        return file

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> LayoutSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _document(self, descriptor: Descriptor) -> Manifest | Index:
        what = f"{descriptor.digest} in {self._files.location}"
        return parse_document(self.read(descriptor), descriptor.media_type, what)

    def _entry(self, platform: Platform | None) -> Descriptor:
        """The entry of index.json that the source's name means.

        Several entries of one name are several platforms of one image if each says its own; otherwise nobody can
        know which one is meant, and it is an error, although image-index.md would allow to take the first.
        """
        entries = self._named()
        if len({entry.digest for entry in entries}) == 1:
            return entries[0]
        candidates = [Candidate(entry, platform_of(entry)) for entry in entries]
        one_name = len({_ref_name(entry) for entry in entries}) == 1
        if one_name and all(candidate.platform is not None for candidate in candidates):
            matches = best(candidates, platform or host())
            if not matches:
                raise NotFoundError(f"{self._name} is not there for {platform or host()}: it has {listed(candidates)}")
            if len({match.descriptor.digest for match in matches}) == 1:
                return matches[0].descriptor
        raise UsageError(
            f"{self._name} can mean {len(entries)} images; choose by tag, @POSITION or @DIGEST from {self._listing()}"
        )

    def _named(self) -> list[Descriptor]:
        """What the name's tag, position or digest fits; all images if it has none of them. Never empty."""
        name, index, where = self._name, self.index, f"index.json of {self._files.location}"
        if name.position is not None:
            return [index.at(name.position, where)]
        if name.digest is not None:
            found = [entry for entry in index.manifests if entry.digest == name.digest]
        elif name.tag is not None:
            found = [entry for entry in index.manifests if _ref_name(entry) == name.tag]
            if not found:
                found = [entry for entry in index.manifests if entry.annotations.get(CONTAINERD_NAME) == name.tag]
            for entry in index.unusable:
                if entry.annotations.get(REF_NAME) == name.tag:
                    raise UnsupportedError(entry.reason)
        else:
            found = [entry for entry in index.manifests if refusal(entry) is None] or list(index.manifests[:1])
        if not found:
            raise NotFoundError(f"{name} does not exist; {where} has {self._listing()}")
        return found

    def _listing(self) -> str:
        texts = [
            f"{shown(_ref_name(entry) or '')} " * (_ref_name(entry) is not None) + f"@{entry.digest}"
            for entry in self.index.manifests
        ]
        texts.extend(entry.reason for entry in self.index.unusable)
        return listed(texts) or "nothing"


def _ref_name(entry: Descriptor) -> str | None:
    return entry.annotations.get(REF_NAME)


def _check_version(files: Files) -> None:
    file = files.find("oci-layout")
    if file is None:
        raise MalformedError(f"{files.location} is not an OCI layout: it has no oci-layout")
    what = f"oci-layout of {files.location}"
    version = parse(file.read(what, LAYOUT_FILE_BYTES), what).get("imageLayoutVersion")
    if not isinstance(version, str):
        raise MalformedError(f"{what} has no imageLayoutVersion")
    if version.split(".")[0] != "1":
        raise UnsupportedError(f"{what} has layout version {shown(version)}; 1.0.0 is known")

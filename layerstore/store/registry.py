"""A store in a repository of an OCI registry: ``oci://HOST[:PORT]/REPOSITORY``.

Its images are ordinary images, which any tool pulls by tag or digest: a reference is a tag (``registry/tags.py`` says
which), its target a manifest, and everything else a blob. What is written as a blob and is a manifest or index becomes
one, as soon as the registry takes it, that is, when all it names is there.

What a registry can't do, and what follows:

* **No compare-and-swap.** A reference is looked at and then written. Of two hosts that write one name at the same
  moment the last wins, and neither knows; threads of one process exclude each other. Where a registry takes conditions
  (``If-Match``) they are sent.
* **No leases.** A registry collects garbage when its operator says so; most ask that nobody pushes then. So a lease
  here protects nothing, and need not. What is to be referred to is looked for before the reference is written, and the
  registry looks once more.
* **No collection** from outside: names can be deleted, and the registry's own collection reclaims the blobs. Some
  registries delete no tag, only a manifest with all its tags; that is done where no other tag needs it.
* A damaged blob is not replaced by most registries when it is written again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import BinaryIO, TypeVar

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci import mediatype
from layerstore.oci.blob import verify
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import MANIFEST_BYTES
from layerstore.oci.manifest import Index, parse_document
from layerstore.registry.address import RegistryAddress
from layerstore.registry.blobs import Blobs
from layerstore.registry.client import Patience, RefusedError, RegistryClient
from layerstore.registry.knowledge import Knowledge
from layerstore.registry.manifests import Manifests, Stored, lacks_blobs, unknown_blobs
from layerstore.registry.referrers import Referrers
from layerstore.registry.tags import decode_tag, encode_tag
from layerstore.registry.uploads import Uploads
from layerstore.store.heldblob import WholeBlob
from layerstore.store.names import check_name
from layerstore.store.objectblob import ObjectUpload, spooled, spooling
from layerstore.store.protocol import ALGORITHMS, Blob, Lease, Reference
from layerstore.store.registryblob import RegistryBlob

T = TypeVar("T")

START_BYTES = 16 << 10
"""Bytes of a blob that come when it is opened: most configs, and no second request for them."""
DOCUMENT_BYTES = 16 << 20
"""Largest manifest that is read."""
RESENT_BYTES = 64 << 10
"""What is no larger is written without a look whether it is there, which would cost as much."""
LOOKS = 8
"""Questions to the registry at a time."""


class RegistryStore:
    """A :class:`~layerstore.store.protocol.WriteStore`; :meth:`close` closes idle connections.

    Attributes:
        location: the URL.
        address: the same, taken apart.
        referrers: what refers to images here.
        spool: directory for blobs on their way in, and scratch.
        exclusive: always False: of two writers of one reference the last wins.
    """

    exclusive = False

    def __init__(
        self,
        url: str,
        *,
        docker_config: str | None = None,
        patience: Patience | None = None,
        spool: str | None = None,
    ) -> None:
        """Asks nothing: a repository that doesn't exist is empty, and is made by the first push.

        Args:
            url: ``oci://HOST[:PORT]/REPOSITORY``, or ``oci+http://`` for plain HTTP.
            docker_config: path of docker's ``config.json``; None for where docker has it.
            patience: with which the registry is asked.
            spool: directory for blobs on their way in, and scratch; None is the system's.

        Raises:
            UsageError: not such a URL.
        """
        self.spool = spool
        self.address = RegistryAddress.parse(url)
        self.location = str(self.address)
        self._client = RegistryClient(self.address, docker_config=docker_config, patience=patience)
        self._manifests = Manifests(self._client)
        self._blobs = Blobs(self._client)
        self._uploads = Uploads(self._client, self._blobs)
        self.referrers = Referrers(self._client, self._manifests, warn=lambda line: None)
        self._known = Knowledge()
        self._writing = tuple(threading.Lock() for _ in range(64))
        self._deletes_tags = True
        """False once the registry turned out to delete whole manifests only."""

    def close(self) -> None:
        self._client.close()

    # Reading

    def stat(self, digest: Digest) -> int:
        def as_manifest() -> int:
            return self._manifests.head(digest).descriptor.size

        size, manifest = self._found(digest, as_manifest, lambda: self._blobs.size(digest))
        self._known.saw(digest, size, manifest=manifest)
        return size

    def open(self, digest: Digest) -> Blob:
        data = self._known.take(digest)
        return self._open(digest) if data is None else WholeBlob(digest, data)

    def open_sized(self, digest: Digest, size: int) -> Blob:
        if self._known.is_manifest(digest):
            return self.open(digest)
        late = lambda: self._manifest(digest).data  # noqa: E731 - what is said to be there is a manifest then
        return RegistryBlob(self._blobs, self._blobs.place(digest), size, b"", late)

    def names(self) -> Iterator[str]:
        yield from sorted(filter(None, map(decode_tag, self._manifests.tags())))

    def resolve(self, name: str) -> Descriptor:
        tag = self._existing_tag(name)
        try:
            stored = self._manifest(tag)
        except NotFoundError as error:
            raise NotFoundError(f"reference {name!r} is not in {self.location}") from error
        self._known.keep(stored)
        return stored.descriptor

    def references(self) -> Iterator[Reference]:
        def resolved(name: str) -> Reference | None:
            try:
                return Reference(name, self.resolve(name))
            except NotFoundError:
                return None  # deleted meanwhile

        with ThreadPoolExecutor(LOOKS, thread_name_prefix="registry-look") as pool:
            yield from filter(None, pool.map(resolved, self.names()))

    def _open(self, digest: Digest) -> Blob:
        def as_blob() -> Blob:
            place = self._blobs.place(digest)
            return RegistryBlob(self._blobs, place, *self._blobs.start(place, START_BYTES))

        return self._found(digest, lambda: WholeBlob(digest, self._manifest(digest).data), as_blob)[0]

    def _found(self, digest: Digest, as_manifest: Callable[[], T], as_blob: Callable[[], T]) -> tuple[T, bool]:
        """What one of them finds, and whether it was the first: a digest doesn't say what it is of."""
        first = self._known.is_manifest(digest)
        for manifest in (first, not first):
            try:
                return (as_manifest() if manifest else as_blob()), manifest
            except NotFoundError:
                continue
            except UnavailableError:
                if first or not manifest:
                    raise
            # docker's registry fails where a blob is asked for as a manifest: it has been written since we looked.
            try:
                return as_blob(), False
            except NotFoundError:
                return as_manifest(), True
        self._known.missed(digest)
        raise NotFoundError(f"blob {digest} is not in {self.location}")

    def _manifest(self, reference: str | Digest) -> Stored:
        stored = self._manifests.get(reference, limit=DOCUMENT_BYTES)
        self._known.saw(stored.descriptor.digest, stored.descriptor.size, manifest=True)
        return stored

    # Publishing

    def upload(self, algorithm: str = "sha256") -> ObjectUpload:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"blobs are named by {' or '.join(ALGORITHMS)}, not by {algorithm!r}")
        return ObjectUpload(self, algorithm)

    def scratch(self) -> AbstractContextManager[str]:
        return spooling(self.spool)

    def lease(self, *, seconds: int = 86_400) -> RegistryLease:
        if seconds <= 0:
            raise UsageError(f"a lease of {seconds} seconds protects nothing")
        return RegistryLease(self)

    def mount(self, digest: Digest, size: int, repository: str) -> bool:
        """Take a blob over from another repository of this registry, which moves no bytes.

        Returns:
            Whether it is here now; if not, it has to be written.
        """
        session = self._uploads.mount(digest, repository)
        if session is not None:
            self._uploads.give_up(session, digest)
            return False
        self._known.saw(digest, size)
        return True

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        tag = encode_tag(name)
        if not isinstance(lease, RegistryLease) or lease.store is not self:
            raise UsageError(f"the lease for reference {name!r} is not one of {self.location}")
        lease.renew()
        data = self._present(name, target, reaches)
        with self._lock_of(name):
            etag = self._compare(name, tag, expected)
            try:
                self._push(tag, data, target.media_type, replacing=etag)
            except ConflictError as error:
                raise ConflictError(f"reference {name!r} in {self.location} is not written: {error}") from error
            except RefusedError as error:
                if lacks_blobs(error):
                    raise ConflictError(f"reference {name!r} is not written: {error}; publish again") from error
                raise

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        tag = self._existing_tag(name)
        with self._lock_of(name):
            try:
                present = self._manifests.head(tag).descriptor
            except NotFoundError as error:
                raise NotFoundError(f"reference {name!r} is not in {self.location}") from error
            if present.digest != expected.digest:
                raise self._unexpected(name, present.digest, expected)
            self._delete(name, tag, present.digest)

    def arrive(self, digest: Digest, file: BinaryIO, size: int) -> None:
        """The end of an upload, whose bytes have been checked: they become a manifest if they are one."""
        read = spooled(file, self.spool)
        if size <= MANIFEST_BYTES and (data := read(0, size))[:1] == b"{" and self._arrive_manifest(digest, data):
            return
        if size > RESENT_BYTES and (self._known.has(digest, size) or self._has(digest, size)):
            return
        self._uploads.send(digest, size, read)
        self._known.saw(digest, size)

    def _arrive_manifest(self, digest: Digest, data: bytes) -> bool:
        """Whether it is a manifest that the registry takes now."""
        try:
            media_type = parse_document(data, None).media_type
        except ImgtoolError:
            return False
        try:
            self._push(digest, data, media_type)
        except (RefusedError, UnsupportedError):
            return False  # most often since something is missing that it names: until that is there it is a blob
        return True

    def _has(self, digest: Digest, size: int) -> bool:
        if self._known.is_missing(digest):
            return False
        try:
            return self._blobs.size(digest) == size
        except NotFoundError:
            return False

    def _present(self, name: str, target: Descriptor, reaches: Iterable[Digest]) -> bytes:
        """The target's bytes; it and all that it reaches are there."""
        needed = [digest for digest in sorted(set(reaches)) if digest != target.digest and not self._known.has(digest)]
        try:
            with ThreadPoolExecutor(LOOKS, thread_name_prefix="registry-look") as pool:
                list(pool.map(self.stat, needed))
            with self._open(target.digest) as blob:
                if blob.size != target.size:
                    what = f"blob {target.digest} in {self.location}"
                    raise CorruptError(what, expected=f"{target.size} bytes", actual=f"{blob.size}")
                data = blob.read_at(0, blob.size)
        except NotFoundError as error:
            raise ConflictError(f"reference {name!r} is not written: {error}; publish again") from error
        verify(data, target, f"blob {target.digest} in {self.location}")
        return data

    def _push(self, reference: str | Digest, data: bytes, media_type: str, *, replacing: str | None = "") -> None:
        """Write a manifest, after those that it names as an index.

        Raises:
            RefusedError: with ``lacks_blobs``: something that it names isn't there, whatever was said before.
        """
        digest = reference if isinstance(reference, Digest) else Digest.of(data)
        if mediatype.normal(media_type) in mediatype.INDEXES:
            document = parse_document(data, media_type, f"index {digest} in {self.location}")
            for each in document.manifests if isinstance(document, Index) else ():
                self._promote(each)
        try:
            self.referrers.push(reference, data, media_type, replacing=replacing)
        except RefusedError as error:
            missing = unknown_blobs(error) if lacks_blobs(error) else ()
            self._known.doubt(missing)
            if not missing or not all([self._supply(each) for each in missing]):
                raise
            self.referrers.push(reference, data, media_type, replacing=replacing)
        self._known.saw(digest, len(data), manifest=True)

    def _promote(self, child: Descriptor) -> None:
        """Make a manifest of what an index names, if it is here as a blob alone."""
        if mediatype.normal(child.media_type) not in mediatype.INDEXES | mediatype.MANIFESTS:
            return
        if self._known.is_manifest(child.digest) and self._known.has(child.digest):
            return
        try:
            size = self._manifests.head(child.digest).descriptor.size
        except NotFoundError:
            try:
                with RegistryBlob(self._blobs, self._blobs.place(child.digest), child.size, b"") as blob:
                    self._push(child.digest, blob.read_at(0, child.size), child.media_type)
            except NotFoundError:
                pass  # an index may name what isn't here: the registry says whether it takes it
        else:
            self._known.saw(child.digest, size, manifest=True)

    def _supply(self, digest: Digest) -> bool:
        """Write once more, as a blob, what is said to be missing and is here as a manifest; whether that was so."""
        try:
            data = self._manifests.get(digest, limit=DOCUMENT_BYTES).data
        except (NotFoundError, UnavailableError):
            return False
        self._uploads.send(digest, len(data), lambda offset, length: data[offset : offset + length])
        return True

    def _compare(self, name: str, tag: str, expected: Descriptor | None) -> str | None:
        """The etag of what the tag stands for now, which has to be ``expected``; None where that is nothing."""
        try:
            present = self._manifests.head(tag)
        except NotFoundError:
            if expected is None:
                return None
            raise self._unexpected(name, None, expected) from None
        if expected is None or present.descriptor.digest != expected.digest:
            raise self._unexpected(name, present.descriptor.digest, expected)
        return present.etag

    def _unexpected(self, name: str, found: Digest | None, wanted: Descriptor | None) -> ConflictError:
        return ConflictError(
            f"reference {name!r} in {self.location} stands for {found or 'nothing'} where "
            f"{wanted.digest if wanted else 'nothing'} was expected: look again"
        )

    def _delete(self, name: str, tag: str, digest: Digest) -> None:
        if self._deletes_tags:
            try:
                self._manifests.delete(tag)
            except NotFoundError:
                return
            except (RefusedError, UnsupportedError):
                self._deletes_tags = False
            else:
                return
        other = self._other_tag(tag, digest)
        if other is not None:
            raise UnsupportedError(
                f"reference {name!r} stays in {self.location}: the registry deletes no tags, only manifests with all "
                f"their tags, and {other} needs this one, too; let the name stand for another image, or use a registry "
                "that deletes tags"
            )
        try:
            self._manifests.delete(digest)
        except NotFoundError:
            pass
        except (RefusedError, UnsupportedError) as error:
            raise UnsupportedError(
                f"reference {name!r} stays in {self.location}: the registry doesn't delete ({error}); its operator can "
                "permit it (docker's registry: storage.delete.enabled: true)"
            ) from error
        self._known.doubt([digest])

    def _other_tag(self, tag: str, digest: Digest) -> str | None:
        """What else needs a manifest, for a message: another tag, or an index that one stands for."""

        def needs(other: str) -> str | None:
            try:
                found = self._manifests.head(other).descriptor
                if found.digest == digest:
                    return f"tag {other}"
                return f"the index of tag {other}" if digest in self._manifests_of(found) else None
            except NotFoundError:
                return None

        others = [each for each in self._manifests.tags() if each != tag]
        with ThreadPoolExecutor(LOOKS, thread_name_prefix="registry-look") as pool:
            return next(filter(None, pool.map(needs, others)), None)

    def _manifests_of(self, found: Descriptor) -> set[Digest]:
        """All manifests that an index names, at any depth; of anything else none."""
        named: set[Digest] = set()
        pending = [found]
        while pending:
            each = pending.pop()
            if mediatype.normal(each.media_type) not in mediatype.INDEXES:
                continue
            what = f"index {each.digest} in {self.location}"
            document = parse_document(self._manifest(each.digest).data, each.media_type, what)
            for child in document.manifests if isinstance(document, Index) else ():
                if child.digest not in named:
                    named.add(child.digest)
                    pending.append(child)
        return named

    def _existing_tag(self, name: str) -> str:
        """The tag of a name; one that can't have any isn't there."""
        check_name(name)
        try:
            return encode_tag(name)
        except UsageError as error:
            raise NotFoundError(f"reference {name!r} is not in {self.location}: {error}") from error

    def _lock_of(self, name: str) -> threading.Lock:
        return self._writing[hash(name) % len(self._writing)]


class RegistryLease:
    """Protects nothing: nobody collects in a registry but its operator. It ends when it is released, else never."""

    def __init__(self, store: RegistryStore) -> None:
        self.store = store
        self._identifier = secrets.token_hex(16)
        self._released = False

    @property
    def identifier(self) -> str:
        return self._identifier

    def pin(self, digests: Iterable[Digest]) -> None:
        self.renew()

    def renew(self) -> None:
        if self._released:
            raise ConflictError(f"the lease on {self.store.location} has expired: publish again")

    def __enter__(self) -> RegistryLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self._released = True

"""Choosing one image from an index, nested ones included.

Attestations (BuildKit's ``unknown/unknown`` manifests), artifacts and entries of unknown type are never candidates.
Among the candidates that serve the wanted platform the best variant wins, and the first among equals (image-index.md).
Without a wanted platform the only candidate is taken whatever its platform; of several, the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from layerstore.digest import Digest
from layerstore.errors import MalformedError, NotFoundError, UnsupportedError
from layerstore.oci import mediatype
from layerstore.oci.config import ImageConfig
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.document import shown
from layerstore.oci.manifest import Index, Manifest, parse_document
from layerstore.oci.platform import Platform, host

NESTING = 8
"""Deepest index in an index; real ones have one."""

LISTED = 12
"""Most candidates that a message lists."""

Fetch = Callable[[Descriptor], bytes]
"""The verified bytes of a document; raises NotFoundError if it isn't there."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An image manifest of an index; ``platform`` is None if neither index, manifest nor config tell."""

    descriptor: Descriptor
    platform: Platform | None

    def __str__(self) -> str:
        return f"{self.platform or 'platform unknown'} ({self.descriptor.digest})"


@dataclass(slots=True)
class _Search:
    """The walk through one index; every nested index is read once, however often it is named."""

    fetch: Fetch
    seen: set[Digest] = field(default_factory=set)
    unusable: list[str] = field(default_factory=list)

    def candidates(self, index: Index, depth: int) -> Iterator[Candidate]:
        self.unusable.extend(entry.reason for entry in index.unusable)
        for descriptor in index.manifests:
            reason = refusal(descriptor)
            if reason is not None:
                self.unusable.append(reason)
            elif descriptor.media_type not in mediatype.INDEXES:
                yield from self._candidate(descriptor)
            elif descriptor.digest not in self.seen:
                self.seen.add(descriptor.digest)
                if depth == NESTING:
                    raise UnsupportedError(f"index {descriptor.digest} is nested more than {NESTING} deep")
                document = parse_document(self.fetch(descriptor), descriptor.media_type, f"index {descriptor.digest}")
                if isinstance(document, Index):
                    yield from self.candidates(document, depth + 1)

    def _candidate(self, descriptor: Descriptor) -> Iterator[Candidate]:
        """With the platform of the entry, else of its config: the platform of an entry is optional."""
        stated = platform_of(descriptor)
        if stated is not None:
            yield Candidate(descriptor, stated)
            return
        what = f"manifest {descriptor.digest}"
        try:
            manifest = require_manifest(parse_document(self.fetch(descriptor), descriptor.media_type, what), what)
            manifest.require_image(what)
            config = ImageConfig.parse(self.fetch(manifest.config), f"config {manifest.config.digest}")
        except NotFoundError:
            # A copy of only some of the images: nothing is wrong unless this one is chosen.
            yield Candidate(descriptor, None)
        except UnsupportedError as error:
            self.unusable.append(str(error))
        else:
            yield Candidate(descriptor, config.platform)


def refusal(descriptor: Descriptor) -> str | None:
    """Why an index entry can't lead to an image; None if it can."""
    if descriptor.media_type not in mediatype.INDEXES | mediatype.MANIFESTS:
        return f"{descriptor.digest} is of type {shown(descriptor.media_type)}"
    platform = platform_of(descriptor)
    if descriptor.annotations.get("vnd.docker.reference.type") == "attestation-manifest" or (
        platform is not None and platform.is_unknown
    ):
        return f"{descriptor.digest} is an attestation"
    if descriptor.artifact_type is not None and descriptor.artifact_type not in mediatype.CONFIGS:
        return f"{descriptor.digest} is an artifact of type {shown(descriptor.artifact_type)}"
    return None


def platform_of(descriptor: Descriptor) -> Platform | None:
    """The platform that an index gives for its entry; None if there is none, or it says nothing."""
    value = descriptor.extra.get("platform")
    if value is None:
        return None
    platform = Platform.from_json(value, f"platform of {descriptor.digest}")
    return platform if platform.os or platform.architecture else None


def select(index: Index, platform: Platform | None, fetch: Fetch, what: str = "index") -> Descriptor:
    """The manifest of ``index`` for ``platform``.

    Args:
        index: where to look.
        platform: the wanted one; None for the only one there is, else the host's.
        fetch: reads nested indexes, and manifests and configs of entries without a platform.
        what: names the index in messages.

    Raises:
        NotFoundError: no candidate serves the platform; lists them.
        UnsupportedError: only artifacts, or nested too deeply.
    """
    search = _Search(fetch)
    candidates = list(search.candidates(index, 0))
    if not candidates:
        reasons = listed(search.unusable)
        raise UnsupportedError(f"{what} has no images" + (f": {reasons}" if reasons else ""))
    if platform is None and len({candidate.descriptor.digest for candidate in candidates}) == 1:
        return candidates[0].descriptor
    matches = best(candidates, platform or host())
    if not matches:
        wanted = platform or f"{host()}, this machine's"
        raise NotFoundError(f"{what} has no image for {wanted}; it has {listed(candidates)}")
    return matches[0].descriptor


def best(candidates: Iterable[Candidate], platform: Platform) -> list[Candidate]:
    """Those that serve ``platform`` equally well and better than all others, in their order."""
    ranked = [
        (rank, candidate)
        for candidate in candidates
        if candidate.platform is not None and (rank := platform.rank(candidate.platform)) is not None
    ]
    if not ranked:
        return []
    top = max(rank for rank, _ in ranked)
    return [candidate for rank, candidate in ranked if rank == top]


def listed(items: Iterable[object]) -> str:
    """For messages: ``a, b, c and 3 more``."""
    texts = [str(item) for item in items]
    more = len(texts) - LISTED
    return ", ".join(texts[:LISTED]) + (f" and {more} more" if more > 0 else "")


def require_manifest(document: Manifest | Index, what: str) -> Manifest:
    """Raise MalformedError for an index where only a manifest makes sense."""
    if not isinstance(document, Manifest):
        raise MalformedError(f"{what} is an index where a manifest belongs")
    return document

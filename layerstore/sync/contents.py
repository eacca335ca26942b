"""What references reach, read many at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from layerstore.attachment import attachment_name
from layerstore.digest import Digest
from layerstore.errors import ImgtoolError, NotFoundError, UnavailableError
from layerstore.image import layers_of
from layerstore.oci.descriptor import Descriptor
from layerstore.store.composition import steady
from layerstore.store.protocol import Store
from layerstore.store.reach import Documents, walk
from layerstore.store.transfer import LOOKS


@dataclass(frozen=True, slots=True)
class Contents:
    """A reference and what copying it moves.

    Attributes:
        name: the reference.
        target: what it stands for.
        blobs: each once, documents after what they name, the target last.
        plans: names of the plans that its layers have, or may have.
    """

    name: str
    target: Descriptor
    blobs: tuple[Descriptor, ...]
    plans: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[Digest, int]:
        return {blob.digest: blob.size for blob in self.blobs}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A reference that couldn't be read, and why."""

    name: str
    error: ImgtoolError


@dataclass(frozen=True, slots=True)
class Survey:
    """What was asked for, in that order, and the plans of its layers, by name."""

    images: tuple[Contents, ...]
    plans: tuple[Contents, ...]
    unreadable: tuple[Unreadable, ...]
    unreadable_plans: tuple[Unreadable, ...] = ()

    def only(self, names: Iterable[str]) -> Survey:
        """Of these images, in this order, and their plans."""
        by_name = {image.name: image for image in self.images}
        images = tuple(by_name[name] for name in names)
        wanted = {plan for image in images for plan in image.plans}
        return Survey(
            images,
            tuple(plan for plan in self.plans if plan.name in wanted),
            self.unreadable,
            tuple(each for each in self.unreadable_plans if each.name in wanted),
        )


def survey(store: Store, names: Collection[str], listed: Collection[str] | None) -> Survey:
    """Read what these references reach; ``listed`` are all names of the store, None if it has no list.

    Any image or artifact will do: sizes are those of its descriptors, at any depth. Nothing but documents is read.

    Raises:
        UnavailableError: not one could be read: the store is gone.
    """
    reader = steady(store)
    documents = Documents(reader)

    def read(name: str) -> Contents | Unreadable:
        try:
            target = reader.resolve(name)
            blobs = tuple(walk(documents, target, f"reference {name!r} in {store.location}"))
            return Contents(name, target, blobs, _plans(reader, target, listed))
        except ImgtoolError as error:
            return Unreadable(name, error)

    with ThreadPoolExecutor(LOOKS, thread_name_prefix="survey") as pool:
        found = list(pool.map(read, names))
        images = tuple(each for each in found if isinstance(each, Contents))
        plans = list(pool.map(read, sorted({plan for image in images for plan in image.plans})))
    unreadable = tuple(each for each in found if isinstance(each, Unreadable))
    if unreadable and not images and all(isinstance(each.error, UnavailableError) for each in unreadable):
        raise unreadable[0].error
    return Survey(
        images,
        tuple(each for each in plans if isinstance(each, Contents)),
        unreadable,
        tuple(each for each in plans if isinstance(each, Unreadable) and not isinstance(each.error, NotFoundError)),
    )


def _plans(reader: Store, target: Descriptor, listed: Collection[str] | None) -> tuple[str, ...]:
    """Where there is no list, names of plans that there may be."""
    names = dict.fromkeys(map(attachment_name, layers_of(reader, target)))
    return tuple(name for name in names if listed is None or name in listed)

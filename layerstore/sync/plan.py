"""What has to be done so that a destination has some references: a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from layerstore.digest import Digest
from layerstore.errors import ConflictError, ImgtoolError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.protocol import Store
from layerstore.store.reach import present_target
from layerstore.store.transfer import LOOKS, missing_blobs
from layerstore.sync.contents import Contents, Survey, Unreadable


class State(StrEnum):
    """How a reference stands at the destination, or will."""

    NEW = "new"
    """It isn't there."""
    PRESENT = "present"
    """It is, and so is all that it reaches: nothing is done."""
    REPLACED = "replaced"
    """It stands for something else, and shall no more."""
    CONFLICT = "conflict"
    """It stands for something else, and stays."""


@dataclass(frozen=True, slots=True)
class Move:
    """What is to be done for a reference.

    Attributes:
        contents: what it is to stand for.
        state: as which it is found.
        found: what it stands for at the destination.
        missing: what the destination lacks of it, in the order of its contents.
        bytes: of what is missing, that no move before it brings.
        blobs: how many these are.
    """

    contents: Contents
    state: State
    found: Descriptor | None = None
    missing: tuple[Descriptor, ...] = ()
    bytes: int = 0
    blobs: int = 0

    @property
    def name(self) -> str:
        return self.contents.name

    @property
    def copies(self) -> bool:
        return self.state in (State.NEW, State.REPLACED)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What is to be done, in order.

    Attributes:
        source: where from, for messages.
        destination: where to.
        images: those that could be read at both sides.
        plans: those of their layers, after them.
        unreadable: images that couldn't be read, at one side or the other.
        unreadable_plans: plans likewise; the images are copied all the same.
    """

    source: str
    destination: str
    images: tuple[Move, ...]
    plans: tuple[Move, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    unreadable_plans: tuple[Unreadable, ...] = field(default=())

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.images + self.plans

    @property
    def bytes(self) -> int:
        return sum(move.bytes for move in self.moves)

    @property
    def blobs(self) -> int:
        return sum(move.blobs for move in self.moves)


def conflict(move: Move, destination: str) -> ConflictError:
    """Why a move is none."""
    assert move.found is not None
    return ConflictError(
        f"reference {move.name!r} in {destination} stands for {move.found.digest}, not "
        f"{move.contents.target.digest}: say to replace it"
    )


def plan_sync(
    surveyed: Survey,
    source: Store,
    destination: Store,
    *,
    replace: bool = False,
    pin: Callable[[Iterable[Digest]], None] = lambda digests: None,
) -> SyncPlan:
    """Compare what was surveyed with what is there.

    Each blob is asked for once; of a reference that stands for the same already, none is: whoever wrote it has seen to
    it that all is there.

    Args:
        surveyed: of the source.
        source: for its name.
        destination: is only read.
        replace: whether references, and plans, to something else may be replaced.
        pin: called with what will be relied on, before it is looked for. A plan that is only printed needs none.

    Raises:
        UnavailableError, PermissionError_: the destination fails.
    """
    images, bad_images = _found(surveyed.images, destination, replace)
    plans, bad_plans = _found(surveyed.plans, destination, replace)
    wanted = {blob.digest: blob for move in images + plans if move.copies for blob in move.contents.blobs}
    pin(wanted)
    missing = {blob.digest for blob in missing_blobs(destination, wanted.values())}
    brought: set[Digest] = set()
    return SyncPlan(
        source.location,
        destination.location,
        tuple(_with_missing(move, missing, brought) for move in images),
        tuple(_with_missing(move, missing, brought) for move in plans),
        surveyed.unreadable + tuple(bad_images),
        surveyed.unreadable_plans + tuple(bad_plans),
    )


def _found(contents: Sequence[Contents], destination: Store, replace: bool) -> tuple[list[Move], list[Unreadable]]:
    def one(each: Contents) -> Move | Unreadable:
        try:
            present = present_target(destination, each.name)
        except ImgtoolError as error:
            return Unreadable(each.name, error)
        if present is None:
            return Move(each, State.NEW)
        if present.digest == each.target.digest:
            return Move(each, State.PRESENT, present)
        return Move(each, State.REPLACED if replace else State.CONFLICT, present)

    with ThreadPoolExecutor(LOOKS, thread_name_prefix="look") as pool:
        found = list(pool.map(one, contents))
    unreadable = [each for each in found if isinstance(each, Unreadable)]
    if unreadable and len(unreadable) == len(found):
        raise unreadable[0].error
    return [each for each in found if isinstance(each, Move)], unreadable


def _with_missing(move: Move, missing: set[Digest], brought: set[Digest]) -> Move:
    if not move.copies:
        return move
    lacking = tuple(blob for blob in move.contents.blobs if blob.digest in missing)
    new = [blob for blob in lacking if blob.digest not in brought]
    brought.update(blob.digest for blob in new)
    return Move(move.contents, move.state, move.found, lacking, sum(blob.size for blob in new), len(new))

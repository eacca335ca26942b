"""Plans in a store, one for each layer: found by the layer, whatever image or stack it is in.

::

    publish(store, plan)     for each part: reference sha256-<hex of the layer>.plan ─▶ artifact ─▶ plan with that part
    fetch(store, layer)      that plan; None where there is none

A layer's plan travels with its images (:func:`layerstore.store.copying.copy_plans`), and goes when the last of them has
gone (:mod:`layerstore.store.collect`). Publishing again replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from layerstore.attachment import EMPTY, Artifact, attached_layer, attachment_name
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    about,
)
from layerstore.image import Image, find_layers, parse_stored, read_document
from layerstore.oci.descriptor import Descriptor
from layerstore.publish import Publisher, current
from layerstore.store.protocol import Store, WriteStore
from layerstore.store.reading import read_blob
from prefetch.plans.format import PLAN_BYTES, PLAN_MEDIA_TYPE, Plan, encode_plan, parse_plan

PLAN_NAME = "org.imgtool.plan.name"
PLAN_DIGEST = "org.imgtool.plan.digest"
"""Of the whole plan that a layer's was part of."""
PLAN_RUNS = "org.imgtool.plan.runs"
"""How many runs it was learned from, in decimal."""


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """What a store says of the plan of a layer, without the plan itself.

    Attributes:
        layer: whose.
        name: what it was trained as.
        plan: digest of the whole plan that it was part of, as it was published.
        runs: how many it was learned from; empty if nothing is said.
        size: bytes of the document.
    """

    layer: Digest
    name: str
    plan: str
    runs: str
    size: int


@dataclass(frozen=True, slots=True)
class FetchedPlans:
    """The plans of the layers of an image.

    Attributes:
        plans: those there are, in the order of the layers.
        missing: layers that have none.
        damaged: why a plan that is there can't be used, one line each.
    """

    plans: tuple[Plan, ...]
    missing: tuple[Digest, ...]
    damaged: tuple[str, ...]


def publish(store: WriteStore, plan: Plan) -> list[Descriptor]:
    """Make each part the plan of its layer, instead of the one that the layer has; what was published, by part.

    All is written before the first reference is set. Then each is replaced for itself: whoever is stopped in between
    publishes again.

    Raises:
        NotFoundError: no image of the store has one of the layers: nobody would find the plan, and nothing would ever
            remove it. Nothing is published.
        ConflictError: somebody else has published one for the layer at the same moment, or the reference stands for an
            image.
        LimitError, MalformedError: no reader would take the plan.
    """
    encode_plan(plan, f"plan {plan.name!r}")
    known = find_layers(store, (part.metadata for part in plan.parts))
    for part in plan.parts:
        if part.metadata not in known:
            raise NotFoundError(
                f"no image in {store.location} has layer {part.metadata} of plan {plan.name!r}: copy or convert it "
                "there first, or remap the plan to an image that is there"
            )
    published = []
    with store.lease() as lease:
        publisher = Publisher(store, lease)
        artifacts = []
        for part in plan.parts:
            name = attachment_name(part.metadata)
            before = _replaceable(store, name)
            data = encode_plan(replace(plan, parts=(part,)), f"plan of layer {part.metadata}")
            content = Descriptor(PLAN_MEDIA_TYPE, publisher.small(data), len(data))
            artifact = Artifact(PLAN_MEDIA_TYPE, part.metadata, (content,), _notes(plan))
            publisher.small(EMPTY)
            publisher.image(artifact, tag=None, expected=None)
            artifacts.append((name, artifact, before))
        for name, artifact, before in artifacts:
            publisher.reference(name, artifact.descriptor(), artifact, expected=before)
            published.append(artifact.descriptor())
    return published


def fetch(store: Store, layer: Digest) -> Plan | None:
    """The plan of a layer; None if it has none. Whoever starts something goes on without on any error.

    Raises:
        CorruptError: something of it is missing or damaged.
        MalformedError, UnsupportedError, LimitError: what is there is no plan of this layer that this release reads.
        UnavailableError, PermissionError_: the store fails.
    """
    found = _resolve(store, layer)
    return None if found is None else _content(store, found)


def look(store: Store, layer: Digest) -> PublishedPlan | None:
    """What is said of the plan of a layer, for who only shows it; None if it has none.

    Raises:
        ImgtoolError: as :func:`fetch`.
    """
    found = _resolve(store, layer)
    if found is None:
        return None
    notes = found.annotations
    size = sum(each.size for each in found.content)
    return PublishedPlan(layer, notes.get(PLAN_NAME, ""), notes.get(PLAN_DIGEST, ""), notes.get(PLAN_RUNS, ""), size)


def fetch_all(store: Store, layers: Iterable[Digest]) -> FetchedPlans:
    """The plans of several layers; what is damaged is said and left out.

    Raises:
        UnavailableError, PermissionError_: the store fails.
    """
    plans, missing, damaged = [], [], []
    for layer in layers:
        try:
            plan = fetch(store, layer)
        except (CorruptError, MalformedError, UnsupportedError, LimitError) as error:
            damaged.append(str(error))
            continue
        if plan is None:
            missing.append(layer)
        else:
            plans.append(plan)
    return FetchedPlans(tuple(plans), tuple(missing), tuple(damaged))


def join(plans: Iterable[Plan], name: str) -> Plan:
    """One plan of those of several layers, bottom first.

    What is said of them is kept where they all say the same: a score is of all parts together.
    """
    plans = list(plans)
    parts = tuple(part for plan in plans for part in plan.parts)
    first = plans[0] if plans else Plan(())
    alike = all((plan.image, plan.manifest, plan.learned, plan.score) == _said(first) for plan in plans)
    return replace(first, parts=parts, name=name) if alike else Plan(parts, name)


def _said(plan: Plan) -> tuple[object, ...]:
    return plan.image, plan.manifest, plan.learned, plan.score


def check_published(store: Store, name: str, artifact: Artifact) -> None:
    """Whether what a reference stands for is a sound plan of the layer that it says.

    Raises:
        ImgtoolError: it isn't; says why.
    """
    layer = attached_layer(name)
    if artifact.layer is None or (layer is not None and layer != artifact.layer):
        raise MalformedError(f"{name!r} is {artifact.described()}, not the plan of the layer that its name says")
    _content(store, artifact)


def _notes(plan: Plan) -> dict[str, str]:
    notes = {PLAN_NAME: plan.name, PLAN_DIGEST: str(plan.digest)}
    runs = plan.learned.get("runs")
    if isinstance(runs, int):
        notes[PLAN_RUNS] = str(runs)
    return notes


def _replaceable(store: Store, name: str) -> Descriptor | None:
    """What the reference stands for, unless that is an image. What can't be read may be replaced: that repairs it."""
    before = current(store, name)
    if before is None:
        return None
    try:
        stored = parse_stored(read_document(store, before, f"manifest of {name!r}"))
    except ImgtoolError:
        return before
    if isinstance(stored, Image):
        raise ConflictError(f"{name!r} in {store.location} is an image: give it another name first")
    return before


def _resolve(store: Store, layer: Digest) -> Artifact | None:
    """The artifact of a layer's plan; None only where the reference doesn't exist."""
    name = attachment_name(layer)
    what = f"plan of layer {layer} in {store.location}"
    target = current(store, name)
    while target is not None:
        try:
            data = read_document(store, target, what)
            break
        except NotFoundError as error:
            again = current(store, name)
            if again is not None and again.digest == target.digest:
                raise CorruptError(f"{what}: its manifest is missing: {error}") from error
            target = again  # replaced or removed, and swept
    else:
        return None
    with about(what):
        stored = parse_stored(data)
        if not isinstance(stored, Artifact) or stored.artifact_type != PLAN_MEDIA_TYPE:
            raise MalformedError(f"{stored.described() if isinstance(stored, Artifact) else 'an image'}, not a plan")
        if stored.layer != layer:
            raise MalformedError(f"it says that it is of layer {stored.layer}")
    return stored


def _content(store: Store, artifact: Artifact) -> Plan:
    what = f"plan of layer {artifact.layer} in {store.location}"
    content = artifact.content
    if len(content) != 1 or content[0].media_type != PLAN_MEDIA_TYPE:
        raise MalformedError(f"{what}: its manifest lists {len(content)} blob(s), where one plan belongs")
    with about(what):
        try:
            data = read_blob(store, content[0], limit=PLAN_BYTES)
        except NotFoundError as error:
            raise CorruptError(f"its content is missing: {error}") from error
    plan = parse_plan(data, what)
    if [part.metadata for part in plan.parts] != [artifact.layer]:
        raise MalformedError(f"{what} has parts of other layers")
    return plan

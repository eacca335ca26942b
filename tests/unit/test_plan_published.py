"""Plans in stores: one for each layer, replaced by who knows what was there, taken along by copies, and never a reason
to keep a layer, to lose one, or to take damage for absence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.httpstore import StoreServer
from support.plans import layer_digest, part, part_of, plan
from support.stores import DAY, SteppedClock, descriptor, put
from support.tars import file, tar

from layerstore.attachment import (
    ATTACHED_LAYER,
    EMPTY,
    EMPTY_MEDIA_TYPE,
    Artifact,
    attached_layer,
    attachment_name,
)
from layerstore.audit import ContentCheck
from layerstore.compose import plan_stack, publish_stack
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    LimitError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from layerstore.image import Layer, Role, all_packs, find_layers, load_image, parse_image, parse_stored
from layerstore.listing import list_images
from layerstore.oci.descriptor import Descriptor
from layerstore.publish import Publisher
from layerstore.store.clock import FileClock
from layerstore.store.collect import collect, plan_collection
from layerstore.store.copying import CopiedPlans, copy, copy_plans
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from layerstore.store.protocol import Store
from layerstore.store.verification import Fault, Finding, verify
from prefetch.plans.format import PLAN_BYTES, PLAN_MEDIA_TYPE, Plan, PlannedRange
from prefetch.plans.published import (
    PLAN_DIGEST,
    PLAN_NAME,
    PLAN_RUNS,
    check_published,
    fetch,
    fetch_all,
    join,
    look,
    publish,
)

BASE = tar(*(file(f"f{number}", noise(30_000, number)) for number in range(3)))
WORK = tar(file("new", noise(30_000, 9)))


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture
def clock(tmp_path: Path) -> SteppedClock:
    return SteppedClock(FileClock(str(tmp_path / "site" / "store" / "clock")))


@pytest.fixture
def site(tmp_path: Path, clock: SteppedClock) -> Site:
    """``base``, ``work`` over it, and ``env`` of both, in a store whose clock can be moved."""
    site = Site(tmp_path / "site", clock=clock)
    source, over = site.image([BASE]), site.image([BASE, WORK])
    site.convert(source, tag="base")
    site.convert(over, Role.WORKSPACE, base="base", tag="work")
    publish_stack(site.store, plan_stack(site.store, base="base", workspace="work"), tag="env")
    return site


def layers(site: Site, name: str = "env") -> tuple[Layer, ...]:
    return load_image(site.store, name).layers


def planned(site: Site, name: str = "start", count: int = 2) -> Plan:
    """A plan for both layers of ``env``."""
    return plan(*(part_of(layer, count) for layer in layers(site)), name=name, gap=0.9)


def only(whole: Plan, number: int) -> Plan:
    """The plan that a store has of one of its layers."""
    return replace(whole, parts=(whole.parts[number],))


def check(store: DirectoryStore) -> list[Finding]:
    return list(verify(store, check=ContentCheck(artifacts={PLAN_MEDIA_TYPE: check_published})))


def sweep(store: DirectoryStore, **fields: float) -> tuple[str, ...]:
    """Collect; the names of the plans that went."""
    made = plan_collection(store, **fields)
    expected = tuple(reference.name for reference in made.orphans)
    result = collect(store, made)
    assert result.orphans == expected and result.spared == ()
    return result.orphans


# -- the artifact -----------------------------------------------------------------------------------------------------


def test_the_name_of_a_layers_plan_tells_the_layer() -> None:
    for layer in (layer_digest(1), Digest("sha512", "ab" * 64)):
        assert attached_layer(attachment_name(layer)) == layer
    assert attachment_name(layer_digest(1)) == f"sha256-{layer_digest(1).hex}.plan"
    hex = "0" * 64
    for name in ("base", f"sha256-{hex}", f"sha256-{hex}.sig", f"x/sha256-{hex}.plan", f"sha256-{hex[1:]}.plan"):
        assert attached_layer(name) is None


def test_an_artifact_is_an_oci_manifest_that_names_its_type(site: Site) -> None:
    whole = planned(site)
    [first, second] = publish(site.store, whole)
    layer = layers(site)[0].metadata
    assert site.store.resolve(attachment_name(layer)) == first != second
    with site.store.open(first.digest) as blob:
        document = json.loads(blob.read_at(0, blob.size))
    content = only(whole, 0).to_bytes()
    assert document == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.imgtool.plan.v1+json",
        "config": {"mediaType": EMPTY_MEDIA_TYPE, "digest": str(Digest.of(b"{}")), "size": 2},
        "layers": [{"mediaType": PLAN_MEDIA_TYPE, "digest": str(Digest.of(content)), "size": len(content)}],
        "annotations": {
            ATTACHED_LAYER: str(layer),
            PLAN_NAME: "start",
            PLAN_DIGEST: str(whole.digest),
            PLAN_RUNS: "3",
        },
    }
    assert Digest.of(b"{}") in site.blobs(), "what the manifest lists is there"
    artifact = parse_stored(json.dumps(document).encode())
    assert isinstance(artifact, Artifact) and artifact.descriptor() == first
    assert (artifact.layer, artifact.annotations[PLAN_NAME]) == (layer, "start")


@pytest.mark.parametrize("layer", ["sha256:x", "", "md5:" + "0" * 32])
def test_an_artifact_whose_layer_is_no_digest_is_malformed(layer: str) -> None:
    artifact = Artifact(PLAN_MEDIA_TYPE, None, (), {ATTACHED_LAYER: layer})
    with pytest.raises(MalformedError, match=r"org\.imgtool\.layer"):
        parse_stored(artifact.manifest())


def test_an_artifact_is_no_image_and_the_message_says_what_it_is(site: Site) -> None:
    publish(site.store, planned(site))
    layer = layers(site)[0].metadata
    name = attachment_name(layer)
    with pytest.raises(UnsupportedError, match=rf"'{name}': an artifact of type '.*plan.*' for layer {layer}, not an"):
        load_image(site.store, name)
    with pytest.raises(UnsupportedError, match=r"^an artifact of type 'other\\x0a…?', not an image|other\\x0a"):
        parse_image(Artifact("other\n", None, ()).manifest())


# -- publish and fetch ------------------------------------------------------------------------------------------------


def test_what_is_published_is_fetched_by_layer(site: Site) -> None:
    whole = planned(site)
    assert all(fetch(site.store, layer.metadata) is None for layer in layers(site))
    publish(site.store, whole)
    for number, layer in enumerate(layers(site)):
        assert fetch(site.store, layer.metadata) == only(whole, number)
        said = look(site.store, layer.metadata)
        assert said is not None
        assert (said.name, said.plan, said.runs) == ("start", str(whole.digest), "3")
        assert said.size == len(only(whole, number).to_bytes())
    assert fetch(site.store, layer_digest(1)) is None and look(site.store, layer_digest(1)) is None
    assert site.leftovers() == []


def test_publishing_again_replaces_and_twice_the_same_is_once(site: Site) -> None:
    publish(site.store, planned(site))
    before = site.snapshot()
    publish(site.store, planned(site))
    assert site.snapshot() == before
    publish(site.store, planned(site, "better", 5))
    found = fetch(site.store, layers(site)[1].metadata)
    assert found == only(planned(site, "better", 5), 1)


def test_a_layer_that_no_image_of_the_store_has_is_refused_before_anything_is_written(site: Site) -> None:
    before = site.snapshot()
    whole = replace(planned(site), parts=(*planned(site).parts, part(7)))
    with pytest.raises(NotFoundError, match=f"no image in .* has layer {layer_digest(7)} of plan 'start'"):
        publish(site.store, whole)
    assert site.snapshot() == before


def test_what_no_reader_would_take_is_not_published(site: Site) -> None:
    before = site.snapshot()
    one = part_of(layers(site)[0])
    long = PlannedRange(1, 0, 4096, 0, 1, "p" * PLAN_BYTES)
    with pytest.raises(LimitError):
        publish(site.store, plan(replace(one, ranges=(long,))))
    with pytest.raises(MalformedError):
        publish(site.store, plan(one, one))
    assert site.snapshot() == before


def test_two_publishers_at_once_don_t_overwrite_each_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds something else than it replaces, and says so; the first one's plan stays."""
    mine, theirs = planned(site, "mine"), planned(site, "theirs")
    set_reference = DirectoryStore.set_reference

    def late(store: DirectoryStore, name: str, target: Descriptor, **fields: object) -> None:
        monkeypatch.setattr(DirectoryStore, "set_reference", set_reference)
        publish(site.store, theirs)
        set_reference(store, name, target, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryStore, "set_reference", late)
    with pytest.raises(ConflictError):
        publish(site.store, mine)
    assert fetch(site.store, layers(site)[0].metadata) == only(theirs, 0)
    assert site.leftovers() == []


def test_an_image_of_that_name_is_not_replaced(site: Site) -> None:
    layer = layers(site)[0]
    image = load_image(site.store, "base")
    with site.store.lease() as lease:
        Publisher(site.store, lease).reference(
            attachment_name(layer.metadata), site.store.resolve("base"), image, expected=None
        )
    with pytest.raises(ConflictError, match="is an image"):
        publish(site.store, planned(site))
    with pytest.raises(MalformedError, match="an image, not a plan"):
        fetch(site.store, layer.metadata)


def test_several_plans_become_one(site: Site) -> None:
    whole = planned(site)
    publish(site.store, whole)
    found = fetch_all(site.store, [*(layer.metadata for layer in layers(site)), layer_digest(1)])
    assert (found.missing, found.damaged) == ((layer_digest(1),), ())
    assert join(found.plans, "start") == whole
    other = join([only(whole, 0), replace(only(whole, 1), score={})], "mixed")
    assert other == Plan(whole.parts, "mixed"), "what isn't said of all parts is said of none"
    assert join([], "nothing") == Plan((), "nothing")


# -- damage is never absence ------------------------------------------------------------------------------------------


def _artifact(site: Site, *content: Descriptor, layer: Digest | None = None, kind: str = PLAN_MEDIA_TYPE) -> None:
    """Publish one by hand, under the name of the base's plan."""
    name = attachment_name(layers(site)[0].metadata)
    artifact = Artifact(kind, layer or layers(site)[0].metadata, content)
    with site.store.lease() as lease:
        publisher = Publisher(site.store, lease)
        publisher.small(EMPTY)
        publisher.image(artifact, tag=name, expected=None)


def _content(site: Site, data: bytes, media_type: str = PLAN_MEDIA_TYPE) -> Descriptor:
    put(site.store, data)
    return descriptor(data, media_type)


Damage = Callable[[Site], None]


def _no_content(site: Site) -> None:
    _artifact(site)


def _two_contents(site: Site) -> None:
    _artifact(site, _content(site, b"a"), _content(site, b"b"))


def _content_of_another_type(site: Site) -> None:
    _artifact(site, _content(site, only(planned(site), 0).to_bytes(), "text/plain"))


def _another_artifact(site: Site) -> None:
    _artifact(site, _content(site, only(planned(site), 0).to_bytes()), kind="application/vnd.other")


def _plan_of_another_layer(site: Site) -> None:
    _artifact(site, _content(site, only(planned(site), 1).to_bytes()))


def _artifact_of_another_layer(site: Site) -> None:
    layer = layers(site)[1].metadata
    _artifact(site, _content(site, only(planned(site), 1).to_bytes()), layer=layer)


def _whole_plan(site: Site) -> None:
    _artifact(site, _content(site, planned(site).to_bytes()))


def _no_plan(site: Site) -> None:
    _artifact(site, _content(site, b"{}"))


MALFORMED: list[Damage] = [
    _no_content, _two_contents, _content_of_another_type, _another_artifact, _plan_of_another_layer,
    _artifact_of_another_layer, _whole_plan, _no_plan,
]  # fmt: skip


@pytest.mark.parametrize("damage", MALFORMED)
def test_what_is_no_plan_of_the_layer_is_malformed(site: Site, damage: Damage) -> None:
    damage(site)
    layer = layers(site)[0].metadata
    with pytest.raises(MalformedError, match=str(layer)):
        fetch(site.store, layer)
    found = fetch_all(site.store, [layer, layers(site)[1].metadata])
    assert (found.plans, len(found.damaged), found.missing) == ((), 1, (layers(site)[1].metadata,))
    if damage is not _another_artifact:  # of which verify knows nothing but its blobs
        [finding] = check(site.store)
        assert (finding.fault, finding.reference) == (Fault.CONTENT, attachment_name(layer))
    else:
        assert check(site.store) == []


def _flip_content(site: Site, whole: Plan) -> None:
    site.flip(Digest.of(only(whole, 0).to_bytes()))


def _remove_content(site: Site, whole: Plan) -> None:
    site.blob_path(Digest.of(only(whole, 0).to_bytes())).unlink()


def _cut_content(site: Site, whole: Plan) -> None:
    os.truncate(site.blob_path(Digest.of(only(whole, 0).to_bytes())), 10)


def _flip_manifest(site: Site, whole: Plan) -> None:
    site.flip(site.store.resolve(attachment_name(layers(site)[0].metadata)).digest)


def _remove_manifest(site: Site, whole: Plan) -> None:
    site.blob_path(site.store.resolve(attachment_name(layers(site)[0].metadata)).digest).unlink()


def _tear_reference(site: Site, whole: Plan) -> None:
    Path(site.store.root, "refs", attachment_name(layers(site)[0].metadata)).write_bytes(b"{")


CORRUPT: list[Callable[[Site, Plan], None]] = [
    _flip_content, _remove_content, _cut_content, _flip_manifest, _remove_manifest, _tear_reference,
]  # fmt: skip


@pytest.mark.parametrize("damage", CORRUPT)
def test_damage_is_corrupt_and_never_missing(site: Site, damage: Callable[[Site, Plan], None]) -> None:
    whole = planned(site)
    publish(site.store, whole)
    damage(site, whole)
    base, work = (layer.metadata for layer in layers(site))
    with pytest.raises(CorruptError):
        fetch(site.store, base)
    found = fetch_all(site.store, [base, work])
    assert (found.plans, len(found.damaged)) == ((only(whole, 1),), 1)
    assert check(site.store) != []
    if damage is not _tear_reference:
        publish(site.store, whole)
        assert fetch(site.store, base) == only(whole, 0), "publishing again repairs"
        assert check(site.store) == []


def test_a_plan_that_is_replaced_while_it_is_fetched_is_the_new_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layers(site)[0].metadata
    publish(site.store, planned(site, "old"))
    resolve = site.store.resolve
    old = resolve(attachment_name(layer))

    def slow(name: str) -> Descriptor:
        monkeypatch.setattr(site.store, "resolve", resolve)
        publish(site.store, planned(site, "new"))
        site.blob_path(old.digest).unlink()
        return old

    monkeypatch.setattr(site.store, "resolve", slow)
    found = fetch(site.store, layer)
    assert found is not None and found.name == "new"


# -- stores and what walks them ---------------------------------------------------------------------------------------


@pytest.mark.case("P03")
def test_a_plan_survives_copies_stacks_and_http(site: Site, tmp_path: Path) -> None:
    """Copy there and back, compose what was copied, serve it: what is fetched is what was published."""
    whole = planned(site)
    publish(site.store, whole)
    there = DirectoryStore.create(str(tmp_path / "there"))
    for name in ("base", "work"):
        copy(name, site.store, there)
        copied = copy_plans([layer.metadata for layer in load_image(there, name).layers], site.store, there)
        assert (len(copied.copied), copied.kept, copied.failed) == (1, (), ())
    publish_stack(there, plan_stack(there, base="base", workspace="work"), tag="stack")
    back = DirectoryStore.create(str(tmp_path / "back"))
    copy("stack", there, back)
    stack = [layer.metadata for layer in load_image(back, "stack").layers]
    assert len(copy_plans(stack, there, back).copied) == 2

    def fetched(store: Store) -> Plan:
        found = fetch_all(store, stack)
        assert (found.missing, found.damaged) == ((), ())
        return join(found.plans, "start")

    for store in (site.store, there, back):
        assert fetched(store) == whole
        assert fetched(store).digest == whole.digest
    with StoreServer(back.root) as server, closing(HttpStore(server.url)) as remote:
        assert fetched(remote) == whole
    planned_bytes = sum(each.bytes for each in whole.parts)
    assert planned_bytes == sum(each.bytes for each in fetched(back).parts) == 4 * 4096, "and it is no empty one"
    assert check(there) == check(back) == []


def test_over_http_only_missing_means_that_there_is_none(site: Site) -> None:
    publish(site.store, planned(site))
    base, work = (layer.metadata for layer in layers(site))
    Path(site.store.root, "refs", attachment_name(work)).unlink()
    with StoreServer(site.store.root) as server, closing(HttpStore(server.url)) as store:
        assert fetch(store, base) == only(planned(site), 0)
        assert fetch(store, work) is None
        site.flip(Digest.of(only(planned(site), 0).to_bytes()))
        with pytest.raises(CorruptError):
            fetch(store, base)
        os.rename(Path(site.store.root, "store.json"), Path(site.store.root, "elsewhere"))
        with pytest.raises(UnavailableError):
            fetch(store, work)


def test_copies_keep_what_the_other_store_has_unless_told(site: Site, tmp_path: Path) -> None:
    there = DirectoryStore.create(str(tmp_path / "there"))
    copy("env", site.store, there)
    wanted = [layer.metadata for layer in layers(site)]
    assert copy_plans(wanted, site.store, there) == CopiedPlans()
    publish(site.store, planned(site, "ours"))
    publish(there, only(planned(site, "theirs"), 0))
    copied = copy_plans(wanted, site.store, there)
    assert (copied.copied, copied.kept) == ((wanted[1],), (wanted[0],))
    assert fetch(there, wanted[0]) == only(planned(site, "theirs"), 0)
    copied = copy_plans(wanted, site.store, there, replace=True)
    assert (copied.copied, copied.present) == ((wanted[0],), (wanted[1],))
    assert fetch(there, wanted[0]) == only(planned(site, "ours"), 0)


def test_a_damaged_plan_is_left_behind_and_said(site: Site, tmp_path: Path) -> None:
    whole = planned(site)
    publish(site.store, whole)
    site.flip(Digest.of(only(whole, 0).to_bytes()))
    there = DirectoryStore.create(str(tmp_path / "there"))
    copy("env", site.store, there)
    wanted = [layer.metadata for layer in layers(site)]
    copied = copy_plans(wanted, site.store, there)
    assert (copied.copied, len(copied.failed)) == ((wanted[1],), 1)
    assert fetch(there, wanted[0]) is None and check(there) == []


def test_conversions_and_searches_pass_plans_by(site: Site) -> None:
    publish(site.store, planned(site))
    unreadable: list[str] = []
    packs = {pack.digest for pack in all_packs(site.store, unreadable)}
    assert packs == {pack.digest for layer in layers(site) for pack in layer.packs} and unreadable == []
    warnings: list[str] = []
    site.convert(site.tar(file("other", noise(30_000, 1))), tag="other", warn=warnings.append)
    assert warnings == []
    wanted = layers(site)[1]
    assert find_layers(site.store, [wanted.metadata, layer_digest(1)]) == {wanted.metadata: wanted}


def test_a_listing_tells_images_from_artifacts(site: Site) -> None:
    plain = list_images(site.store)
    assert [item.name for item in plain.images] == ["base", "env", "work"] and plain.artifacts == ()
    assert all(item.planned == () for item in plain.images)
    whole = planned(site)
    publish(site.store, only(whole, 0))
    listing = list_images(site.store)
    base = layers(site)[0].metadata
    assert [(item.name, item.planned, item.error) for item in listing.images] == [
        ("base", (base,), None),
        ("env", (base,), None),
        ("work", (), None),
    ]
    assert [(item.size, item.own_size) for item in listing.images] == [
        (item.size, item.own_size) for item in plain.images
    ]
    [artifact] = listing.artifacts
    assert (artifact.name, artifact.artifact.layer) == (attachment_name(base), base)
    assert artifact.size == len(only(whole, 0).to_bytes()) + site.store.resolve(artifact.name).size


def test_a_sound_store_with_plans_verifies(site: Site) -> None:
    publish(site.store, planned(site))
    assert check(site.store) == []


# -- collection -------------------------------------------------------------------------------------------------------


def test_a_plan_keeps_its_own_blobs_and_no_layer(site: Site, clock: SteppedClock) -> None:
    whole = planned(site)
    publish(site.store, whole)
    clock.advance(DAY)
    before = site.snapshot()
    assert sweep(site.store) == () and site.snapshot() == before
    base, work = layers(site)
    for name in ("env", "work"):
        site.store.delete_reference(name, expected=site.store.resolve(name))
    made = plan_collection(site.store)
    assert [reference.name for reference in made.orphans] == [attachment_name(work.metadata)]
    assert {work.blob, Digest.of(only(whole, 1).to_bytes())} <= {blob.digest for blob in made.doomed}
    assert made.references == 2
    assert site.snapshot()[1].keys() == {"base", attachment_name(base.metadata), attachment_name(work.metadata)}
    assert collect(site.store, made).orphans == (attachment_name(work.metadata),)
    assert work.blob not in site.blobs() and base.blob in site.blobs()
    assert site.snapshot()[1].keys() == {"base", attachment_name(base.metadata)}
    assert fetch(site.store, base.metadata) == only(whole, 0), "the empty config is shared, and stays"
    assert check(site.store) == []


def test_a_replaced_plan_is_swept_and_the_new_one_stays(site: Site, clock: SteppedClock) -> None:
    publish(site.store, planned(site, "old", 5))
    publish(site.store, planned(site, "new"))
    clock.advance(DAY)
    assert sweep(site.store) == ()
    assert Digest.of(only(planned(site, "old", 5), 0).to_bytes()) not in site.blobs()
    assert fetch(site.store, layers(site)[0].metadata) == only(planned(site, "new"), 0)


def test_a_young_plan_stays_though_its_layer_has_gone(site: Site) -> None:
    whole = planned(site)
    publish(site.store, whole)
    for name in ("env", "work"):
        site.store.delete_reference(name, expected=site.store.resolve(name))
    before = site.snapshot()
    made = plan_collection(site.store)
    assert made.orphans == () and made.doomed == ()
    assert {blob.digest for blob in made.young}.isdisjoint({Digest.of(only(whole, 1).to_bytes())})
    collect(site.store, made)
    assert site.snapshot() == before


def test_a_plan_whose_layer_comes_back_in_time_stays(site: Site, clock: SteppedClock) -> None:
    publish(site.store, planned(site))
    targets = {name: site.store.resolve(name) for name in ("env", "work")}
    for name, target in targets.items():
        site.store.delete_reference(name, expected=target)
    clock.advance(DAY)
    made = plan_collection(site.store)
    assert len(made.orphans) == 1
    with site.store.lease() as lease:
        image = parse_image(_read(site.store, targets["work"]))
        Publisher(site.store, lease).reference("work", targets["work"], image, expected=None)
    result = collect(site.store, made)
    assert result.orphans == () and fetch(site.store, image.layers[-1].metadata) is not None
    assert check(site.store) == []


def test_a_plan_that_is_published_anew_meanwhile_stays(site: Site, clock: SteppedClock) -> None:
    whole = planned(site)
    publish(site.store, whole)
    work = layers(site)[1]
    envs = site.store.resolve("env")
    for name in ("env", "work"):
        site.store.delete_reference(name, expected=site.store.resolve(name))
    clock.advance(DAY)
    made = plan_collection(site.store)
    with site.store.lease() as lease:  # its image is there for a moment, and a better plan is published
        image = parse_image(_read(site.store, envs))
        Publisher(site.store, lease).reference("env", envs, image, expected=None)
    publish(site.store, only(replace(whole, name="better"), 1))
    site.store.delete_reference("env", expected=envs)
    assert collect(site.store, made).orphans == ()
    assert fetch(site.store, work.metadata) == only(replace(whole, name="better"), 1)


def test_an_image_that_is_called_like_a_plan_is_kept(site: Site, clock: SteppedClock) -> None:
    image = load_image(site.store, "base")
    name = attachment_name(layer_digest(1))
    target = site.store.resolve("base")
    with site.store.lease() as lease:
        Publisher(site.store, lease).reference(name, target, image, expected=None)
    for other in ("env", "work", "base"):
        site.store.delete_reference(other, expected=site.store.resolve(other))
    clock.advance(DAY)
    assert sweep(site.store) == ()
    assert site.store.resolve(name) == target and image.layers[0].blob in site.blobs()


def test_a_store_with_nothing_but_plans_is_not_swept_unless_forced(site: Site, clock: SteppedClock) -> None:
    publish(site.store, planned(site))
    for name in ("env", "work", "base"):
        site.store.delete_reference(name, expected=site.store.resolve(name))
    clock.advance(DAY)
    with pytest.raises(ConflictError, match="no references"):
        plan_collection(site.store)
    assert len(collect(site.store, plan_collection(site.store, force=True)).orphans) == 2
    assert site.blobs() == {} and list(site.store.names()) == []


def test_a_plan_that_cannot_be_read_stops_the_collection(site: Site, clock: SteppedClock) -> None:
    publish(site.store, planned(site))
    site.flip(site.store.resolve(attachment_name(layers(site)[0].metadata)).digest)
    clock.advance(DAY)
    before = site.snapshot()
    with pytest.raises(ImgtoolError):
        plan_collection(site.store)
    assert site.snapshot() == before


def _read(store: Store, target: Descriptor) -> bytes:
    with store.open(target.digest) as blob:
        return blob.read_at(0, blob.size)

"""What is particular to stores in registries; what they share with all stores is in the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.httpstore import Exchange, StoreServer, status
from support.registries import IMPATIENT, NOBODY
from support.registry_faults import FakeRegistry, Repository
from support.stores import (
    MANIFEST,
    Sample,
    assert_sound,
    document,
    image,
    index,
    packed,
    publish,
    put,
    put_missing,
    unpublish,
)

from layerstore.attachment import Artifact, attached_layer, attachment_name
from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.registry.address import RegistryAddress, is_loopback
from layerstore.registry.referrers import fallback_tag
from layerstore.registry.tags import TAG_LIMIT, decode_tag, encode_tag
from layerstore.store.copying import copy
from layerstore.store.memory import MemoryStore
from layerstore.store.protocol import PruneStore, SizedStore, WriteStore
from layerstore.store.registry import START_BYTES, RegistryStore


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def store(registry: FakeRegistry) -> Iterator[RegistryStore]:
    store = open_store(registry)
    yield store
    store.close()


def open_store(registry: FakeRegistry, repository: str = "team/images") -> RegistryStore:
    return RegistryStore(f"oci://{registry.host}/{repository}", docker_config=NOBODY, patience=IMPATIENT)


def there(registry: FakeRegistry) -> Repository:
    return registry.repository("team/images")


def test_it_writes_and_does_not_collect(store: RegistryStore) -> None:
    assert isinstance(store, WriteStore)
    assert isinstance(store, SizedStore)
    assert not isinstance(store, PruneStore)
    assert store.location.startswith("oci://127.0.0.1:")
    assert not store.exclusive


# Names


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("debian-12", "debian-12"),
        ("v1.2_3", "v1.2_3"),
        ("team/repo:2024.1", "_team_.repo_-2024.1"),
        ("a_b/c", "_a__b_.c"),
        ("a:b", "_a_-b"),
        ("a/b/c", "_a_.b_.c"),
        ("sha256-" + "1" * 64 + ".plan", "sha256-" + "1" * 64 + ".plan"),
        ("x" * 128, "x" * 128),
    ],
)
def test_names_are_tags(name: str, tag: str) -> None:
    assert encode_tag(name) == tag
    assert decode_tag(tag) == name


@pytest.mark.parametrize("name", ["x" * 129, "a/" * 50 + "b" * 50, "a:" + "_" * 64, "sha256-" + "1" * 64])
def test_names_that_a_registry_can_not_have(store: RegistryStore, name: str) -> None:
    with pytest.raises(UsageError):
        encode_tag(name)
    sample = image(b"layer")
    with pytest.raises(UsageError):
        publish_as(store, name, sample)
    with pytest.raises(NotFoundError):
        store.resolve(name)
    with pytest.raises(NotFoundError):
        store.delete_reference(name, expected=sample.target)
    assert TAG_LIMIT == 128


def publish_as(store: RegistryStore, name: str, sample: Sample) -> None:
    put_missing(store, sample)
    with store.lease() as lease:
        store.set_reference(name, sample.target, expected=None, lease=lease, reaches=sample.blobs)


@pytest.mark.parametrize(
    "tag", ["_", "_a", "_a_", "__a", "_a_.", "_a_xb", "_-a", "_a_.b_", "", ".a", "-a", "sha256-" + "1" * 64]
)
def test_tags_of_others_that_are_no_names(tag: str) -> None:
    assert decode_tag(tag) is None


def test_tags_of_others_are_left_alone(registry: FakeRegistry, store: RegistryStore) -> None:
    publish(store, "a/b", image(b"layer"))
    there(registry).tags |= {"_foreign": there(registry).tags["_a_.b"], "v1": there(registry).tags["_a_.b"]}
    assert list(store.names()) == ["a/b", "v1"]
    assert [each.name for each in store.references()] == ["a/b", "v1"]


def test_ten_thousand_references_are_listed(registry: FakeRegistry, store: RegistryStore) -> None:
    publish(store, "first", image(b"layer"))
    there(registry).tags |= {f"_team_.{n:05}": there(registry).tags["first"] for n in range(10_000)}
    registry.forget()
    names = list(store.names())
    assert len(names) == 10_001
    assert names[1:3] == ["team/00000", "team/00001"]
    assert len(registry.requests()) == 11


# Reading and writing, by requests


def test_a_document_by_name_costs_one_request(registry: FakeRegistry, store: RegistryStore) -> None:
    sample = image(b"layer")
    publish(store, "name", sample)
    registry.forget()
    other = open_store(registry)
    target = other.resolve("name")
    with other.open(target.digest) as blob:
        assert blob.read_at(0, blob.size) == sample.blobs[target.digest]
    assert registry.requests() == ["GET /v2/team/images/manifests/name"]
    with other.open(target.digest) as blob:  # that was once; now it is asked for again
        assert blob.size == target.size
    assert registry.requests()[1:] == [f"GET /v2/team/images/manifests/{target.digest}"]
    other.close()


def test_a_small_blob_costs_one_request_and_a_large_one_a_request_a_read(
    registry: FakeRegistry, store: RegistryStore
) -> None:
    small, large = os.urandom(START_BYTES), os.urandom(1_000_000)
    for data in (small, large):
        digest = put(store, data)
        registry.forget()
        with store.open(digest) as blob:
            assert blob.read_at(0, START_BYTES) == data[:START_BYTES]
            assert len(registry.requests()) == 1
            assert blob.read_at(100, len(data) - 100) == data[100:]
        assert len(registry.requests()) == (1 if data is small else 2)
    assert registry.connections == 0  # those that there were have been kept


def test_a_blob_of_known_size_is_opened_without_a_request(registry: FakeRegistry, store: RegistryStore) -> None:
    data = os.urandom(100_000)
    digest = put(store, data)
    sample = image(b"layer")
    publish(store, "name", sample)
    registry.forget()
    other = open_store(registry)
    with other.open_sized(digest, len(data)) as blob:
        assert registry.requests() == []
        assert blob.read_at(5, 10) == data[5:15]
    with other.open_sized(sample.target.digest, sample.target.size) as blob:  # a manifest, which nobody has said
        assert blob.read_at(0, blob.size) == sample.blobs[sample.target.digest]
    with other.open_sized(digest, 5) as blob, pytest.raises(CorruptError, match=digest.hex):
        blob.read_at(0, 5)
    with other.open_sized(Digest.of(b"nowhere"), 5) as blob, pytest.raises(NotFoundError):
        blob.read_at(0, 5)
    other.close()


def test_publishing_what_is_there_costs_a_handful_of_requests(registry: FakeRegistry, store: RegistryStore) -> None:
    sample = image(*(os.urandom(100_000) for _ in range(10)))
    publish(store, "one", sample)
    registry.forget()
    other = open_store(registry)
    with other.lease() as lease:
        lease.pin(sample.blobs)
        put_missing(other, sample)
        other.set_reference("two", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    other.close()
    looks = [line for line in registry.requests() if line.startswith("HEAD") and "/two" not in line]
    assert len(looks) == len(sample.blobs) + 1  # each blob, and the manifest that isn't one
    assert len(registry.requests()) - len(looks) == 3


def test_a_large_blob_that_is_there_is_not_sent_again(registry: FakeRegistry, store: RegistryStore) -> None:
    data = os.urandom(200_000)
    put(store, data)
    registry.forget()
    put(store, data)
    assert registry.requests() == []
    other = open_store(registry)
    put(other, data)
    other.close()
    assert registry.requests() == [f"HEAD /v2/team/images/blobs/{Digest.of(data)}"]


def test_uploads_are_spooled_and_nothing_is_left(registry: FakeRegistry, store: RegistryStore) -> None:
    data = os.urandom(9 << 20)
    digest = put(store, data)
    assert there(registry).blobs[str(digest)] == data
    assert there(registry).uploads == {}
    with store.scratch() as scratch:
        assert os.listdir(scratch) == []


# Manifests


def test_an_image_is_a_manifest_even_without_a_name(registry: FakeRegistry, store: RegistryStore) -> None:
    sample = image(b"layer")
    put_missing(store, sample)
    assert there(registry).manifests == {str(sample.target.digest): (MANIFEST, sample.blobs[sample.target.digest])}
    assert str(sample.target.digest) not in there(registry).blobs


def test_what_came_before_its_layers_becomes_a_manifest_later(registry: FakeRegistry, store: RegistryStore) -> None:
    sample = index(image(b"one"), image(b"two"))
    for data in reversed(sample.blobs.values()):
        put(store, data)
    assert str(sample.target.digest) in there(registry).blobs
    with store.lease() as lease:
        store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    assert len(there(registry).manifests) == 3
    assert assert_sound(store) == sample.blobs.keys()


@pytest.mark.case("R13")
def test_a_blob_that_is_a_lie_is_named_and_looked_for_again(registry: FakeRegistry, store: RegistryStore) -> None:
    sample = image(b"layer")
    put_missing(store, sample)
    layer = Digest.of(b"layer")
    del there(registry).blobs[str(layer)]
    del there(registry).manifests[str(sample.target.digest)]
    there(registry).blobs[str(sample.target.digest)] = sample.blobs[sample.target.digest]
    with store.lease() as lease, pytest.raises(ConflictError, match=f"MANIFEST_BLOB_UNKNOWN|{layer.hex}"):
        store.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
    assert list(store.names()) == []
    publish(store, "name", sample)
    assert assert_sound(store) == sample.blobs.keys()


@pytest.mark.case("R13")
def test_a_manifest_that_is_needed_as_a_blob_is_sent_once_more(registry: FakeRegistry, store: RegistryStore) -> None:
    inner = image(b"layer")
    data = inner.blobs[inner.target.digest]
    outer = document(
        {
            "config": Descriptor("application/vnd.oci.empty.v1+json", Digest.of(b"{}"), 2).to_json(),
            "layers": [Descriptor("application/octet-stream", inner.target.digest, len(data)).to_json()],
        },
        [b"{}", inner],
    )
    publish(store, "outer", outer)
    assert there(registry).blobs[str(inner.target.digest)] == data
    assert store.resolve("outer").digest == outer.target.digest


def test_an_attached_plan_is_an_artifact_under_its_name(registry: FakeRegistry, store: RegistryStore) -> None:
    layer, content = Digest.of(b"metadata"), b"plan"
    artifact = Artifact("application/vnd.test.plan", layer, (Descriptor("text/plain", Digest.of(content), 4),), {})
    blobs = {Digest.of(content): content, Digest.of(b"{}"): b"{}"}
    target = artifact.descriptor()
    publish(store, attachment_name(layer), Sample(target, {**blobs, target.digest: artifact.manifest()}))
    assert list(store.names()) == [attachment_name(layer)]
    assert attached_layer(next(store.names())) == layer
    assert store.resolve(attachment_name(layer)).digest == target.digest


@pytest.mark.case("R12")
def test_a_subject_gets_its_list_of_referrers(registry: FakeRegistry, store: RegistryStore) -> None:
    subject = image(b"layer")
    publish(store, "subject", subject)
    fields: dict[str, object] = {
        "artifactType": "application/vnd.test",
        "config": Descriptor("application/vnd.oci.empty.v1+json", Digest.of(b"{}"), 2).to_json(),
        "layers": [],
        "subject": subject.target.to_json(),
    }
    referrer = document(fields, [b"{}"])
    publish(store, "referrer", referrer)
    assert [each.digest for each in store.referrers.of(subject.target.digest)] == [referrer.target.digest]
    assert fallback_tag(subject.target.digest) in there(registry).tags
    assert list(store.names()) == ["referrer", "subject"]


def test_a_packs_raw_form_is_not_missed(registry: FakeRegistry, store: RegistryStore) -> None:
    registry.validates = False
    publish(store, "name", packed(b"raw", b"packed"))
    assert len(assert_sound(store)) == 2


# Copies


def test_copies_are_the_same_image(registry: FakeRegistry, store: RegistryStore) -> None:
    memory, other = MemoryStore(), open_store(registry, "other")
    sample = index(image(b"one"), image(b"two", b"three"))
    publish(memory, "a/b:1", sample)
    assert copy("a/b:1", memory, store).blobs == len(sample.blobs)
    assert copy("a/b:1", store, other, rename="copy").blobs == len(sample.blobs)
    back = MemoryStore()
    copy("copy", other, back)
    assert back.resolve("copy").digest == sample.target.digest
    assert assert_sound(back) == assert_sound(other) == sample.blobs.keys()
    other.close()


@pytest.mark.case("R13")
def test_a_blob_of_another_repository_moves_no_bytes(registry: FakeRegistry, store: RegistryStore) -> None:
    data = os.urandom(100_000)
    digest = put(store, data)
    other = open_store(registry, "other")
    assert other.mount(digest, len(data), "team/images")
    assert other.stat(digest) == len(data)
    assert not other.mount(Digest.of(b"nowhere"), 7, "team/images")
    assert registry.repository("other").uploads == {}
    other.close()


# Deleting


@pytest.mark.parametrize("deletes", ["tags", "manifests"])
def test_a_name_is_deleted(registry: FakeRegistry, store: RegistryStore, deletes: str) -> None:
    registry.deletes = deletes
    publish(store, "a/b", image(b"1"))
    publish(store, "c", image(b"2"))
    unpublish(store, "a/b")
    assert list(store.names()) == ["c"]


def test_a_tag_that_goes_alone_leaves_the_others(registry: FakeRegistry, store: RegistryStore) -> None:
    for name in ("one", "two"):
        publish(store, name, image(b"same"))
    unpublish(store, "one")
    assert list(store.names()) == ["two"]
    assert len(there(registry).manifests) == 1


def test_a_manifest_that_others_need_is_not_deleted(registry: FakeRegistry, store: RegistryStore) -> None:
    registry.deletes = "manifests"
    sample = image(b"same")
    publish(store, "one", sample)
    publish(store, "two", sample)
    with pytest.raises(UnsupportedError, match=r"'one' stays .*tag two needs this one"):
        unpublish(store, "one")
    publish(store, "two", index(index(sample)))
    with pytest.raises(UnsupportedError, match="the index of tag two needs this one"):
        unpublish(store, "one")
    assert list(store.names()) == ["one", "two"]
    unpublish(store, "two")
    unpublish(store, "one")
    assert list(store.names()) == []


def test_a_registry_that_deletes_nothing_says_so(registry: FakeRegistry, store: RegistryStore) -> None:
    registry.deletes = "nothing"
    publish(store, "one", image(b"1"))
    with pytest.raises(UnsupportedError, match=r"storage\.delete\.enabled"):
        unpublish(store, "one")
    assert list(store.names()) == ["one"]


# Writers at once


def test_a_condition_is_sent_where_the_registry_takes_it(registry: FakeRegistry, store: RegistryStore) -> None:
    registry.conditions = True
    first, second = image(b"1"), image(b"2")
    publish(store, "name", first)
    put_missing(store, second)

    def overtaken(exchange: Exchange) -> None:
        exchange.answer()
        there(registry).tags["name"] = str(second.target.digest)

    registry.misbehave(overtaken, "HEAD /v2/team/images/manifests/name", times=1)
    with store.lease() as lease, pytest.raises(ConflictError, match=r"'name'.*412"):
        store.set_reference("name", first.target, expected=first.target, lease=lease, reaches=first.blobs)


# Failures


def test_a_registry_that_is_gone_is_unavailable_and_never_empty(
    registry: FakeRegistry, store: RegistryStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry.close()
    for ask in (lambda: list(store.names()), lambda: store.resolve("a"), lambda: store.stat(Digest.of(b"x"))):
        with pytest.raises(UnavailableError):
            ask()
    with StoreServer(str(tmp_path_factory.mktemp("web"))) as web:
        other = RegistryStore(f"oci://127.0.0.1:{web.port}/a", docker_config=NOBODY, patience=IMPATIENT)
        for ask in (lambda: list(other.names()), lambda: other.resolve("a"), lambda: other.stat(Digest.of(b"x"))):
            with pytest.raises(UnavailableError, match="as no registry does"):
                ask()
        other.close()


def test_errors_are_no_missing_references(registry: FakeRegistry, store: RegistryStore) -> None:
    publish(store, "one", image(b"1"))
    registry.misbehave(status(500), "GET /v2/team/images/manifests/one")
    with pytest.raises(UnavailableError):
        list(store.references())


# Addresses


@pytest.mark.parametrize(
    ("url", "origin", "repository", "shown"),
    [
        ("oci://r.example/a/b", "https://r.example", "a/b", None),
        ("oci://r.example:5000/a", "https://r.example:5000", "a", None),
        ("oci://registry/a", "https://registry", "a", None),
        ("oci+http://registry/a", "http://registry", "a", None),
        ("oci://localhost:5000/a", "http://localhost:5000", "a", None),
        ("oci://127.0.0.1/a", "http://127.0.0.1", "a", None),
        ("oci://[::1]:5000/a", "http://[::1]:5000", "a", None),
        ("oci+http://localhost/a", "http://localhost", "a", "oci://localhost/a"),
        ("oci://docker.io/a", "https://registry-1.docker.io", "library/a", "oci://docker.io/library/a"),
        ("oci://index.docker.io/a/b", "https://registry-1.docker.io", "a/b", "oci://docker.io/a/b"),
    ],
)
def test_addresses(url: str, origin: str, repository: str, shown: str | None) -> None:
    address = RegistryAddress.parse(url)
    assert (address.origin, address.repository) == (origin, repository)
    assert str(address) == (shown or url)
    assert RegistryAddress.parse(str(address)) == address
    assert address.url("x") == f"{origin}/v2/{repository}/x"


@pytest.mark.parametrize(
    "url",
    [
        "oci://r.example",
        "oci://r.example/",
        "oci:///a",
        "oci://r.example/A",
        "oci://r.example/a:tag",
        "oci://r e/a",
        "oci://r.example/a@sha256:" + "1" * 64,
        "oci://u:secret@r.example/a",
        "https://r/a",
        "oci://r/../a",
        "oci://r/a?b",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        RegistryStore(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["10.0.0.1:5000", "localhost.example", "127.example", "0.0.0.0", "[::2]:1", "1"])
def test_only_this_machine_is_loopback(host: str) -> None:
    assert not is_loopback(host)
    assert all(map(is_loopback, ("localhost", "LOCALHOST:1", "127.1.2.3:5", "[::1]", "[::1]:5000")))

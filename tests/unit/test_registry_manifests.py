"""Manifests, tags and referrers in a registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.httpstore import Exchange, Fault, StoreServer, cut_short, redirect, reset, status, wrong_bytes
from support.registries import client_of
from support.registry_faults import FakeRegistry, Repository
from support.stores import INDEX, MANIFEST, Sample, document, image, index

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    LimitError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.registry.client import RefusedError, RegistryClient
from layerstore.registry.manifests import Manifests, lacks_blobs, unknown_blobs
from layerstore.registry.referrers import Referrers, fallback_tag

IMAGE = image(b"layer")
DIGEST = IMAGE.target.digest


def data_of(sample: Sample) -> bytes:
    return sample.blobs[sample.target.digest]


def load(repository: Repository, sample: Sample, tag: str | None = None) -> None:
    """Put an image there by the back door."""
    for digest, data in sample.blobs.items():
        if data[:1] == b"{" and (kind := json.loads(data).get("mediaType")):
            repository.manifests[str(digest)] = kind, data
        else:
            repository.blobs[str(digest)] = data
    if tag is not None:
        repository.tags[tag] = str(sample.target.digest)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        load(registry.repository("a"), IMAGE, "tag")
        yield registry


@pytest.fixture
def client(registry: FakeRegistry) -> Iterator[RegistryClient]:
    client = client_of(registry)
    yield client
    client.close()


@pytest.fixture
def manifests(client: RegistryClient) -> Manifests:
    return Manifests(client)


# Reading


def test_one_request_brings_a_manifest_by_tag_or_digest(registry: FakeRegistry, manifests: Manifests) -> None:
    for reference in ("tag", DIGEST):
        registry.forget()
        stored = manifests.get(reference)
        assert (stored.descriptor, stored.data) == (IMAGE.target, data_of(IMAGE))
        assert registry.requests() == [f"GET /v2/a/manifests/{reference}"]
        accepted = registry.headers()[0]["accept"]
        assert all(kind in accepted for kind in (INDEX, MANIFEST, "docker.distribution.manifest.list.v2"))
        assert "manifest.v1" not in accepted.replace("image.manifest.v1", "").replace("artifact.manifest.v1", "")
        assert manifests.head(reference).descriptor == IMAGE.target
    for missing in ("other", Digest.of(b"x")):
        with pytest.raises(NotFoundError, match=str(missing)):
            manifests.get(missing)
        with pytest.raises(NotFoundError, match=str(missing)):
            manifests.head(missing)


def test_a_manifest_is_verified(registry: FakeRegistry, manifests: Manifests) -> None:
    registry.misbehave(wrong_bytes, "GET /v2/a/manifests")
    for reference in ("tag", DIGEST):
        with pytest.raises(CorruptError, match=f"expected {DIGEST}"):
            manifests.get(reference)
    registry.digests = False
    with pytest.raises(CorruptError):
        manifests.get(DIGEST)


@pytest.mark.case("R04")
def test_a_registry_that_says_no_digests(registry: FakeRegistry, manifests: Manifests) -> None:
    registry.digests = False
    assert manifests.get("tag").descriptor == IMAGE.target
    assert manifests.head("tag").descriptor == IMAGE.target
    assert manifests.head(DIGEST).descriptor == IMAGE.target


@pytest.mark.case("R04")
@pytest.mark.parametrize(
    "fault",
    [status(405), status(403), lambda exchange: (exchange.set_body(b""), exchange.answer())],
    ids=["405", "403", "0"],
)
def test_where_head_is_of_no_use_the_manifest_is_read(
    registry: FakeRegistry, manifests: Manifests, fault: Fault
) -> None:
    registry.misbehave(fault, "HEAD")
    for reference in ("tag", DIGEST):
        assert manifests.head(reference).descriptor == IMAGE.target


@pytest.mark.case("R04")
def test_a_redirect_that_is_signed_for_get_alone(
    registry: FakeRegistry, manifests: Manifests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("storage")
    (root / "manifest").write_bytes(data_of(IMAGE))
    with StoreServer(str(root)) as storage:
        registry.misbehave(redirect(f"{storage.url}/head", 307), "HEAD")
        registry.misbehave(redirect(f"{storage.url}/manifest", 307), "GET /v2/a/manifests")
        storage.misbehave(status(403), "head")
        assert manifests.head("tag").descriptor == IMAGE.target
        assert manifests.head("tag").descriptor == IMAGE.target
        assert storage.requests("head") == 1


def test_manifests_have_a_size(registry: FakeRegistry, manifests: Manifests) -> None:
    with pytest.raises(LimitError, match="limit of 10"):
        manifests.get("tag", limit=10)

    def claims_much(exchange: Exchange) -> None:
        exchange.answer_headers["Content-Length"] = str(1 << 40)
        exchange.answer()

    registry.misbehave(claims_much, "GET")
    with pytest.raises(LimitError, match="limit"):
        manifests.get("tag")


@pytest.mark.parametrize("fault", [status(500), status(503, Retry_After="0"), reset()])
def test_a_passing_failure_passes(registry: FakeRegistry, manifests: Manifests, fault: Fault) -> None:
    registry.misbehave(fault, "GET", times=2)
    assert manifests.get("tag").data == data_of(IMAGE)


def test_a_manifest_that_is_cut_short_is_unavailable(registry: FakeRegistry, manifests: Manifests) -> None:
    registry.misbehave(cut_short(20), "GET")
    with pytest.raises(UnavailableError):
        manifests.get("tag")


@pytest.mark.parametrize("said", ["sha256:x", "md5:" + "1" * 32, "nonsense"])
def test_digests_that_are_none(registry: FakeRegistry, manifests: Manifests, said: str) -> None:
    def fault(exchange: Exchange) -> None:
        exchange.answer_headers["Docker-Content-Digest"] = said
        exchange.answer()

    registry.misbehave(fault)
    with pytest.raises(CorruptError):
        manifests.get("tag")


# Writing


def test_a_manifest_is_written_by_tag_and_digest(registry: FakeRegistry, manifests: Manifests) -> None:
    other = image(b"layer", config=b"{ }")
    with pytest.raises(RefusedError, match="MANIFEST_BLOB_UNKNOWN") as caught:
        manifests.put("new", data_of(other), MANIFEST)
    assert lacks_blobs(caught.value)
    assert unknown_blobs(caught.value) == (Digest.of(b"{ }"),)
    registry.repository("a").blobs[str(Digest.of(b"{ }"))] = b"{ }"
    assert manifests.put("new", data_of(other), MANIFEST).digest == other.target.digest
    assert manifests.get(other.target.digest).descriptor == other.target
    assert not lacks_blobs(NotFoundError("x"))


def test_conditions_are_sent_and_heeded(registry: FakeRegistry, manifests: Manifests) -> None:
    registry.conditions = True
    etag = manifests.head("tag").etag
    manifests.put("tag", data_of(IMAGE), MANIFEST, replacing=etag)
    with pytest.raises(ConflictError, match="412"):
        manifests.put("tag", data_of(IMAGE), MANIFEST, replacing='"other"')
    with pytest.raises(ConflictError, match="412"):
        manifests.put("tag", data_of(IMAGE), MANIFEST, replacing=None)


# Tags


@pytest.mark.case("R12")
def test_all_pages_of_tags_are_read(registry: FakeRegistry, manifests: Manifests) -> None:
    registry.repository("a").tags |= {f"t{number:05}": str(DIGEST) for number in range(10_000)}
    assert len(manifests.tags()) == 10_001
    assert len(registry.requests()) == 11
    registry.page = 7
    registry.repository("a").tags = {f"t{number}": str(DIGEST) for number in range(20)}
    assert sorted(manifests.tags()) == sorted(registry.repository("a").tags)


@pytest.mark.case("R12")
@pytest.mark.parametrize("link", ["http://127.0.0.2:1/v2/a/tags/list?n=1", "https://elsewhere.example/x"])
def test_pages_elsewhere_are_refused(registry: FakeRegistry, manifests: Manifests, link: str) -> None:
    def fault(exchange: Exchange) -> None:
        exchange.answer_headers["Link"] = f'<{link}>; rel="next"'
        exchange.answer()

    registry.misbehave(fault)
    with pytest.raises(UnavailableError, match="at another host"):
        manifests.tags()


def test_pages_in_a_circle_end(registry: FakeRegistry, manifests: Manifests) -> None:
    def fault(exchange: Exchange) -> None:
        exchange.answer_headers["Link"] = '</v2/a/tags/list?n=1000>; rel="next"'
        exchange.answer()

    registry.misbehave(fault)
    with pytest.raises(UnavailableError, match="no end"):
        manifests.tags()


def test_where_there_is_no_repository_there_are_no_tags(registry: FakeRegistry) -> None:
    client = client_of(registry, "nowhere")
    assert Manifests(client).tags() == []
    registry.misbehave(status(403))
    with pytest.raises(PermissionError_):
        Manifests(client).tags()
    client.close()


# Referrers


def artifact(subject: Descriptor, kind: str = "application/vnd.test", note: bytes = b"note") -> Sample:
    fields: dict[str, object] = {
        "artifactType": kind,
        "config": Descriptor("application/vnd.oci.empty.v1+json", Digest.of(b"{}"), 2).to_json(),
        "layers": [Descriptor("text/plain", Digest.of(note), len(note)).to_json()],
        "subject": subject.to_json(),
        "annotations": {"from": "tests"},
    }
    return document(fields, [b"{}", note])


def referrers_of(client: RegistryClient, heard: list[str] | None = None) -> Referrers:
    pauses: list[float] = []
    told = [] if heard is None else heard
    return Referrers(client, Manifests(client), warn=told.append, sleep=pauses.append)


def push(registry: FakeRegistry, referrers: Referrers, sample: Sample) -> None:
    repository = registry.repository("a")
    for digest, data in sample.blobs.items():
        if digest != sample.target.digest:
            repository.blobs[str(digest)] = data
    referrers.push(sample.target.digest, data_of(sample), MANIFEST)


@pytest.mark.case("R12")
@pytest.mark.parametrize("api", [True, False])
def test_referrers_are_found(registry: FakeRegistry, client: RegistryClient, api: bool) -> None:
    registry.referrers_api, registry.page = api, 2
    referrers = referrers_of(client)
    assert referrers.of(DIGEST) == []
    samples = [artifact(IMAGE.target, f"application/vnd.{number % 2}", b"%d" % number) for number in range(5)]
    for sample in samples:
        push(registry, referrers, sample)
    found = referrers.of(DIGEST)
    assert {each.digest for each in found} == {sample.target.digest for sample in samples}
    assert (fallback_tag(DIGEST) in registry.repository("a").tags) != api
    ones = referrers.of(DIGEST, "application/vnd.1")
    assert {each.digest for each in ones} == {samples[1].target.digest, samples[3].target.digest}
    assert referrers.of(samples[0].target.digest) == []
    if not api:
        assert [each.annotations for each in found] == [{"from": "tests"}] * 5


@pytest.mark.case("R12")
def test_an_image_without_subject_needs_no_list(registry: FakeRegistry, client: RegistryClient) -> None:
    push(registry, referrers_of(client), image(b"layer", config=b"{  }"))
    assert registry.requests("GET") == []


@pytest.mark.case("R10")
def test_two_who_attach_at_once_are_both_listed(registry: FakeRegistry) -> None:
    subjects = [artifact(IMAGE.target, note=b"%d" % number) for number in range(4)]
    for sample in subjects:
        for digest, data in sample.blobs.items():
            if digest != sample.target.digest:
                registry.repository("a").blobs[str(digest)] = data
    barrier = threading.Barrier(len(subjects))
    line = f"PUT /v2/a/manifests/{fallback_tag(DIGEST)}"

    def together(exchange: Exchange) -> None:
        barrier.wait()
        exchange.answer()

    registry.misbehave(together, line, times=len(subjects))

    def attach(sample: Sample) -> None:
        client = client_of(registry)
        Referrers(client, Manifests(client), warn=lambda line: None).push(
            sample.target.digest, data_of(sample), MANIFEST
        )
        client.close()

    with ThreadPoolExecutor(len(subjects)) as pool:
        list(pool.map(attach, subjects))
    client = client_of(registry)
    assert {each.digest for each in referrers_of(client).of(DIGEST)} == {each.target.digest for each in subjects}
    client.close()


@pytest.mark.case("R10")
def test_a_list_is_written_again_until_we_are_on_it(registry: FakeRegistry, client: RegistryClient) -> None:
    sample, other = artifact(IMAGE.target), artifact(IMAGE.target, note=b"other")
    tag = fallback_tag(DIGEST)
    theirs = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [other.target.to_json()]}).encode()

    def overwritten(exchange: Exchange) -> None:
        """Somebody else, who has read before us, writes after us."""
        repository = registry.repository("a")
        repository.manifests[str(Digest.of(theirs))] = INDEX, theirs
        repository.tags[tag] = str(Digest.of(theirs))
        exchange.answer()

    load(registry.repository("a"), other)
    registry.misbehave(overwritten, f"PUT /v2/a/manifests/{tag}", times=2)
    push(registry, referrers_of(client), sample)
    assert {each.digest for each in referrers_of(client).of(DIGEST)} == {sample.target.digest, other.target.digest}
    assert len(registry.requests(f"PUT /v2/a/manifests/{tag}")) == 3
    registry.misbehave(overwritten, f"PUT /v2/a/manifests/{tag}")
    with pytest.raises(UnavailableError, match="keep taking it off"):
        push(registry, referrers_of(client), artifact(IMAGE.target, note=b"third"))


@pytest.mark.case("R10")
def test_conditions_decide_where_they_are_heeded(registry: FakeRegistry, client: RegistryClient) -> None:
    registry.conditions = True
    for note in (b"1", b"2"):
        push(registry, referrers_of(client), artifact(IMAGE.target, note=note))
    sent = registry.headers(f"PUT /v2/a/manifests/{fallback_tag(DIGEST)}")
    assert [each.get("if-none-match") for each in sent] == ["*", None]
    assert "if-match" in sent[1]
    assert len(referrers_of(client).of(DIGEST)) == 2


@pytest.mark.case("R11")
def test_a_fall_back_tag_that_is_the_subject_is_no_list(registry: FakeRegistry, client: RegistryClient) -> None:
    subject = index(IMAGE)
    repository = registry.repository("a")
    load(repository, subject, fallback_tag(subject.target.digest))
    heard: list[str] = []
    referrers = referrers_of(client, heard)
    assert referrers.of(subject.target.digest) == []
    assert "no list of referrers" in heard[0]
    with pytest.raises(ConflictError, match="stands for something else"):
        push(registry, referrers, artifact(subject.target))
    assert repository.tags[fallback_tag(subject.target.digest)] == str(subject.target.digest)
    assert str(subject.target.digest) in repository.manifests


@pytest.mark.case("R11")
def test_a_fall_back_tag_that_is_an_image_is_no_list(registry: FakeRegistry, client: RegistryClient) -> None:
    registry.repository("a").tags[fallback_tag(DIGEST)] = str(DIGEST)
    heard: list[str] = []
    assert referrers_of(client, heard).of(DIGEST) == []
    assert len(heard) == 1


@pytest.mark.case("R12")
def test_an_answer_that_is_no_index_is_no_list(registry: FakeRegistry, client: RegistryClient) -> None:
    def other_kind(exchange: Exchange) -> None:
        exchange.set_body(b'{"hello": "world"}', Content_Type="application/json")
        exchange.answer()

    registry.misbehave(other_kind, "/referrers/")
    assert referrers_of(client).of(DIGEST) == []


def test_the_rest_of_a_list_is_kept(registry: FakeRegistry, client: RegistryClient) -> None:
    tag = fallback_tag(DIGEST)
    odd = {"mediaType": MANIFEST, "digest": "blake3:" + "1" * 64, "size": 1, "x-unknown": [1]}
    data = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [odd], "annotations": {"a": "b"}}).encode()
    repository = registry.repository("a")
    registry.validates = False
    repository.manifests[str(Digest.of(data))], repository.tags[tag] = (INDEX, data), str(Digest.of(data))
    push(registry, referrers_of(client), artifact(IMAGE.target))
    now = json.loads(repository.manifests[repository.tags[tag]][1])
    assert now["manifests"][0] == odd
    assert now["annotations"] == {"a": "b"}
    assert len(now["manifests"]) == 2

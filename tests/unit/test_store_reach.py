"""What documents reach: everything they describe, whatever the field is called."""

from __future__ import annotations

import json

import pytest
from support.stores import (
    CONFIG,
    LAYER,
    MANIFEST,
    MemoryBench,
    Sample,
    descriptor,
    document,
    image,
    index,
    put_missing,
)

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError, MalformedError, UnsupportedError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.memory import MemoryStore
from layerstore.store.reach import DOCUMENT_BYTES, OCI_ARTIFACT, Documents, Link, links, walk, walk_links


def reached(store: MemoryStore, sample: Sample) -> list[Digest]:
    return [each.digest for each in walk(Documents(store), sample.target, "root")]


def filled(*samples: Sample) -> MemoryStore:
    store = MemoryStore()
    for sample in samples:
        put_missing(store, sample)
    return store


@pytest.mark.case("M07")
def test_an_image_reaches_config_and_layers_and_comes_last() -> None:
    sample = image(b"one", b"two", b"one", config=b"{}")
    assert reached(filled(sample), sample) == [
        Digest.of(b"{}"),
        Digest.of(b"one"),
        Digest.of(b"two"),
        sample.target.digest,
    ]


@pytest.mark.case("M07")
def test_nested_indexes_reach_everything_children_first() -> None:
    first, second = image(b"a", b"shared"), image(b"b", b"shared")
    sample = index(index(first, index(second)), first)
    found = reached(filled(sample), sample)
    assert set(found) == sample.blobs.keys()
    assert len(found) == len(set(found))
    assert found[-1] == sample.target.digest
    for each in (first, second):
        for digest in each.blobs:
            assert found.index(digest) <= found.index(each.target.digest)


@pytest.mark.case("M07")
@pytest.mark.parametrize("media_type", [MANIFEST, OCI_ARTIFACT])
def test_any_field_at_any_depth_counts(media_type: str) -> None:
    data = [b"%d" % number for number in range(6)]
    here = [descriptor(each).to_json() for each in data]
    fields = {
        "config": here[0],
        "blobs": [here[1]],
        "subject": here[2],
        "x-future": {"deep": [[{"er": {**here[3], "annotations": {"a": "b"}, "inner": here[4]}}]]},
        "layers": [here[5]],
        "annotations": {"org.example.digest": str(Digest.of(b"no descriptor"))},
        "platform": {"digest": str(Digest.of(b"no size")), "mediaType": "x"},
    }
    sample = document(fields, data, media_type)
    assert set(reached(filled(sample), sample)) == sample.blobs.keys()


@pytest.mark.case("M07")
def test_an_artifact_reaches_another_images_config() -> None:
    victim = image(b"layer", config=b'{"os":"linux"}')
    artifact = document({"layers": [descriptor(b'{"os":"linux"}', CONFIG).to_json()]}, [b'{"os":"linux"}'])
    store = filled(victim, artifact)
    assert Digest.of(b'{"os":"linux"}') in reached(store, artifact)


@pytest.mark.case("M07")
def test_a_manifest_named_as_content_first_is_still_followed() -> None:
    inner = image(b"layer")
    as_content = Descriptor("application/octet-stream", inner.target.digest, inner.target.size)
    for order in ((as_content, inner.target), (inner.target, as_content)):
        outer = document({"layers": [each.to_json() for each in order]}, [inner])
        assert set(reached(filled(outer), outer)) == outer.blobs.keys()


def test_other_json_is_content() -> None:
    trap = json.dumps({"config": descriptor(b"never stored").to_json()}).encode()
    sample = document({"config": descriptor(trap, "application/vnd.example+json").to_json(), "layers": []}, [trap])
    assert reached(filled(sample), sample) == [Digest.of(trap), sample.target.digest]


def test_a_root_that_is_content_reaches_itself() -> None:
    target = descriptor(b"plain", LAYER)
    assert list(walk(Documents(MemoryStore()), target, "root")) == [target]


def test_a_subject_may_be_missing_and_is_followed_if_not() -> None:
    source = image(b"original")
    sample = document(
        {"config": descriptor(b"{}").to_json(), "layers": [], "subject": source.target.to_json()}, [b"{}", source]
    )
    store = filled(sample)
    assert set(reached(store, sample)) == sample.blobs.keys()
    del store.content[source.target.digest]
    assert reached(store, sample) == [Digest.of(b"{}"), sample.target.digest]


def test_a_missing_subject_that_is_content_is_left_out() -> None:
    sample = document({"config": descriptor(b"{}").to_json(), "subject": descriptor(b"gone").to_json()}, [b"{}"])
    assert reached(filled(sample), sample) == [Digest.of(b"{}"), sample.target.digest]


PACK = {
    "org.erofs.role": "device",
    "org.erofs.uncompressed-digest": str(Digest.of(b"raw bytes")),
    "org.imgtool.uncompressed-size": "9",
}
RAW = Descriptor("application/octet-stream", Digest.of(b"raw bytes"), 9)


def packed(**notes: str) -> dict[str, object]:
    """The descriptor of a pack."""
    return {**descriptor(b"packed").to_json(), "annotations": {**PACK, **notes}}


def test_a_pack_names_its_raw_form_which_need_not_be_there() -> None:
    sample = document({"layers": [packed(), descriptor(b"other").to_json()]}, [b"packed", b"other"])
    store = filled(sample)
    found = list(walk_links(Documents(store), sample.target, "root"))
    assert [(link.descriptor.digest, link.optional, link.raw) for link in found] == [
        (Digest.of(b"packed"), False, False),
        (RAW.digest, True, True),
        (Digest.of(b"other"), False, False),
        (sample.target.digest, False, False),
    ]
    assert found[1] == Link(RAW, optional=True, raw=True)
    expected = [Digest.of(b"packed"), Digest.of(b"other"), sample.target.digest]
    assert reached(store, sample) == expected
    put_missing(store, Sample(sample.target, {RAW.digest: b"raw bytes"}))
    assert reached(store, sample) == expected, "raw forms are not copied"


def test_a_raw_form_that_is_required_elsewhere_comes_again_as_that() -> None:
    for order in ([packed(), RAW.to_json()], [RAW.to_json(), packed()]):
        sample = document({"layers": order}, [b"packed", b"raw bytes"])
        store = filled(sample)
        optional = [
            link.optional
            for link in walk_links(Documents(store), sample.target, "root")
            if link.descriptor.digest == RAW.digest
        ]
        assert optional == ([True, False] if "annotations" in order[0] else [False])
        assert set(reached(store, sample)) == sample.blobs.keys()


def test_packs_at_any_depth_name_their_raw_forms() -> None:
    sample = document({"subject": {"deep": [[packed()]]}}, [b"packed"])
    assert [link.raw for link in links(sample.blobs[sample.target.digest], "it")] == [False, True]


@pytest.mark.parametrize(
    "notes",
    [
        {"org.erofs.role": "overlay-lower"},
        {"org.erofs.role": ""},
        {"org.imgtool.uncompressed-size": ""},
        {"org.imgtool.uncompressed-size": "-1"},
        {"org.imgtool.uncompressed-size": "1e3"},
        {"org.imgtool.uncompressed-size": "٣"},
        {"org.imgtool.uncompressed-size": "9" * 20},
        {"org.erofs.uncompressed-digest": ""},
        {"org.erofs.uncompressed-digest": "blake3:00"},
        {"org.erofs.uncompressed-digest": "sha256:../../../refs/x"},
    ],
)
def test_what_names_no_raw_form_as_we_do_names_none(notes: dict[str, str]) -> None:
    assert [link.raw for link in links(json.dumps({"layers": [packed(**notes)]}).encode(), "it")] == [False]


def test_what_is_required_elsewhere_is_no_longer_optional() -> None:
    source = image(b"original")
    sample = document({"subject": source.target.to_json(), "manifests": [source.target.to_json()]}, [source])
    store = filled(sample)
    del store.content[source.target.digest]
    with pytest.raises(CorruptError, match=f"(?s)root reaches.*missing.*{source.target.digest.hex}"):
        reached(store, sample)


@pytest.mark.case("G04")
def test_a_missing_document_is_an_error() -> None:
    inner = image(b"layer")
    sample = index(inner)
    store = filled(sample)
    del store.content[inner.target.digest]
    with pytest.raises(CorruptError, match="root reaches a document that is missing"):
        reached(store, sample)


@pytest.mark.case("C05")
def test_a_damaged_document_is_never_believed() -> None:
    inner = image(b"layer")
    sample = index(inner)
    data = inner.blobs[inner.target.digest]
    for damage in (b"{}", b" " * len(data), data.replace(b"layers", b"loyers"), data + b" "):
        bench = MemoryBench()
        put_missing(bench.store, sample)
        bench.damage(inner.target.digest, damage)
        with pytest.raises(CorruptError, match=inner.target.digest.hex):
            reached(bench.store, sample)


def test_a_document_of_a_declared_size_allocates_nothing() -> None:
    store = MemoryStore()
    for size in (DOCUMENT_BYTES + 1, 1 << 62):
        with pytest.raises(LimitError, match="limit"):
            list(walk(Documents(store), Descriptor(MANIFEST, Digest.of(b"x"), size), "root"))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"", MalformedError),
        (b"[]", MalformedError),
        (b"\xff{}", MalformedError),
        (b"[" * 100_000, MalformedError),
        (b'{"a":' * 70_000 + b"1" + b"}" * 70_000, MalformedError),
        (b'{"layers":[],"layers":[]}', MalformedError),
        (b'{"x":{"mediaType":"x","digest":"sha256:00","size":1}}', MalformedError),
        (b'{"x":{"mediaType":"x","digest":"sha256:../../x","size":1}}', MalformedError),
        (b'{"x":{"mediaType":"x","digest":"sha256:%s","size":-1}}' % (b"0" * 64), MalformedError),
        (b'{"x":{"mediaType":"x","digest":"sha256:%s","size":"1"}}' % (b"0" * 64), MalformedError),
        (b'{"x":{"mediaType":"x","digest":"sha256:%s","size":9223372036854775808}}' % (b"0" * 64), MalformedError),
        (b'{"x":{"mediaType":"x","digest":"blake3:00","size":1}}', UnsupportedError),
    ],
)
def test_a_document_that_cannot_be_read_with_certainty_is_an_error(bad: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        links(bad, "the document")


def test_documents_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = index(image(b"a"), image(b"b"))
    store = filled(sample)
    documents = Documents(store)
    first = list(walk(documents, sample.target, "root"))
    monkeypatch.setattr(store, "open", None)
    assert list(walk(documents, sample.target, "root")) == first


def test_a_deep_chain_of_indexes_needs_no_recursion() -> None:
    sample = image(b"layer")
    for _ in range(2000):
        data = json.dumps({"manifests": [sample.target.to_json()]}).encode()
        sample = Sample(descriptor(data, MANIFEST), {Digest.of(data): data, **sample.blobs})
    assert len(reached(filled(sample), sample)) == len(sample.blobs)

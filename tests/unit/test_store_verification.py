"""Verification names whatever is wrong, all of it, and mends nothing unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.faults import fsync_for_free
from support.stores import (
    Bench,
    DirectoryBench,
    MemoryBench,
    Sample,
    all_blobs,
    descriptor,
    document,
    image,
    index,
    packed,
    publish,
    put,
    put_missing,
)

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.protocol import Store
from layerstore.store.verification import Fault, Finding, verify


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    with fsync_for_free():
        yield


@pytest.fixture(params=["directory", "memory"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return MemoryBench() if request.param == "memory" else DirectoryBench(str(tmp_path / "store"))


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryBench:
    return DirectoryBench(str(tmp_path / "store"))


def facts(findings: Iterable[Finding]) -> set[tuple[str, Digest | None, str | None]]:
    return {(finding.fault.value, finding.digest, finding.reference) for finding in findings}


def test_a_sound_store_has_no_findings(bench: Bench) -> None:
    assert list(verify(bench.store)) == []
    publish(bench.store, "one", index(image(b"a"), image(b"b")))
    publish(bench.store, "two", image(b""))
    put(bench.store, b"loose")
    assert list(verify(bench.store, quarantine=True)) == []


@pytest.mark.case("C05")
@pytest.mark.parametrize("damage", [b"LAYER", b"lay", b"", b"layer and more"])
def test_a_damaged_blob_and_who_reaches_it_are_named(bench: Bench, damage: bytes) -> None:
    publish(bench.store, "one", image(b"layer"))
    publish(bench.store, "two", image(b"other"))
    publish(bench.store, "three", image(b"layer", b"other"))
    digest = Digest.of(b"layer")
    bench.damage(digest, damage)
    findings = list(verify(bench.store))
    assert facts(findings) == {
        ("corrupt", digest, None),
        ("corrupt", digest, "one"),
        ("corrupt", digest, "three"),
    }
    assert all(digest.hex in finding.message and finding.message.isprintable() for finding in findings)
    assert all(finding.quarantined is None for finding in findings)
    assert digest in all_blobs(bench.store)


@pytest.mark.case("C05")
def test_quarantine_makes_room_for_the_right_bytes(bench: Bench) -> None:
    sample = image(b"layer")
    publish(bench.store, "one", sample)
    digest = Digest.of(b"layer")
    bench.damage(digest, b"LAYER")
    findings = list(verify(bench.store, quarantine=True))
    assert facts(findings) == {("corrupt", digest, None), ("corrupt", digest, "one")}
    assert findings[0].quarantined is not None
    assert findings[0].quarantined in findings[0].message
    assert facts(verify(bench.store)) == {("missing", digest, "one")}
    publish(bench.store, "one", sample)
    assert list(verify(bench.store)) == []


@pytest.mark.case("C05")
@pytest.mark.parametrize("damage", [b"RAW", b"ra", b"", b"raw and more"])
def test_a_damaged_raw_form_takes_nothing_with_it(bench: Bench, damage: bytes) -> None:
    publish(bench.store, "one", packed(b"raw", b"packed"))
    digest = put(bench.store, b"raw")
    assert list(verify(bench.store)) == []
    bench.damage(digest, damage)
    checked: list[str] = []

    def check(store: Store, name: str, target: Descriptor) -> list[Finding]:
        checked.append(name)
        return []

    findings = list(verify(bench.store, check=check))
    assert facts(findings) == {("corrupt", digest, None), ("corrupt", digest, "one")}
    assert [finding.raw for finding in findings] == [False, True]
    assert "only direct mounts need it" in findings[1].message
    assert checked == ["one"]
    assert facts(verify(bench.store, quarantine=True)) == {("corrupt", digest, None)}
    assert list(verify(bench.store)) == []


def test_a_raw_form_of_another_size_than_said(bench: Bench) -> None:
    sample = packed(b"raw", b"packed")
    data = sample.blobs[sample.target.digest].replace(b'"3"', b'"4"')
    wrong = Sample(descriptor(data, sample.target.media_type), {**sample.blobs, Digest.of(data): data})
    publish(bench.store, "one", wrong)
    put(bench.store, b"raw")
    (finding,) = verify(bench.store)
    assert (finding.fault, finding.digest, finding.raw) == (Fault.SIZE, Digest.of(b"raw"), True)


def test_a_bad_blob_that_is_a_raw_form_too_is_required(bench: Bench) -> None:
    one = packed(b"raw", b"packed")
    both = document(
        {"layers": [*json.loads(one.blobs[one.target.digest])["layers"], descriptor(b"raw").to_json()]},
        [b"packed", b"raw"],
    )
    publish(bench.store, "one", both)
    bench.damage(Digest.of(b"raw"), b"RAW")
    checked: list[str] = []

    def check(store: Store, name: str, target: Descriptor) -> list[Finding]:
        checked.append(name)
        return []

    findings = list(verify(bench.store, check=check))
    assert [finding.raw for finding in findings] == [False, True, False]
    assert checked == []


def test_missing_blobs_are_named_each(bench: Bench) -> None:
    sample = image(b"1", b"2", b"3")
    publish(bench.store, "one", sample)
    gone = {Digest.of(b"1"), Digest.of(b"3")}
    with bench.store.collecting():
        for digest in gone:
            bench.store.delete(digest)
    assert facts(verify(bench.store)) == {("missing", digest, "one") for digest in gone}


def test_missing_and_damaged_documents_are_named(bench: Bench) -> None:
    inner = image(b"1")
    publish(bench.store, "one", index(inner))
    bench.damage(inner.target.digest, b"{}")
    findings = list(verify(bench.store))
    assert facts(findings) == {("corrupt", inner.target.digest, None), ("reference", None, "one")}
    assert all(inner.target.digest.hex in finding.message for finding in findings)
    with bench.store.collecting():
        bench.store.delete(inner.target.digest)
    (finding,) = verify(bench.store)
    assert (finding.fault, finding.reference) == (Fault.REFERENCE, "one")
    assert inner.target.digest.hex in finding.message
    assert "'one'" in finding.message


def test_a_descriptor_with_another_size_is_named(bench: Bench) -> None:
    wrong = Descriptor("x", Digest.of(b"layer"), 4)
    sample = document({"layers": [wrong.to_json()]}, [b"layer"])
    publish(bench.store, "one", sample)
    assert facts(verify(bench.store)) == {("size", wrong.digest, "one")}


def test_a_damaged_reference_hides_no_other(directory: DirectoryBench) -> None:
    for name in ("a", "b", "c"):
        publish(directory.store, name, image(name.encode()))
    Path(directory.path("refs", "a")).write_bytes(b"")
    directory.damage(Digest.of(b"c"), b"x")
    findings = list(verify(directory.store))
    assert facts(findings) == {
        ("corrupt", Digest.of(b"c"), None),
        ("reference", None, "a"),
        ("corrupt", Digest.of(b"c"), "c"),
    }


def test_a_blob_that_cannot_be_read_is_named(directory: DirectoryBench, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = image(b"layer")
    publish(directory.store, "one", sample)
    digest = Digest.of(b"layer")
    real = os.pread

    def failing(file: int, length: int, offset: int) -> bytes:
        if digest.hex in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(5, "Input/output error")
        return real(file, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    findings = list(verify(directory.store, quarantine=True))
    assert facts(findings) == {("unreadable", digest, None), ("unreadable", digest, "one")}
    assert digest in all_blobs(directory.store)


def test_what_bytes_mean_is_for_the_check(bench: Bench) -> None:
    good, alias, broken = image(b"good"), image(b"good"), image(b"broken")
    for name, sample in (("good", good), ("alias", alias), ("broken", broken)):
        publish(bench.store, name, sample)
    with bench.store.collecting():
        bench.store.delete(Digest.of(b"broken"))
    asked: list[tuple[Store, str, Descriptor]] = []

    def check(store: Store, name: str, target: Descriptor) -> Iterable[Finding]:
        asked.append((store, name, target))
        yield Finding(Fault.CONTENT, "frame 3 is not what the index says", reference=name)

    findings = list(verify(bench.store, check=check))
    assert asked == [(bench.store, "alias", good.target)]
    assert facts(findings) == {("content", None, "alias"), ("missing", Digest.of(b"broken"), "broken")}


def test_progress_counts_the_bytes(bench: Bench) -> None:
    publish(bench.store, "one", image(b"x" * 3_000_000))
    total = sum(blob.size for blob in bench.store.blobs())
    seen: list[object] = []

    class Counter:
        def start(self, step: str, total: int | None) -> None:
            seen.append((step, total))

        def advance(self, count: int) -> None:
            seen.append(count)

    assert list(verify(bench.store, progress=Counter())) == []
    assert seen[0] == ("verify blobs", total)
    assert sum(each for each in seen if isinstance(each, int)) == total


def test_what_vanishes_meanwhile_is_no_finding(bench: Bench) -> None:
    publish(bench.store, "one", image(b"1"))
    publish(bench.store, "two", image(b"2"))
    loose = sorted(put(bench.store, b"%d" % number) for number in range(10, 20))
    bench.damage(loose[0], b"damaged")
    findings = verify(bench.store)
    assert next(findings).digest == loose[0]
    with bench.store.collecting():
        for digest in loose:
            bench.store.delete(digest)
    bench.store.delete_reference("two", expected=bench.store.resolve("two"))
    assert list(findings) == []


def test_a_reference_deleted_and_swept_meanwhile_is_no_finding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = image(b"layer")
    publish(bench.store, "one", sample)
    real = bench.store.stat

    def swept(digest: Digest) -> int:
        monkeypatch.setattr(bench.store, "stat", real)
        bench.store.delete_reference("one", expected=sample.target)
        with bench.store.collecting():
            for each in sample.blobs:
                bench.store.delete(each)
        return real(digest)

    monkeypatch.setattr(bench.store, "stat", swept)
    assert list(verify(bench.store)) == []


def test_a_store_that_cannot_be_listed_is_an_error(directory: DirectoryBench) -> None:
    os.rename(directory.path("blobs"), directory.path("gone"))
    with pytest.raises(ImgtoolError, match="blobs"):
        list(verify(directory.store))


def test_a_reference_to_unreadable_kinds_is_named(bench: Bench) -> None:
    data = b'{"layers":[{"mediaType":"x","digest":"blake3:00","size":1}]}'
    sample = Sample(descriptor(data, "application/vnd.oci.image.manifest.v1+json"), {Digest.of(data): data})
    put_missing(bench.store, sample)
    publish(bench.store, "one", sample)
    (finding,) = verify(bench.store)
    assert (finding.fault, finding.reference) == (Fault.REFERENCE, "one")
    assert "blake3" in finding.message

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.layouts import LINUX_AMD64, Json, Layout, encode

from layerstore.errors import MalformedError, NotFoundError, UnsupportedError
from layerstore.oci import mediatype, selection
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.manifest import Index, parse_document
from layerstore.oci.platform import Platform
from layerstore.oci.selection import NESTING, listed, refusal, select

ARM64 = {"architecture": "arm64", "os": "linux"}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "oci")


@pytest.fixture(autouse=True)
def on_amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "host", lambda: Platform("linux", "amd64"))


def choose(layout: Layout, entries: list[Json], platform: str | None = None) -> str:
    """The digest of what is selected from an index of these entries."""

    def fetch(descriptor: Descriptor) -> bytes:
        path = layout.blob_path(str(descriptor.digest))
        if not path.exists():
            raise NotFoundError(str(path))
        return path.read_bytes()

    index = parse_document(encode({"schemaVersion": 2, "manifests": entries}), None)
    assert isinstance(index, Index)
    return str(select(index, Platform.parse(platform) if platform else None, fetch).digest)


def image(layout: Layout, number: int, platform: Json | None = None, **fields: Any) -> Json:
    """An image unlike those of other numbers."""
    return layout.image([], listed=False, config={"author": str(number), **fields}, platform=platform)


@pytest.mark.case("M01")
@pytest.mark.parametrize("first", ["image", "attestation"])
@pytest.mark.parametrize("platform", [None, "linux/amd64"])
def test_attestations_are_no_candidates(layout: Layout, first: str, platform: str | None) -> None:
    real = image(layout, 1, LINUX_AMD64)
    entries = [real, layout.attestation(real)]
    if first == "attestation":
        entries.reverse()
    assert choose(layout, entries, platform) == real["digest"]
    assert choose(layout, [layout.index(entries, listed=False)], platform) == real["digest"]


@pytest.mark.case("M01")
def test_either_mark_of_an_attestation_is_enough(layout: Layout) -> None:
    real = image(layout, 1, LINUX_AMD64)
    marked = layout.attestation(real)
    no_annotation = {name: value for name, value in marked.items() if name != "annotations"}
    no_platform = {name: value for name, value in marked.items() if name != "platform"}
    assert choose(layout, [no_annotation, no_platform, real]) == real["digest"]
    with pytest.raises(UnsupportedError, match=r"index has no images: .* is an attestation"):
        choose(layout, [marked])


@pytest.mark.case("M01")
def test_an_attestation_is_not_even_chosen_by_asking_for_it(layout: Layout) -> None:
    real = image(layout, 1, LINUX_AMD64)
    with pytest.raises(NotFoundError, match=r"no image for unknown/unknown; it has linux/amd64"):
        choose(layout, [layout.attestation(real), real], "unknown/unknown")


@pytest.mark.case("M02")
@pytest.mark.parametrize("entry", [{}, {"variant": "v8"}])
@pytest.mark.parametrize("wanted", ["linux/arm64", "linux/arm64/v8", "linux/arm64/v9"])
def test_arm64_with_and_without_variant(layout: Layout, entry: Json, wanted: str) -> None:
    amd, arm = image(layout, 1, LINUX_AMD64), image(layout, 2, {**ARM64, **entry})
    assert choose(layout, [amd, arm], wanted) == arm["digest"]


@pytest.mark.case("M02")
def test_the_best_arm_variant_wins_wherever_it_stands(layout: Layout) -> None:
    v5, v6, v7 = (
        image(layout, number, {"architecture": "arm", "os": "linux", "variant": f"v{number}"}) for number in (5, 6, 7)
    )
    assert choose(layout, [v5, v6, v7], "linux/arm") == v7["digest"]
    assert choose(layout, [v7, v6, v5], "linux/arm/v7") == v7["digest"]
    assert choose(layout, [v5, v6], "linux/arm") == v6["digest"]
    assert choose(layout, [v7, v5], "linux/arm/v6") == v5["digest"]
    with pytest.raises(NotFoundError, match="no image for linux/arm64; it has linux/arm/v5"):
        choose(layout, [v5, v6, v7], "linux/arm64")


@pytest.mark.case("M02")
def test_the_first_among_equals(layout: Layout) -> None:
    one, two = image(layout, 1, ARM64), image(layout, 2, {**ARM64, "variant": "v8"})
    assert choose(layout, [one, two], "linux/arm64/v8") == one["digest"]
    assert choose(layout, [two, one], "linux/arm64") == two["digest"]


def test_without_a_wish_the_only_image_else_the_hosts(layout: Layout) -> None:
    amd, arm = image(layout, 1, LINUX_AMD64), image(layout, 2, ARM64)
    assert choose(layout, [arm]) == arm["digest"]
    assert choose(layout, [arm, arm]) == arm["digest"]
    assert choose(layout, [arm, amd]) == amd["digest"]
    riscv = image(layout, 3, {"architecture": "riscv64", "os": "linux"})
    with pytest.raises(NotFoundError, match=r"no image for linux/amd64, this machine's; it has linux/arm64"):
        choose(layout, [arm, riscv])


@pytest.mark.case("M03")
def test_entries_without_platform_are_asked_for_their_config(layout: Layout) -> None:
    plain = image(layout, 1, architecture="x86_64")
    arm = image(layout, 2, architecture="aarch64")
    assert choose(layout, [arm, plain], "linux/amd64") == plain["digest"]
    assert choose(layout, [arm, plain], "linux/arm64/v8") == arm["digest"]
    assert choose(layout, [{**arm, "platform": {}}, {**plain, "platform": None}]) == plain["digest"]


def test_an_entry_that_was_not_copied_is_no_obstacle(layout: Layout) -> None:
    gone, here = image(layout, 1), image(layout, 2, LINUX_AMD64)
    layout.blob_path(gone["digest"]).unlink()
    assert choose(layout, [gone, here], "linux/amd64") == here["digest"]
    with pytest.raises(NotFoundError, match="platform unknown"):
        choose(layout, [gone, here], "linux/arm64")


@pytest.mark.case("M15")
def test_artifacts_in_an_index_are_ignored(layout: Layout) -> None:
    real = image(layout, 1, LINUX_AMD64)
    chart = layout.image([], listed=False, config_type="application/vnd.cncf.helm.config.v1+json")
    entries = [
        {**chart, "platform": LINUX_AMD64, "artifactType": "application/vnd.cncf.helm.config.v1+json"},
        chart,
        {**chart, "mediaType": "application/vnd.example.thing"},
    ]
    assert choose(layout, [*entries, real]) == real["digest"]
    with pytest.raises(UnsupportedError) as caught:
        choose(layout, entries)
    assert "of type 'application/vnd.cncf.helm.config.v1+json'" in str(caught.value)
    assert "not an image but an artifact" in str(caught.value)
    assert "of type 'application/vnd.example.thing'" in str(caught.value)


def test_refusals() -> None:
    entry = {"mediaType": mediatype.OCI_MANIFEST, "digest": "sha256:" + "a" * 64, "size": 1}
    assert refusal(Descriptor.parse({**entry, "artifactType": mediatype.OCI_CONFIG}, "d")) is None
    assert refusal(Descriptor.parse({**entry, "mediaType": mediatype.DOCKER_LIST}, "d")) is None
    with pytest.raises(MalformedError, match="platform of"):
        refusal(Descriptor.parse({**entry, "platform": 3}, "d"))


def test_nested_indexes(layout: Layout) -> None:
    amd, arm = image(layout, 1, LINUX_AMD64), image(layout, 2, ARM64)
    entry = layout.index([amd, arm], listed=False)
    for _ in range(NESTING - 1):
        entry = layout.index([entry], listed=False)
    assert choose(layout, [entry], "linux/arm64") == arm["digest"]
    with pytest.raises(UnsupportedError, match=f"nested more than {NESTING} deep"):
        choose(layout, [layout.index([entry], listed=False)], "linux/arm64")


def test_an_index_that_is_named_often_is_read_once(layout: Layout) -> None:
    arm = image(layout, 1, ARM64)
    entry = layout.index([arm], listed=False)
    for level in range(7):
        entry = layout.index([{**entry, "annotations": {"n": f"{level}.{n}"}} for n in range(50)], listed=False)
    assert choose(layout, [entry]) == arm["digest"]


@pytest.mark.case("M18")
def test_an_entry_has_to_be_what_the_index_says(layout: Layout) -> None:
    inner = layout.index([image(layout, 1, LINUX_AMD64)], listed=False)
    with pytest.raises(MalformedError, match=r"announced as .*manifest"):
        choose(layout, [{**inner, "mediaType": mediatype.OCI_MANIFEST}])


@pytest.mark.case("M11")
def test_unverifiable_entries_are_named_when_nothing_else_is_there() -> None:
    entry = {"mediaType": mediatype.OCI_MANIFEST, "digest": "md5:" + "a" * 32, "size": 1}
    index = parse_document(json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(), None)
    assert isinstance(index, Index)
    with pytest.raises(UnsupportedError, match="digest algorithm 'md5' can't be verified"):
        select(index, None, lambda descriptor: b"")


def test_long_lists_are_cut() -> None:
    assert listed("abc") == "a, b, c"
    assert listed(range(15)).endswith("11 and 3 more")

"""Images in registries as sources; what they share with all sources is in ``test_oci_source``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.httpstore import cut_short, reset, stall, status
from support.layouts import Layout, tar_of
from support.registries import IMPATIENT, NOBODY
from support.registry_faults import FakeRegistry, Gate, load_layout, until

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError, NotFoundError, UnavailableError, UnsupportedError
from layerstore.oci import mediatype
from layerstore.oci.platform import Platform
from layerstore.oci.reference import DockerReference
from layerstore.registry.source import DOWNLOADS, RegistrySource

TARS = [tar_of({"etc/": None, f"etc/{number}": os.urandom(50_000)}) for number in range(6)]


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


class Sources:
    def __init__(self, registry: FakeRegistry, scratch: Path) -> None:
        self.registry = registry
        self.scratch = scratch
        self.opened: list[RegistrySource] = []
        self.warnings: list[str] = []

    def __call__(self, rest: str = "img:latest") -> RegistrySource:
        source = RegistrySource(
            DockerReference.parse(f"{self.registry.host}/{rest}"),
            scratch=str(self.scratch),
            warn=self.warnings.append,
            docker_config=NOBODY,
            patience=IMPATIENT,
        )
        self.opened.append(source)
        return source


@pytest.fixture
def sources(registry: FakeRegistry, tmp_path: Path) -> Iterator[Sources]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sources = Sources(registry, scratch)
    yield sources
    for source in sources.opened:
        source.close()
    assert list(scratch.iterdir()) == []


def load(registry: FakeRegistry, layout: Layout) -> None:
    load_layout(registry, "img", layout.path)


def test_the_platform_chooses(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    arm = layout.image([TARS[0]], listed=False, config={"architecture": "arm64"})
    amd = layout.image([TARS[1]], listed=False)
    layout.index([{**amd, "platform": {"os": "linux", "architecture": "amd64"}}, arm], tag="latest")
    load(registry, layout)
    for name, entry in (("linux/amd64", amd), ("linux/arm64", arm)):
        image = sources().image(Platform.parse(name))
        assert str(image.descriptor.digest) == entry["digest"]
        assert image.platform == Platform.parse(name)
    with pytest.raises(NotFoundError, match=r"no image for linux/riscv64; it has linux/amd64"):
        sources().image(Platform.parse("linux/riscv64"))


def test_a_digest_is_what_is_read(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    entry = layout.image([layout.layer(TARS[0])], tag="latest")
    load(registry, layout)
    image = sources(f"img:whatever@{entry['digest']}").image()
    assert str(image.descriptor.digest) == entry["digest"]
    assert str(image.descriptor.digest) in image.name
    with pytest.raises(NotFoundError, match="other"):
        sources("img:other").image()
    with pytest.raises(NotFoundError, match="nowhere"):
        sources("nowhere").image()


def test_nothing_is_asked_that_is_not_needed(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    layout.image([layout.layer(tar) for tar in TARS], tag="latest")
    load(registry, layout)
    image = sources().image()
    assert [line.split("/")[3] for line in registry.requests()] == ["manifests", "blobs"]
    for number in range(len(TARS)):
        with image.open_layer(number) as reader:
            reader.finish()
    assert len(registry.requests()) == 2 + len(TARS)
    assert not registry.requests("HEAD")


def test_layers_come_several_at_a_time_and_from_the_one_that_is_asked_for(
    registry: FakeRegistry, layout: Layout, sources: Sources
) -> None:
    layers = [layout.layer(tar) for tar in TARS]
    layout.image(layers, tag="latest")
    load(registry, layout)
    image = sources().image()
    release = threading.Event()
    registry.misbehave(stall(release), "GET /v2/img/blobs")
    reader = threading.Thread(target=lambda: image.layer_file(1))
    reader.start()
    for _ in range(DOWNLOADS):
        assert registry.stalled.acquire(timeout=10)
    asked = {line.rpartition("/")[2] for line in registry.requests("GET /v2/img/blobs")[1:]}
    assert asked == {layer.descriptor["digest"] for layer in layers[1 : 1 + DOWNLOADS]}
    release.set()
    reader.join()
    assert image.layer_file(0).size == layers[0].descriptor["size"]


def test_downloads_go_on_and_are_verified(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    layers = [layout.layer(tar) for tar in TARS[:3]]
    layout.image(layers, tag="latest")
    load(registry, layout)
    registry.gate = Gate(uses=3)
    image = sources().image()
    registry.misbehave(cut_short(3000), layers[0].descriptor["digest"], times=1)
    registry.misbehave(reset(), layers[1].descriptor["digest"], times=1)
    digest = layers[2].descriptor["digest"]
    registry.repository("img").blobs[digest] = registry.repository("img").blobs[digest][::-1]
    for number in range(2):
        with image.open_layer(number) as reader:
            reader.finish()
    with pytest.raises(CorruptError, match=digest):
        image.layer_file(2)


def test_a_layer_that_is_missing_is_named(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    layer = layout.layer(TARS[0], media_type=f"{mediatype.OCI_LAYER}+gzip".replace("v1", "nondistributable.v1"))
    layout.image([layout.layer(TARS[1]), layer], tag="latest")
    load(registry, layout)
    del registry.repository("img").blobs[layer.descriptor["digest"]]
    image = sources().image()
    assert image.layer_file(0).size
    with pytest.raises(NotFoundError, match=r"layer 1 of docker://.* is missing: .*foreign layer"):
        image.layer_file(1)


def test_what_is_no_image_is_refused(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    registry.repository("img").blobs[str(Digest.of(b"{}"))] = b"{}"
    schema1 = b'{"schemaVersion":1,"fsLayers":[]}'
    kind = "application/vnd.docker.distribution.manifest.v1+json"
    registry.repository("img").manifests[str(Digest.of(schema1))] = kind, schema1
    registry.repository("img").tags["old"] = str(Digest.of(schema1))
    with pytest.raises(UnsupportedError, match="schema 1"):
        sources("img:old").image()
    big = b'{"schemaVersion":2,"x":"' + b"x" * (5 << 20) + b'"}'
    registry.repository("img").manifests[str(Digest.of(big))] = mediatype.OCI_MANIFEST, big
    registry.repository("img").tags["big"] = str(Digest.of(big))
    with pytest.raises(LimitError, match="limit"):
        sources("img:big").image()


def test_a_source_that_is_closed_gives_up_its_downloads(
    registry: FakeRegistry, layout: Layout, sources: Sources
) -> None:
    layout.image([layout.layer(tar) for tar in TARS], tag="latest")
    load(registry, layout)
    source = sources()
    image = source.image()
    release = threading.Event()
    registry.misbehave(stall(release), "GET /v2/img/blobs")
    errors: list[BaseException] = []

    def read() -> None:
        try:
            image.layer_file(0)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert registry.stalled.acquire(timeout=10)
    closer = threading.Thread(target=source.close)
    closer.start()
    until(lambda: source.is_closed)
    release.set()
    closer.join()
    reader.join()
    assert [type(error) for error in errors] == [UnavailableError]


def test_a_registry_that_fails_is_unavailable(registry: FakeRegistry, layout: Layout, sources: Sources) -> None:
    layout.image([layout.layer(TARS[0])], tag="latest")
    load(registry, layout)
    registry.misbehave(status(500), "GET /v2/img/manifests")
    with pytest.raises(UnavailableError, match="500"):
        sources().image()

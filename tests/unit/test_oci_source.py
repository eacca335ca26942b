"""What every image source does, whatever it reads from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.layouts import Layout, Saved, compress, digest_of, docker_archive, tar_of
from support.registry_faults import FakeRegistry, load_layout

from layerstore.errors import CorruptError, NotFoundError, UsageError
from layerstore.limits import DEFAULT_LIMITS
from layerstore.oci.files import RangeReader
from layerstore.oci.platform import Platform
from layerstore.oci.source import ImageSource
from layerstore.oci.source_name import SourceName
from layerstore.oci.transport import open_source
from layerstore.tar.archive import LayerArchive

LOWER = tar_of({"etc/": None, "etc/hosts": b"127.0.0.1 localhost\n"})
UPPER = tar_of({"bin/": None, "bin/sh": b"\x7fELF" + os.urandom(4096) * 64})

KINDS = {
    "oci": ("oci", ""),
    "oci-archive": ("oci-archive", ""),
    "oci-archive.gz": ("oci-archive", "gzip"),
    "oci-archive.zst": ("oci-archive", "zstd"),
    "oci-archive.xz": ("oci-archive", "xz"),
    "docker-archive": ("docker-archive", ""),
    "docker-archive.gz": ("docker-archive", "gzip"),
    "docker-archive.bz2": ("docker-archive", "bzip2"),
    "docker": ("docker", ""),
}
FILES = [kind for kind in KINDS if kind != "docker"]
"""Sources whose names have a path."""

Make = Callable[[list[bytes]], str]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes a source of one image, ``a/b:1``, with these layers; returns its name."""
    transport, compression = KINDS[request.param]
    stack = ExitStack()

    def build(layers: list[bytes]) -> str:
        if transport == "docker-archive":
            path = docker_archive(tmp_path / "x.tar", [Saved(layers, tags=["a/b:1"])], compression=compression)
            return f"{transport}:{path}"
        layout = Layout(tmp_path / "layout")
        layout.image(layers, tag="a/b:1")
        if transport == "oci":
            return layout.name()
        if transport == "docker":
            registry = stack.enter_context(FakeRegistry())
            load_layout(registry, "a", tmp_path / "layout")
            return f"docker://{registry.host}/a:a-b-1"
        return f"{transport}:{layout.archive(tmp_path / 'x.tar', compression=compression)}"

    with stack:
        yield build


class Opener:
    """Opens sources for a test, and closes them after it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.warnings: list[str] = []
        self.sources: list[ImageSource] = []

    def __call__(self, name: str) -> ImageSource:
        source = open_source(
            SourceName.parse(name),
            scratch=str(self.scratch),
            limits=DEFAULT_LIMITS,
            warn=self.warnings.append,
        )
        self.sources.append(source)
        return source


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    opener = Opener(scratch)
    yield opener
    for source in opener.sources:
        source.close()
    assert list(scratch.iterdir()) == []


def test_an_image_and_its_layers(make: Make, opener: Opener) -> None:
    image = opener(make([LOWER, UPPER])).image()
    assert [str(layer.diff_id) for layer in image.layers] == [digest_of(LOWER), digest_of(UPPER)]
    assert image.config.diff_ids == tuple(layer.diff_id for layer in image.layers)
    assert [layer.descriptor for layer in image.layers] == list(image.manifest.layers)
    assert image.platform == Platform("linux", "amd64")
    assert image.config.run.cmd == ("/bin/sh",)
    assert image.descriptor.size == len(image.manifest.raw)
    assert str(image.descriptor.digest) == digest_of(image.manifest.raw)
    assert image.manifest.config.size == len(image.config.raw)
    for number, (layer, tar) in enumerate(zip(image.layers, (LOWER, UPPER), strict=True)):
        with image.open_layer(number) as reader:
            data = reader.read()
            assert reader.verified
        assert digest_of(data) == str(layer.descriptor.digest)
        assert len(data) == layer.descriptor.size
        assert data in (tar, compress(tar, "gzip"))
    assert opener.warnings == []


def test_the_same_image_each_time(make: Make, opener: Opener) -> None:
    source = opener(make([LOWER]))
    one, two = source.image(), source.image(Platform.parse("linux/amd64"))
    assert one.descriptor == two.descriptor
    assert one.config.raw == two.config.raw


@pytest.mark.parametrize("make", FILES, indirect=True)
def test_the_tag_chooses(make: Make, opener: Opener) -> None:
    name = make([LOWER])
    assert len(opener(f"{name}:a/b:1").image().layers) == 1
    assert len(opener(f"{name}@0").image().layers) == 1
    with pytest.raises(NotFoundError, match=r"a/b:2 does not exist; .*'a/b:1'"):
        opener(f"{name}:a/b:2").image()
    with pytest.raises(NotFoundError, match=r"counted from 0"):
        opener(f"{name}@1").image()


def test_the_platform_has_to_be_that_of_the_image(make: Make, opener: Opener) -> None:
    source = opener(make([LOWER]))
    with pytest.raises(NotFoundError, match=r"is for linux/amd64, not for linux/arm64"):
        source.image(Platform.parse("linux/arm64"))
    assert source.image(Platform.parse("linux/x86_64")).platform == Platform("linux", "amd64")


def test_layers_go_into_layer_archives(make: Make, opener: Opener) -> None:
    image = opener(make([LOWER, UPPER])).image()
    for number, (layer, paths) in enumerate(
        zip(image.layers, ([b"etc", b"etc/hosts"], [b"bin", b"bin/sh"]), strict=True)
    ):
        file = image.layer_file(number)
        with (
            RangeReader(file, "layer") as reader,
            LayerArchive(
                file.path if file.is_whole else reader,
                scratch=str(opener.scratch),
                warn=opener.warnings.append,
                expected=layer.descriptor.digest,
                expected_size=layer.descriptor.size,
            ) as archive,
        ):
            assert [member.path.rstrip(b"/") for member in archive.members()] == paths
            assert archive.finish().diff_id == layer.diff_id
    assert opener.warnings == []


@pytest.mark.case("M15")
def test_no_layers(make: Make, opener: Opener) -> None:
    image = opener(make([])).image()
    assert (image.layers, image.config.diff_ids) == ((), ())


@pytest.mark.case("M08")
def test_the_same_layer_twice_is_two_layers(make: Make, opener: Opener) -> None:
    image = opener(make([LOWER, UPPER, LOWER])).image()
    assert [str(layer.diff_id) for layer in image.layers] == [digest_of(LOWER), digest_of(UPPER), digest_of(LOWER)]
    for number in (0, 2):
        with image.open_layer(number) as reader:
            assert digest_of(reader.read()) == str(image.layers[0].descriptor.digest)


def test_a_reader_can_be_finished_early_and_says_so(make: Make, opener: Opener) -> None:
    image = opener(make([UPPER])).image()
    with image.open_layer(0) as reader:
        assert len(reader.read(10)) == 10
        assert not reader.verified
        assert reader.tell() == 10
        reader.finish()
        assert reader.verified
        assert reader.read(1) == b""
        reader.finish()


@pytest.mark.case("M13")
def test_a_flipped_bit_of_a_layer_is_found_at_its_end(make: Make, opener: Opener) -> None:
    image = opener(make([UPPER])).image()
    file = image.open_layer(0).file
    with open(file.path, "r+b") as stored:
        stored.seek(file.offset + file.size // 2)
        byte = stored.read(1)[0]
        stored.seek(file.offset + file.size // 2)
        stored.write(bytes([byte ^ 1]))
    digest = str(image.layers[0].descriptor.digest)
    with image.open_layer(0) as reader, pytest.raises(CorruptError, match=f"layer 0 of .*expected {digest}") as caught:
        reader.read()
    assert caught.value.expected == digest
    assert caught.value.actual is not None and caught.value.actual.startswith("sha256:")
    with image.open_layer(0) as reader:
        with pytest.raises(CorruptError):
            reader.finish()
        assert not reader.verified


def test_a_file_that_shrinks_while_it_is_read(make: Make, opener: Opener) -> None:
    image = opener(make([UPPER])).image()
    with image.open_layer(0) as reader:
        os.truncate(reader.file.path, reader.file.offset + 1000)
        with pytest.raises(CorruptError, match="ends early"):
            reader.read()


@pytest.mark.parametrize("make", FILES, indirect=True)
def test_a_source_that_is_not_there(make: Make, opener: Opener, tmp_path: Path) -> None:
    transport = make([]).partition(":")[0]
    with pytest.raises(NotFoundError, match="nowhere"):
        opener(f"{transport}:{tmp_path}/nowhere:tag")


def test_transports_that_are_no_images_here(opener: Opener) -> None:
    for name in ("tar:-", "tree:."):
        with pytest.raises(UsageError, match="not an image"):
            opener(name)

"""Random layers of few contents, laid out by random ranges: the same tree, and every range where it is said to be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.conversions import Site, noise
from support.faults import fsync_for_free
from support.relays import pack_bytes, same
from support.tars import file, hardlink, sparse_pax, tar

from layerstore.audit import ContentCheck
from layerstore.digest import Digest
from layerstore.hot import HotFile, HotRange
from layerstore.image import Role, load_image
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import BLOCK_SIZE
from layerstore.relay import relay
from layerstore.store.verification import verify

SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
SIZES = [0, 600, BLOCK_SIZE, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE, 5 * CHUNK_SIZE - 7]


@st.composite
def layers(draw: st.DrawFn) -> bytes:
    """A layer of up to eight files of four contents, so that chunks are shared, with holes and hard links."""
    parts = []
    count = draw(st.integers(0, 8))
    for number in range(count):
        size, seed = draw(st.sampled_from(SIZES)), draw(st.integers(0, 3))
        match draw(st.integers(0, 5)):
            case 0 if number:
                parts.append(hardlink(f"f{number}", f"f{draw(st.integers(0, number - 1))}"))
            case 1 if size:
                hole = draw(st.sampled_from([0, BLOCK_SIZE, 3 * CHUNK_SIZE + 5]))
                parts.append(sparse_pax(f"f{number}", hole + size, [(hole, noise(size, seed))], "1.0"))
            case _:
                parts.append(file(f"f{number}", noise(size, seed)))
    return tar(*parts)


Wanted = list[tuple[int, int, int]]
wanted = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(1, 12)), max_size=12)
"""Device, first block and blocks; many of them name nothing."""


@contextmanager
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as path, fsync_for_free():
        yield Site(Path(path))


@SETTINGS
@given(st.lists(layers(), min_size=1, max_size=3), wanted, st.integers(1, 4))
def test_any_ranges_of_any_image(images: list[bytes], ranges: Wanted, jobs: int) -> None:
    with site() as here:
        for number, layer in enumerate(images):  # the last one may refer to packs of those before
            here.convert(here.tar(layer), Role.BASE, tag=f"image-{number}")
        name = f"image-{len(images) - 1}"
        (before,) = load_image(here.store, name).layers
        hot = [HotRange(before.metadata, d, first * BLOCK_SIZE, count * BLOCK_SIZE) for d, first, count in ranges]
        report = relay(here.store, name, hot, tag="hot", jobs=jobs)
        same(here, name, "hot")
        assert list(verify(here.store, check=ContentCheck())) == []
        assert report.matched + sum(report.unmatched.values()) == len(hot)
        (moved,) = report.layers
        after = moved.after
        old = [pack_bytes(here.store, pack) for pack in before.packs]
        new = [pack_bytes(here.store, pack) for pack in after.packs]
        assert report.after.frames <= max(1, report.before.frames) or report.hot_size > 0
        translated = []
        for each in hot:
            if not 1 <= each.device <= len(old) or each.offset + each.length > len(old[each.device - 1]):
                continue
            for device, offset, length, skipped in moved.at(each.device, each.offset, each.length):
                at = each.offset + skipped
                assert new[device - 1][offset : offset + length] == old[each.device - 1][at : at + length]
                translated.append(HotRange(after.metadata, device, offset, length))
        again = relay(here.store, "hot", translated)
        assert again.hot_size == report.hot_size
        same(here, name, str(again.manifest))


@SETTINGS
@given(
    layers(),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100_000), st.integers(0, 60_000)), max_size=8),
    st.booleans(),
)
def test_any_parts_of_files_of_any_conversion(layer: bytes, parts: Wanted, reuse: bool) -> None:
    with site() as here:
        hot = tuple(HotFile(b"f%d" % number, offset, length) for number, offset, length in parts)
        plain = here.convert(here.tar(layer), tag="plain")
        report = here.convert(here.tar(layer), tag="hot", hot=hot, dedup=reuse)
        same(here, "plain", "hot")
        assert list(verify(here.store, check=ContentCheck())) == []
        assert report.data_size == plain.data_size
        if hot:
            assert report.hot is not None
            assert report.hot.matched + sum(report.hot.unmatched.values()) == len(hot)
            assert report.hot.copied_size <= report.new_size <= report.data_size
            assert reuse or report.new_size == report.data_size


@given(
    st.lists(
        st.tuples(st.integers(-2, 1 << 40), st.integers(-(1 << 70), 1 << 70), st.integers(-5, 1 << 70)), max_size=20
    )
)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
def test_ranges_from_anywhere_only_ever_name_nothing_or_something(ranges: Wanted) -> None:
    with site() as here:
        here.convert(here.tar(tar(file("a", noise(50_000, 1)))), tag="it")
        (layer,) = load_image(here.store, "it").layers
        hot = [HotRange(digest, *each) for each in ranges for digest in (layer.metadata, Digest.of(b"x"))]
        report = relay(here.store, "it", hot, tag="hot")
        assert report.matched + sum(report.unmatched.values()) == len(hot)
        same(here, "it", "hot")

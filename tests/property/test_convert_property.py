"""Random images, converted and read back: whole, over a base cut at any layer, and by the difference of trees."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from support.conversions import Site, expected_rows
from support.faults import fsync_for_free
from support.tars import directory, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout

from layerstore.compose import plan_stack
from layerstore.errors import ConflictError, MalformedError
from layerstore.image import Role
from layerstore.pack.chunks import INLINE_LIMIT
from layerstore.pack.format import BLOCK_SIZE
from layerstore.tree.union import listed_whiteouts

SETTINGS = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

component = st.sampled_from(["a", "b", "c"])
path = st.lists(component, min_size=1, max_size=3).map("/".join)
modes = st.sampled_from([0o600, 0o755, 0o4711])
times = st.sampled_from([0, 5, -1, 2**33])
sizes = st.sampled_from(
    [0, 1, INLINE_LIMIT, INLINE_LIMIT + 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 40_000, 100_000]
)
targets = st.sampled_from(["a", "/b", "../c", "a/b", ".", "/nowhere"])


@dataclass(frozen=True)
class Part:
    """One member: its bytes, and how it is shown when a test fails."""

    shown: str
    data: bytes

    def __repr__(self) -> str:
        return self.shown


@st.composite
def parts(draw: st.DrawFn) -> Part:
    where, mode, mtime = draw(path), draw(modes), draw(times)
    match draw(st.integers(0, 11)):
        case 0 | 1:
            return Part(f"{where}/", directory(where, mode=mode, mtime=mtime))
        case 2:
            target = draw(targets)
            return Part(f"{where} -> {target}", symlink(where, target, mtime=mtime))
        case 3:
            target = draw(path)
            return Part(f"{where} = {target}", hardlink(where, target))
        case 4:
            return Part(f"-{where}", whiteout(where))
        case 5:
            return Part(f"-{where}/*", opaque(where))
        case 6:
            size = draw(st.integers(1, 5)) * BLOCK_SIZE + draw(st.integers(0, 1))
            runs = [(at, bytes([65 + at % 7]) * 100) for at in range(0, size - 100, 2 * BLOCK_SIZE)]
            return Part(f"{where} sparse {size}", sparse_pax(where, size, runs, "1.0", mode=mode))
        case 7:
            return Part(f"{where} pieces", sparse_pax(where, 300, [(0, b"x" * 9), (200, b"y" * 100)], "1.0"))
        case _:
            size, fill = draw(sizes), draw(st.sampled_from([b"x", b"yz"]))
            content = (fill * size)[:size]
            return Part(f"{where} {size}{fill!r}", file(where, content, mode=mode, mtime=mtime))


layers = st.lists(st.lists(parts(), max_size=7), min_size=1, max_size=4)


def archives(image: list[list[Part]]) -> list[bytes]:
    return [tar(*(part.data for part in layer)) for layer in image]


def accepted(image: list[list[Part]]) -> bool:
    try:
        expected_rows(*archives(image))
    except MalformedError as error:
        note(f"refused: {error}")
        return False
    return True


@contextmanager
def a_site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as top, fsync_for_free():
        yield Site(Path(top))


@SETTINGS
@given(layers)
def test_an_image_reads_back_as_its_layers_say(image: list[list[Part]]) -> None:
    data = archives(image)
    with a_site() as site:
        source = site.image(data)
        if not accepted(image):
            try:
                site.convert(source, tag="it")
            except MalformedError:
                assert site.snapshot()[1] == {} and site.leftovers() == []
                return
            raise AssertionError("converted what the merge refuses")
        report = site.convert(source, tag="it")
        rows = site.rows("it")
        assert rows == expected_rows(*data)
        assert report.entries == len(rows)
        assert report.data_size == report.new_size + report.shared_size
        assert report.stored_size == sum(site.blobs().values())


@SETTINGS
@example(
    [
        [Part("a pieces", sparse_pax("a", 300, [(0, b"x" * 9), (200, b"y" * 100)], "1.0"))],
        [Part("b = a", hardlink("b", "a"))],
    ],
    1,
)
@given(layers, st.integers(0, 3))
def test_over_any_base_the_stack_shows_the_image(image: list[list[Part]], cut: int) -> None:
    cut = min(cut, len(image))
    if cut == 0 or not accepted(image):
        return
    data = archives(image)
    with a_site() as site:
        base = site.convert(site.image(data[:cut]), tag="base")
        source = site.image(data)
        expected = expected_rows(*data)
        for number, rebase in enumerate((False, True)):
            for dedup in (True, False):
                tag = f"work{number}{dedup:d}"
                work = site.convert(source, Role.WORKSPACE, base="base", rebase=rebase, dedup=dedup, tag=tag)
                assert site.union(base, work) == expected
                with site.trees(base.layer, work.layer) as trees:
                    assert list(listed_whiteouts(trees)) == []
                if work.layer.metadata != base.layer.metadata:  # both empty: one layer, which a stack has once
                    plan_stack(site.store, base="base", workspace=tag)


@SETTINGS
@given(layers, layers)
def test_rebase_makes_one_image_of_any_other(one: list[list[Part]], other: list[list[Part]]) -> None:
    if not accepted(one) or not accepted(other):
        return
    with a_site() as site:
        base = site.convert(site.image(archives(one)), tag="base")
        source = site.image(archives(other))
        work = site.convert(source, Role.WORKSPACE, base="base", rebase=True, tag="work")
        assert site.union(base, work) == expected_rows(*archives(other))
        if archives(other)[: len(one)] != archives(one):
            try:
                site.convert(source, Role.WORKSPACE, base="base")
            except ConflictError as error:
                assert "isn't built on 'base'" in str(error)
            else:
                raise AssertionError("stripped layers that aren't the base's")


@SETTINGS
@given(layers)
def test_digests_depend_on_the_source_alone(image: list[list[Part]]) -> None:
    if not accepted(image):
        return
    data = archives(image)
    with a_site() as one, a_site() as two:
        two.convert(two.tar(file("other", b"x" * 100_000)), tag="other")
        first = one.convert(one.image(data), jobs=1)
        second = two.convert(two.image(data), jobs=3, dedup=False)
        assert first.manifest == second.manifest
        with_dedup = two.convert(two.image(data))
        assert two.rows(with_dedup) == one.rows(first)
        if not with_dedup.shared_size:  # looked, and found nothing: two passes over the data instead of one
            assert with_dedup.manifest == first.manifest

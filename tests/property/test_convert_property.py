"""Random images, converted and read back: whole, over a base cut at any layer, and by the difference of trees."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from support.conversions import Site, expected_rows
from support.faults import fsync_for_free
from support.layouts import compress
from support.tars import directory, file, hardlink, opaque, sparse_pax, symlink, tar, whiteout

from layerstore.audit import ContentCheck
from layerstore.cache.cache import Cache
from layerstore.compose import plan_stack
from layerstore.digest import Digest
from layerstore.errors import ConflictError, ImgtoolError, MalformedError
from layerstore.image import MANIFEST_MEDIA_TYPE, Role, load_image
from layerstore.oci.descriptor import Descriptor
from layerstore.pack.chunks import INLINE_LIMIT
from layerstore.pack.format import BLOCK_SIZE
from layerstore.publish import Publisher
from layerstore.store.verification import verify
from layerstore.tree.union import listed_whiteouts
from prefetch.fetcher import Fetcher
from prefetch.plan import plan_eager

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


VALID = tar(
    directory("d"),
    file("d/a", b"x" * 3000),
    hardlink("d/b", "d/a"),
    sparse_pax("s", 3 * BLOCK_SIZE, [(BLOCK_SIZE, b"data")], "1.0"),
    file("x", b"1", pax={"mtime": "1.5", "SCHILY.xattr.user.x": b"\0\1"}),
    symlink("l", "d/a"),
    whiteout("gone"),
)

changes = st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6)


@SETTINGS
@given(changes, st.integers(0, len(VALID)), st.sampled_from(["", "gzip", "zstd"]), st.booleans())
def test_whatever_the_bytes_are_only_our_errors_leave(
    edits: list[tuple[int, int]], length: int, compression: str, outside: bool
) -> None:
    """Damage inside of the compression, or to the compressed bytes themselves."""
    data = bytearray(VALID)
    if outside:
        data = bytearray(compress(VALID, compression))
    for at, value in edits:
        data[at % len(data)] = value
    blob = bytes(data[:length]) if outside else compress(bytes(data[:length]), compression)
    with a_site() as site:
        try:
            report = site.convert(site.raw_tar(blob), tag="it")
        except ImgtoolError as error:
            assert str(error).isprintable()
            assert site.snapshot() == ({}, {}, [])
        else:
            assert site.rows(report)[b""].type == "Directory"
            assert list(verify(site.store, check=ContentCheck())) == []


HOSTILE = [
    "",
    "0",
    "-1",
    "1",
    "9" * 30,
    "9" * 5000,
    " 4096",
    "4_096",
    "\u0663",
    "1e3",
    "0x10",
    "4096.0",
    "sha256:",
    "nobody",
]
HOSTILE += [
    "5-3",
    "0-99999999999999999999",
    "-1-5",
    "0-0",
    "sha512:" + "a" * 128,
    "sha256:" + "a" * 64,
    "sha256:" + "A" * 64,
]


@SETTINGS
@given(st.integers(0, 1), st.integers(0, 20), st.sampled_from([*HOSTILE, None]))
def test_whatever_a_manifest_says_only_our_errors_leave(number: int, key: int, value: str | None) -> None:
    with a_site() as site:
        report = site.convert(site.tar(file("a", b"xyz" * 9000), file("b", b"b")), tag="it")
        document = json.loads(report.image.manifest())
        notes = document["layers"][number]["annotations"]
        names = sorted(notes)
        name = names[key % len(names)]
        if value is None:
            del notes[name]
        else:
            notes[name] = value
        data = json.dumps(document).encode()
        target = Descriptor(MANIFEST_MEDIA_TYPE, Digest.of(data), len(data))
        with site.store.lease() as lease:
            publisher = Publisher(site.store, lease)
            publisher.small(data)
            site.store.set_reference(
                "it", target, expected=site.store.resolve("it"), lease=lease, reaches=[target.digest]
            )
        findings = list(verify(site.store, check=ContentCheck()))
        assert all(finding.message.isprintable() for finding in findings)
        cache = Cache(str(site.path))
        try:
            image = load_image(site.store, "it")
            site.rows("it")
            for layer in image.layers:
                cache.metadata.ensure(layer, site.store)
            with Fetcher(lambda location: site.store, lambda wanted, hex: 0, threads=1) as fetcher:
                fetcher.run(plan_eager(image.layers, cache, site.store))
        except ImgtoolError as error:
            assert str(error).isprintable()
            assert findings, "verify finds what can't be used"
        finally:
            cache.close()
        site.convert(site.tar(file("a", b"xyz" * 9000)), tag="again")

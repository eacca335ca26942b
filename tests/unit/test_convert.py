"""Conversions read back: what survives, what is shared, and what a digest depends on."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, expected_rows, noise
from support.faults import fsync_for_free
from support.layouts import Layout
from support.tars import (
    block,
    char,
    directory,
    fifo,
    file,
    hardlink,
    longname,
    sparse_gnu,
    sparse_pax,
    symlink,
    tar,
)
from support.tools import CHECKOUT
from support.trees import Row, at

from layerstore.digest import Digest
from layerstore.image import Role
from layerstore.pack.chunks import CHUNK_SIZE
from layerstore.pack.format import BLOCK_SIZE
from layerstore.tree.inode import File, Xattrs

MIB = 1 << 20
CAPABILITY_2 = struct.pack("<5I", 0x02000001, 0x2000, 0, 0, 0)
CAPABILITY_3 = struct.pack("<6I", 0x03000001, 0x2000, 0, 0, 0, 100_000)
NOBODY = 0xFFFFFFFF
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, bits, identity)
    for tag, bits, identity in ((1, 6, NOBODY), (2, 4, 1000), (4, 4, NOBODY), (16, 4, NOBODY), (32, 0, NOBODY))
)
LONG = b"n" * 255
TARGET = b"t" * 4094 + b"\xff"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        yield Site(tmp_path)


def zoo() -> bytes:
    """A layer with one of everything that an image can hold."""
    return tar(
        directory("./", mode=0o751, uid=3, gid=4, mtime=77),
        directory("usr", mode=0o1777, mtime=10),
        file("usr/ping", b"ping", mode=0o4755, pax={"SCHILY.xattr.security.capability": CAPABILITY_2}),
        file("usr/ping3", b"ping3", mode=0o2755, pax={"SCHILY.xattr.security.capability": CAPABILITY_3}),
        file("usr/acl", b"a" * 600, pax={"SCHILY.xattr.system.posix_acl_access": ACL}),
        directory("usr/acls", pax={"SCHILY.xattr.system.posix_acl_default": ACL}),
        file("usr/binary", pax={"SCHILY.xattr.user.bin": bytes(range(256)), "SCHILY.xattr.trusted.x": b""}),
        file("usr/origin", pax={"SCHILY.xattr.user.overlay.origin": b"", "SCHILY.xattr.user.big": bytes(65_535)}),
        file("ids", b"i", uid=4_294_967_294, gid=65_536),
        file("ids-pax", b"i", pax={"uid": "4294967294", "gid": "2097152"}),
        file("old", b"o", mtime=-5),
        file("older", b"o", mtime=-(2**63)),
        file("late", pax={"mtime": "253402300800.000000001"}),
        file("exact", b"e", pax={"mtime": "1635528968.656625010"}),
        file("before", b"b", pax={"mtime": "-1.25"}),
        file("large", noise(3 * MIB + 17, 1), mode=0o600),
        hardlink("large-2", "large"),
        hardlink("usr/large-3", "./large"),
        symlink("dangling", "/no/where", mtime=99, uid=7),
        hardlink("dangling-2", "dangling"),
        symlink("target", b"short", pax={"linkpath": TARGET}),
        char("tty", 5, 1, mode=0o620, gid=5),
        char("big-minor", 4095, 1_048_575),
        block("sda", 8, 0, mode=0o660),
        fifo("pipe", mode=0o600),
        hardlink("pipe-2", "pipe"),
        file(b"caf\xe9", b"latin"),
        file("line\nfeed\x01\\", b"odd"),
        file(b"short", b"long name", pax={"path": b"dir/" + LONG}),
        longname(b"gnu/" + b"g" * 200) + file("cut", b"gnu"),
        file("p" * 90, b"prefix", prefix="q" * 155),
        directory("empty", mode=0o700),
        file("nothing"),
        sparse_gnu("holes", 40 * MIB, [(0, b"head"), (20 * MIB, noise(5000, 2)), (39 * MIB, b"x" * 8192)]),
        sparse_pax("tail", 4098, [(4096, b"ab")], "1.0"),
        sparse_pax("all-hole", 10 * MIB, [], "0.1"),
    )


@pytest.mark.case("T27", "T29", "T30", "T33", "T34", "T36", "T39", "T48", "T50", "T51", "T52", "T53", "T56", "T64")
def test_every_attribute_survives(site: Site) -> None:
    rows = site.rows(site.convert(site.tar(zoo(), end=b"")))

    def xattrs(path: bytes) -> Xattrs:
        return rows[path].attrs.xattrs

    root = rows[b""].attrs
    assert (root.mode, root.uid, root.gid, root.mtime) == (stat.S_IFDIR | 0o751, 3, 4, 77)
    assert rows[b"usr"].attrs.mode == stat.S_IFDIR | 0o1777
    assert rows[b"usr/ping"].attrs.mode == stat.S_IFREG | 0o4755
    assert rows[b"usr/ping3"].attrs.mode == stat.S_IFREG | 0o2755
    assert xattrs(b"usr/ping") == ((b"security.capability", CAPABILITY_2),)
    assert xattrs(b"usr/ping3") == ((b"security.capability", CAPABILITY_3),)
    assert xattrs(b"usr/acl") == ((b"system.posix_acl_access", ACL),)
    assert xattrs(b"usr/acls") == ((b"system.posix_acl_default", ACL),)
    assert xattrs(b"usr/binary") == ((b"trusted.x", b""), (b"user.bin", bytes(range(256))))
    assert xattrs(b"usr/origin") == ((b"user.big", bytes(65_535)), (b"user.overlay.origin", b""))
    assert (rows[b"ids"].attrs.uid, rows[b"ids"].attrs.gid) == (4_294_967_294, 65_536)
    assert (rows[b"ids-pax"].attrs.uid, rows[b"ids-pax"].attrs.gid) == (4_294_967_294, 2_097_152)
    for path, time in {
        b"old": (-5, 0),
        b"older": (-(2**63), 0),
        b"late": (253_402_300_800, 1),
        b"exact": (1_635_528_968, 656_625_010),
        b"before": (-2, 750_000_000),
    }.items():
        assert (rows[path].attrs.mtime, rows[path].attrs.nsec) == time
    links = frozenset({b"large", b"large-2", b"usr/large-3"})
    assert {path: rows[path].links for path in links} == dict.fromkeys(links, links)
    assert rows[b"large"].value == noise(3 * MIB + 17, 1)
    assert rows[b"dangling"].type == rows[b"dangling-2"].type == "Symlink"
    assert rows[b"dangling-2"].links == {b"dangling", b"dangling-2"}
    assert (rows[b"dangling"].value, rows[b"dangling"].attrs.uid) == (b"/no/where", 7)
    assert rows[b"target"].value == TARGET
    assert {path: rows[path].value for path in (b"tty", b"big-minor", b"sda", b"pipe")} == {
        b"tty": (5, 1),
        b"big-minor": (4095, 1_048_575),
        b"sda": (8, 0),
        b"pipe": (0, 0),
    }
    assert rows[b"pipe"].links == {b"pipe", b"pipe-2"}
    assert rows[b"caf\xe9"].value == b"latin"
    assert rows[b"line\nfeed\x01\\"].value == b"odd"
    assert rows[b"dir/" + LONG].value == b"long name"
    assert rows[b"gnu/" + b"g" * 200].value == b"gnu"
    assert rows[b"q" * 155 + b"/" + b"p" * 90].value == b"prefix"
    assert rows[b"empty"].type == "Directory"
    assert rows[b"nothing"].value == b""
    assert rows == expected_rows(zoo())


@pytest.mark.case("T46", "T64")
def test_holes_are_holes(site: Site) -> None:
    report = site.convert(site.tar(zoo(), end=b""))
    with site.trees(report.layer) as [tree]:
        holes, tail, none = (at(tree, name) for name in (b"holes", b"tail", b"all-hole"))
        assert isinstance(holes, File) and isinstance(tail, File) and isinstance(none, File)
        assert (holes.size, tail.size, none.size) == (40 * MIB, 4098, 10 * MIB)
        assert none.extents == ()
        stored = sum(extent.length for extent in holes.extents)
        assert 4 + 5000 + 8192 <= stored <= 16 * BLOCK_SIZE
        assert sum(extent.length for extent in tail.extents) <= BLOCK_SIZE
    assert report.data_size < 4 * MIB


@pytest.mark.case("T46")
def test_300_gib_with_one_byte_cost_next_to_nothing(site: Site) -> None:
    size = 300 << 30
    last = site.tar(sparse_gnu("lastlog", size, [(size - 512, b"z" * 512)]), file("next", b"n"))
    report = site.convert(last)
    assert report.stored_size < 2 * MIB
    with site.trees(report.layer) as [tree]:
        found = at(tree, b"lastlog")
        assert isinstance(found, File)
        assert found.size == size
        assert sum(extent.length for extent in found.extents) <= 4 * MIB
        extent = found.extents[-1]
        assert extent.offset + extent.length == size
        assert extent.source.read_at(extent.at + extent.length - 513, 513) == b"\0" + b"z" * 512


def make_tree(top: Path, *, backwards: bool = False) -> Path:
    """A directory with everything that needs no root, its times set."""
    contents: dict[str, bytes | None] = {
        "sub": None,
        "sub/deep": None,
        "sub/large": noise(200_000, 3),
        "sub/deep/small": b"small",
        "setuid": b"#!",
        "one": b"1" * 5000,
        **{f"many/{number:03}": b"%d" % number for number in range(50)},
    }
    top.mkdir()
    for name, content in reversed(contents.items()) if backwards else contents.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
    os.chmod(top / "setuid", 0o6711)
    os.link(top / "one", top / "sub" / "two")
    os.symlink("/nowhere", top / "link")
    os.mkfifo(top / "pipe", 0o640)
    Path(os.fsdecode(os.fsencode(top) + b"/caf\xe9\n")).write_bytes(b"bytes")
    with open(top / "holes", "wb") as out:
        out.seek(4 * MIB)
        out.write(b"end")
    for directory_name, directories, files in os.walk(top, topdown=False):
        for name in files:
            os.utime(os.path.join(directory_name, name), ns=(0, -1_500_000_001), follow_symlinks=False)
        for name in directories:
            os.chmod(os.path.join(directory_name, name), 0o755)
            os.utime(os.path.join(directory_name, name), ns=(0, 123))
    os.chmod(top, 0o750)
    os.utime(top, ns=(0, 10**18))
    return top


def test_a_tree_survives(site: Site) -> None:
    top = make_tree(site.path / "tree")
    os.setxattr(top / "one", "user.x", b"\0\xff")
    report = site.convert(f"tree:{top}", Role.TOOLKIT)
    rows = site.rows(report)
    assert rows[b""].attrs[:5] == (stat.S_IFDIR | 0o750, os.getuid(), os.getgid(), 10**9, 0)
    assert rows[b"setuid"].attrs.mode == stat.S_IFREG | 0o6711
    assert (rows[b"setuid"].attrs.mtime, rows[b"setuid"].attrs.nsec) == (-2, 499_999_999)
    assert rows[b"one"].links == {b"one", b"sub/two"}
    assert rows[b"one"].attrs.xattrs == ((b"user.x", b"\0\xff"),)
    assert rows[b"link"].value == b"/nowhere"
    assert rows[b"pipe"].attrs.mode == stat.S_IFIFO | 0o640
    assert rows[b"caf\xe9\n"].value == b"bytes"
    assert rows[b"holes"].value == bytes(4 * MIB) + b"end"
    assert rows[b"sub/large"].value == noise(200_000, 3)
    assert report.entries == len(rows)
    assert report.layer.source is None and report.layer.diff_ids == ()


# -- what a digest depends on -----------------------------------------------------------------------------------------

CHILD = """
import json, sys
from pathlib import Path
from layerstore.convert import Conversion, convert
from layerstore.image import Role
from layerstore.oci.source_name import SourceName
from layerstore.store.directory import DirectoryStore
store = DirectoryStore.create(sys.argv[1])
for number, source in enumerate(sys.argv[3:]):
    convert(Conversion(SourceName.parse(source), Role.TOOLKIT, jobs=int(sys.argv[2])), store, tag=f"tag{number}")
print(json.dumps([[str(r.target.digest) for r in store.references()], [str(b.digest) for b in store.blobs()]]))
"""


def converted_by_child(
    store: Path, sources: list[str], *, jobs: int = 1, umask: int = 0o22, cwd: Path | None = None, **env: str
) -> object:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(store), str(jobs), *sources],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **env},
        cwd=cwd or CHECKOUT,
        umask=umask,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.case("Z11")
def test_the_same_source_gives_the_same_bytes_everywhere(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image([zoo(), tar(file("added", noise(400_000, 4)), file(".wh.large"))], tag="it")
    tree = make_tree(tmp_path / "tree")
    sources = [layout.name("it"), f"tree:{tree}"]
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    first = converted_by_child(tmp_path / "store1", sources, PYTHONHASHSEED="0")
    assert first == converted_by_child(
        tmp_path / "a longer path to store2",
        sources,
        jobs=5,
        umask=0o77,
        cwd=elsewhere,
        TMPDIR=str(elsewhere),
        TZ="Pacific/Kiritimati",
        LC_ALL="C",
        LANG="tr_TR.UTF-8",
        PYTHONHASHSEED="4711",
        PYTHONUTF8="0",
    )


@pytest.mark.case("Z11")
def test_the_order_in_which_a_file_system_lists_names_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = [Site(tmp_path / name) for name in ("a", "b", "c")]
    trees = [make_tree(tmp_path / name, backwards=name == "y") for name in ("x", "y")]
    real = os.listdir
    orders = iter([sorted, sorted, lambda names: sorted(names, reverse=True)])
    digests = []
    for site, tree in zip(sites, [*trees, trees[0]], strict=True):
        order = next(orders)
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", lambda path, order=order: order(real(path)))
            digests.append(site.convert(f"tree:{tree}").manifest)
    assert len(set(digests)) == 1


def test_without_dedup_the_content_of_the_store_does_not_matter(tmp_path: Path) -> None:
    shared = noise(MIB, 5)
    empty, full = Site(tmp_path / "empty"), Site(tmp_path / "full")
    full.convert(full.tar(file("first", noise(300_000, 6)), file("other", shared)), tag="other")
    source = full.tar(file("a", shared), file("b", noise(100_000, 7)))
    alone = empty.convert(source)
    assert full.convert(source, dedup=False).manifest == alone.manifest
    with_dedup = full.convert(source)
    assert with_dedup.layer.metadata != alone.layer.metadata
    assert full.rows(with_dedup) == empty.rows(alone)
    assert full.convert(source, dedup=False).manifest == alone.manifest


def test_one_pass_and_two_write_the_same(tmp_path: Path) -> None:
    # An empty store has nothing to refer to, so hashing and writing are one pass; another store makes them two.
    empty, other = Site(tmp_path / "empty"), Site(tmp_path / "other")
    other.convert(other.tar(file("unrelated", noise(MIB, 40))), tag="unrelated")
    repeated = noise(50_000, 41)
    parts = [file(f"{n}", repeated if n % 3 == 0 else noise(9_000 * n, n)) for n in range(1, 30)]
    source = empty.tar(*parts, file("half", repeated[:32_768] + noise(40_000, 42)))
    reports = [site.convert(source, jobs=jobs) for site in (empty, other) for jobs in (1, 3)]
    assert len({report.manifest for report in reports}) == 1
    assert len({report.new_size for report in (reports[0], reports[2])}) == 1


def test_the_level_changes_blobs_alone(site: Site) -> None:
    source = site.tar(file("text", b"".join(b"line %d\n" % number for number in range(100_000))))
    fast, small = (site.convert(source, level=level, dedup=False) for level in (1, 12))
    assert fast.layer.metadata == small.layer.metadata
    assert fast.layer.raw_digests == small.layer.raw_digests
    assert fast.layer.blob == small.layer.blob
    assert fast.layer.packs[0].blob != small.layer.packs[0].blob
    assert site.rows(fast) == site.rows(small)


def test_roles_do_not_change_layers(site: Site) -> None:
    source = site.tar(file("a", noise(MIB, 8)))
    layers = [site.convert(source, role).layer for role in Role]
    assert len({(layer.metadata, layer.packs) for layer in layers}) == 1
    assert [layer.role for layer in layers] == list(Role)


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_converting_twice_stores_nothing_more(site: Site) -> None:
    source = site.tar(file("a", noise(MIB, 9)), file("b", b"tiny"))
    first = site.convert(source, tag="first")
    assert first.new_size == first.data_size == MIB
    assert first.shared_size == 0
    assert first.stored_size == sum(site.blobs().values())
    before = site.blobs()
    again = site.convert(source, tag="again")
    assert again.manifest == first.manifest
    assert (again.new_size, again.shared_size, again.stored_size) == (0, MIB, 0)
    assert site.blobs() == before


def test_identical_files_are_stored_once_and_a_rebuilt_image_costs_what_changed(site: Site) -> None:
    files = {f"lib/{number}": noise(40_000 + number, number) for number in range(50)}
    size = sum(-(-len(content) // BLOCK_SIZE) * BLOCK_SIZE for content in files.values())
    first = site.convert(site.tar(*(file(name, content) for name, content in files.items())), tag="first")
    assert first.data_size == first.new_size == size

    moved = site.tar(
        *(file(f"elsewhere/{name}", content, mode=0o600, mtime=5, uid=9) for name, content in files.items())
    )
    before = sum(site.blobs().values())
    shared = site.convert(moved, tag="moved")
    assert (shared.new_size, shared.shared_size) == (0, size)
    assert shared.layer.packs == first.layer.packs
    assert sum(site.blobs().values()) - before == shared.stored_size < 10_000

    files["lib/7"] = noise(40_007, 1000)
    files["lib/new"] = noise(100_000, 1001)
    rebuilt = site.convert(site.tar(*(file(name, content) for name, content in files.items())), tag="rebuilt")
    changed = sum(-(-len(files[name]) // BLOCK_SIZE) * BLOCK_SIZE for name in ("lib/7", "lib/new"))
    assert rebuilt.new_size == changed
    assert rebuilt.shared_size == rebuilt.data_size - changed
    assert [pack.raw_size for pack in rebuilt.layer.packs] == [changed, size]
    assert site.rows(rebuilt)[b"lib/7"].value == noise(40_007, 1000)
    assert site.rows(rebuilt) == expected_rows(tar(*(file(name, content) for name, content in files.items())))


def test_a_file_that_grew_shares_its_beginning(site: Site) -> None:
    data = noise(20 * CHUNK_SIZE, 10)
    site.convert(site.tar(file("log", data)), tag="before")
    grown = site.convert(site.tar(file("log", data + b"more")), tag="after")
    assert grown.shared_size == len(data)
    assert grown.new_size == BLOCK_SIZE


def test_the_same_file_twice_in_an_image_is_stored_once(site: Site) -> None:
    report = site.convert(site.tar(*(file(f"copy{number}", noise(MIB, 11)) for number in range(5))))
    assert report.data_size == report.new_size == MIB
    assert {row.value for row in site.rows(report).values() if row.type == "File"} == {noise(MIB, 11)}


@pytest.mark.case("C05")
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_pack_is_named_and_not_reused_and_converting_again_heals_it(site: Site, damage: str) -> None:
    source = site.tar(file("a", noise(MIB, 12)), file("b", noise(MIB, 13)))
    first = site.convert(source, tag="first")
    pack = first.layer.packs[0]
    path = site.blob_path(pack.blob)
    intact = path.read_bytes()
    if damage == "flip":
        site.flip(pack.blob, 1000)
    elif damage == "cut":
        path.write_bytes(intact[:-100])
    else:
        path.unlink()

    warnings: list[str] = []
    other = site.convert(site.tar(file("only", noise(MIB, 12))), tag="other", warn=warnings.append)
    assert [text for text in warnings if str(pack.digest) in text]
    assert str(pack.blob) in " ".join(warnings)
    assert tuple(warnings) == other.warnings
    assert pack not in other.layer.packs and other.new_size == MIB
    assert site.rows(other)[b"only"].value == noise(MIB, 12)

    again = site.convert(source, tag="again", dedup=False)
    assert again.manifest == first.manifest
    assert path.read_bytes() == intact
    assert site.rows(first)[b"b"].value == noise(MIB, 13)


def test_a_damaged_metadata_image_heals_too(site: Site) -> None:
    source = site.tar(file("a", b"a"))
    first = site.convert(source, tag="first")
    intact = site.rows(first)
    site.flip(first.layer.blob)
    site.flip(first.image.config.digest)
    site.flip(first.manifest)
    warnings: list[str] = []
    assert site.convert(source, tag="first", warn=warnings.append).manifest == first.manifest
    assert str(first.manifest) in warnings[0]
    assert site.rows("first") == intact


@pytest.mark.case("C05", "C08")
def test_what_is_wrong_with_other_images_is_a_warning(site: Site) -> None:
    source = site.tar(file("a", noise(MIB, 14)))
    site.convert(source, tag="good")
    broken = [site.convert(site.tar(file(name, b"x")), tag=name).manifest for name in ("flipped", "missing")]
    site.flip(broken[0])
    site.blob_path(broken[1]).unlink()
    Path(site.store.root, "refs", "damaged").write_bytes(b"not JSON")
    later = Path(site.store.root, "refs", "later")
    later.write_bytes(Path(site.store.root, "refs", "good").read_bytes().replace(b'"version":1', b'"version":9'))
    warnings: list[str] = []
    report = site.convert(source, tag="mine", warn=warnings.append)
    assert report.new_size == 0
    assert len(warnings) == 4
    for word in ("damaged", "later", "flipped", "missing"):
        assert any(f"'{word}'" in text for text in warnings), word
    assert all("\n" not in text for text in warnings)


def test_small_savings_are_not_worth_another_pack(site: Site) -> None:
    site.convert(site.tar(file("a", noise(8 * BLOCK_SIZE, 15))), tag="other")
    report = site.convert(site.tar(file("a", noise(8 * BLOCK_SIZE, 15)), file("b", noise(MIB, 16))))
    assert report.shared_size == 0
    assert len(report.layer.packs) == 1


def test_the_report_adds_up(site: Site) -> None:
    first = site.convert(site.tar(file("a", noise(MIB, 17))), tag="a")
    source = site.tar(file("a", noise(MIB, 17)), file("b", noise(MIB, 18)), file("tiny", b"t"), directory("d"))
    before = sum(site.blobs().values())
    report = site.convert(source, tag="b")
    assert report.source_size == Path(source.removeprefix("tar:")).stat().st_size
    assert report.data_size == report.new_size + report.shared_size == 2 * MIB
    assert report.stored_size == sum(site.blobs().values()) - before
    assert report.entries == len(site.rows(report)) == 5
    assert report.layer.source == report.layer.diff_ids[0] == Digest.of(Path(source[4:]).read_bytes())
    assert report.image.blobs.keys() <= site.blobs().keys()
    assert report.warnings == ()
    assert {first.manifest, report.manifest} <= site.blobs().keys()


def test_rows_compare_what_is_visible() -> None:
    """The measure itself: two trees that differ in one attribute have different rows."""
    base = tar(file("a", b"1"), hardlink("b", "a"), directory("d"))
    assert expected_rows(base) == expected_rows(base)
    for other in (
        tar(file("a", b"2"), hardlink("b", "a"), directory("d")),
        tar(file("a", b"1"), file("b", b"1"), directory("d")),
        tar(file("a", b"1", mtime=1), hardlink("b", "a"), directory("d")),
        tar(file("a", b"1"), hardlink("b", "a")),
    ):
        assert expected_rows(base) != expected_rows(other)
    assert isinstance(expected_rows(base)[b"a"], Row)

"""Workspaces and toolkits over a base: what is stripped, what is kept, and that the stack shows the image exactly."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.conversions import Site, expected_rows, noise
from support.faults import fsync_for_free
from support.tars import directory, file, hardlink, opaque, sparse_gnu, symlink, tar, whiteout

from layerstore.convert import Report
from layerstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from layerstore.image import Role

MIB = 1 << 20

BASE = [
    tar(
        directory("usr", mtime=1),
        directory("usr/lib64", mode=0o711, mtime=2),
        file("usr/lib64/a", noise(50_000, 1)),
        symlink("lib64", "usr/lib64"),
        file("usr/big", noise(200_000, 2), mode=0o4755, uid=5, pax={"SCHILY.xattr.user.x": b"1"}),
        hardlink("usr/big-2", "usr/big"),
        hardlink("usr/big-3", "usr/big"),
        directory("etc"),
        file("etc/passwd", b"root"),
        file("etc/gone", b"gone"),
        directory("var/cache", mode=0o700),
        file("var/cache/one", b"1"),
        file("var/cache/two", noise(9000, 3)),
        directory("srv/tree/deep"),
        file("srv/tree/deep/leaf", b"leaf"),
        sparse_gnu("pieces", 300, [(0, b"x" * 100), (200, b"y" * 100)]),
    ),
    tar(directory("home/user", uid=1000), file("home/user/.profile", b"profile", uid=1000)),
]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        yield Site(tmp_path)


def over(site: Site, base: Sequence[bytes], *upper: bytes, **fields: object) -> tuple[Report, Report]:
    """The base converted as ``base``, and the image of all layers over it."""
    lower = site.convert(site.image(base), tag="base")
    return lower, site.convert(site.image([*base, *upper]), Role.WORKSPACE, base="base", tag="work", **fields)


def check(site: Site, base: Sequence[bytes], *upper: bytes) -> Report:
    """Both ways over the base show what the image is as a whole; returns the stripped one."""
    lower, stripped = over(site, base, *upper)
    rebased = site.convert(site.image([*base, *upper]), Role.WORKSPACE, base="base", rebase=True, tag="rebased")
    whole = site.convert(site.image([*base, *upper]), tag="whole")
    expected = site.rows(whole)
    assert expected == expected_rows(*base, *upper)
    assert site.union(lower, stripped) == expected
    assert site.union(lower, rebased) == expected
    return stripped


def test_the_layers_of_the_base_are_stripped(site: Site) -> None:
    stripped = check(site, BASE, tar(directory("src"), file("src/a.py", b"print()"), file("src/data", noise(MIB, 4))))
    rows = site.rows(stripped)
    assert set(rows) == {b"", b"src", b"src/a.py", b"src/data"}
    assert stripped.entries == 4
    base = site.convert(site.image(BASE), tag="base")
    assert stripped.layer.base == base.layer.metadata
    assert stripped.layer.diff_ids[: len(BASE)] == base.layer.diff_ids
    assert len(stripped.layer.diff_ids) == len(BASE) + 1


@pytest.mark.case("T05", "T11", "Z19")
def test_whiteouts_and_opaque_directories_remain_where_they_hide_something(site: Site) -> None:
    stripped = check(
        site,
        BASE,
        tar(
            whiteout("etc/gone"),
            whiteout("etc/never"),
            directory("var/cache"),
            opaque("var/cache"),
            file("var/cache/new", b"n"),
            opaque("no/such"),
            whiteout("srv/tree"),
        ),
        tar(directory("srv/tree"), file("srv/tree/again", b"again")),
    )
    rows = site.rows(stripped)
    whiteouts = {path for path, row in rows.items() if row.type == "Whiteout"}
    assert whiteouts == {b"etc/gone"}
    assert rows[b"etc/gone"].attrs.mode == stat.S_IFCHR
    assert {path for path, row in rows.items() if row.opaque} == {b"var/cache", b"srv/tree"}
    assert b"srv/tree/deep" not in rows and b"var/cache/one" not in rows
    assert not any(b".wh." in path for path in rows)


@pytest.mark.case("T13")
def test_a_whiteout_of_any_type_is_one(site: Site) -> None:
    stripped = check(
        site,
        BASE,
        tar(
            hardlink("etc/.wh.gone", "etc/passwd"),
            symlink("var/cache/.wh.one", "x"),
            directory("srv/.wh.tree"),
            file("usr/.wh.big-3", b"ten bytes."),
        ),
    )
    rows = site.rows(stripped)
    gone = {path for path, row in rows.items() if row.type == "Whiteout"}
    assert gone == {b"etc/gone", b"var/cache/one", b"srv/tree", b"usr/big-3"}
    assert rows[b"usr/big"].links == {b"usr/big", b"usr/big-2"}


@pytest.mark.case("T03", "T24", "T29")
def test_hardlinks_into_the_base_keep_one_inode(site: Site) -> None:
    stripped = check(
        site,
        BASE,
        tar(
            hardlink("opt/big", "usr/big"),
            hardlink("opt/big", "usr/big"),
            hardlink("opt/early", "opt/late"),
            file("opt/late", b"123"),
            hardlink("opt/profile", "home/user/.profile"),
        ),
    )
    rows = site.rows(stripped)
    names = frozenset({b"usr/big", b"usr/big-2", b"usr/big-3", b"opt/big"})
    assert {path for path, row in rows.items() if row.links == names} == names
    assert rows[b"opt/big"].attrs.mode == stat.S_IFREG | 0o4755
    assert rows[b"opt/big"].attrs.xattrs == ((b"user.x", b"1"),)
    assert rows[b"opt/early"].links == {b"opt/early", b"opt/late"}
    assert rows[b"opt/early"].value == b"123"
    base = site.convert(site.image(BASE), tag="base")
    assert stripped.layer.packs == base.layer.packs, "what is in the base's pack is not stored again"


def test_a_hardlink_to_a_small_file_in_pieces_finds_its_data(site: Site) -> None:
    """In the base such a file is chunked, for it has a hole; read back it has none, and belongs inline."""
    stripped = check(site, BASE, tar(hardlink("pieces-2", "pieces"), file("other", noise(100_000, 5))))
    assert site.rows(stripped)[b"pieces-2"].value == b"x" * 100 + bytes(100) + b"y" * 100


@pytest.mark.case("T21")
def test_a_symlinked_parent_in_the_base_is_followed(site: Site) -> None:
    stripped = check(site, BASE, tar(file("lib64/b", b"b"), file("lib64/sub/c", b"c"), whiteout("lib64/a")))
    rows = site.rows(stripped)
    assert rows[b"usr/lib64/b"].value == b"b"
    assert rows[b"usr/lib64/sub/c"].value == b"c"
    assert rows[b"usr/lib64/a"].type == "Whiteout"
    assert b"lib64" not in rows
    assert rows[b"usr/lib64"].attrs.mode == stat.S_IFDIR | 0o711


@pytest.mark.case("T15", "T16", "T18", "T19", "T20")
def test_types_change_places_over_the_base(site: Site) -> None:
    stripped = check(
        site,
        BASE,
        tar(
            directory("usr", mtime=50),
            symlink("var/cache", "/tmp"),
            file("srv", b"file"),
            whiteout("lib64"),
            directory("lib64"),
            file("lib64/real", b"r"),
        ),
        tar(file("etc/passwd/q", b"q"), symlink("home", "elsewhere")),
    )
    rows = site.rows(stripped)
    assert rows[b"var/cache"].type == "Symlink"
    assert rows[b"srv"].value == b"file"
    assert rows[b"lib64"].type == "Directory"
    assert rows[b"usr"].attrs.mtime == 50


def test_attributes_alone_copy_no_data(site: Site) -> None:
    stripped = check(site, BASE, tar(file("usr/big", noise(200_000, 2), mode=0o600), directory("etc", mode=0o500)))
    assert stripped.new_size == 0
    rows = site.rows(stripped)
    assert rows[b"usr/big"].attrs.mode == stat.S_IFREG | 0o600
    assert rows[b"etc"].attrs.mode == stat.S_IFDIR | 0o500
    assert b"etc/passwd" not in rows


def test_the_base_itself_over_the_base_is_nothing(site: Site) -> None:
    stripped = check(site, BASE)
    assert set(site.rows(stripped)) == {b""}
    assert stripped.layer.packs == ()
    assert stripped.data_size == stripped.new_size == 0


def test_a_base_may_be_named_by_its_digest(site: Site) -> None:
    base = site.convert(site.image(BASE))
    image = site.image([*BASE, tar(file("a", b"a"))])
    report = site.convert(image, Role.TOOLKIT, base=str(base.manifest))
    assert report.layer.base == base.layer.metadata
    assert report.layer.role is Role.TOOLKIT


def test_an_image_that_is_not_built_on_the_base_is_refused(site: Site) -> None:
    site.convert(site.image(BASE), tag="base")
    before = site.snapshot()
    other = site.image([BASE[0], tar(file("a", b"a"))])
    with pytest.raises(ConflictError) as caught:
        site.convert(other, Role.WORKSPACE, base="base", tag="work")
    assert str(caught.value) == (
        f"{other} isn't built on 'base': of the base's 2 layers the image begins with 1; "
        "name its own base, or --rebase to compute the difference"
    )
    with pytest.raises(ConflictError, match="of the base's 2 layers the image begins with 1;"):
        site.convert(site.image(BASE[:1]), Role.WORKSPACE, base="base")
    assert site.snapshot() == before


def test_rebase_computes_the_difference_to_a_stranger(site: Site) -> None:
    stranger = [
        tar(
            directory("usr", mode=0o700, mtime=9),
            file("usr/big", noise(200_000, 2), mode=0o4755, uid=5, pax={"SCHILY.xattr.user.x": b"1"}),
            hardlink("usr/big-2", "usr/big"),
            file("etc/passwd", b"root"),
            file("only/here", noise(70_000, 6)),
            symlink("lib64", "usr/lib64"),
        )
    ]
    base = site.convert(site.image(BASE), tag="base")
    rebased = site.convert(site.image(stranger), Role.WORKSPACE, base="base", rebase=True)
    assert site.union(base, rebased) == expected_rows(*stranger)
    assert rebased.layer.base == base.layer.metadata
    rows = site.rows(rebased)
    assert b"lib64" not in rows, "what is equal is not repeated"
    assert rows[b"usr/big"].links == {b"usr/big", b"usr/big-2"}
    assert rows[b"var"].type == rows[b"home"].type == rows[b"srv"].type == "Whiteout"
    assert rebased.new_size == -(-70_000 // 4096) * 4096


def test_a_tar_goes_over_a_base(site: Site) -> None:
    base = site.convert(site.image(BASE), tag="base")
    layer = tar(whiteout("etc/gone"), file("lib64/b", b"b"), hardlink("a", "usr/lib64/a"))
    report = site.convert(site.raw_tar(layer), Role.WORKSPACE, base="base")
    assert site.union(base, report) == expected_rows(*BASE, layer)
    rebased = site.convert(site.raw_tar(tar(file("etc/passwd", b"root"))), Role.WORKSPACE, base="base", rebase=True)
    assert site.union(base, rebased) == expected_rows(tar(file("etc/passwd", b"root")))


def test_a_base_may_be_a_tar(site: Site) -> None:
    base = site.convert(site.raw_tar(BASE[0]), tag="base")
    upper = tar(file("new", b"new"))
    report = site.convert(site.image([BASE[0], upper]), Role.WORKSPACE, base="base")
    assert set(site.rows(report)) == {b"", b"new"}
    assert site.union(base, report) == expected_rows(BASE[0], upper)


def test_a_tree_over_a_base_adds_and_deletes_nothing(site: Site) -> None:
    base = site.convert(site.image(BASE), tag="base")
    top = site.path / "tree"
    (top / "etc").mkdir(parents=True)
    (top / "etc/added").write_bytes(b"added")
    (top / "usr").mkdir()
    (top / "usr/big").write_bytes(noise(200_000, 2))
    added = site.convert(f"tree:{top}", Role.WORKSPACE, base="base")
    shown = site.union(base, added)
    assert shown[b"etc/added"].value == b"added"
    assert shown[b"etc/passwd"].value == b"root"
    assert shown[b"usr/big"].value == noise(200_000, 2)
    assert shown[b"usr/big"].attrs.uid == os.getuid()
    assert added.new_size == 0, "its data is the base's"
    rebased = site.convert(f"tree:{top}", Role.WORKSPACE, base="base", rebase=True)
    assert site.union(base, rebased) == site.rows(site.convert(f"tree:{top}"))


@pytest.mark.parametrize("kind", ["no layers", "tree"])
def test_a_base_without_recorded_layers_can_only_be_rebased_on(site: Site, kind: str) -> None:
    if kind == "tree":
        (site.path / "tree").mkdir()
        base = site.convert(f"tree:{site.path}/tree", tag="base")
    else:
        base = site.convert(site.image([]), tag="base")
    image = site.image([tar(file("a", b"a"))])
    with pytest.raises(ConflictError, match="the base doesn't record the layers it was made from"):
        site.convert(image, Role.WORKSPACE, base="base")
    rebased = site.convert(image, Role.WORKSPACE, base="base", rebase=True)
    assert site.union(base, rebased) == expected_rows(tar(file("a", b"a")))


def test_the_packs_of_the_base_come_first_and_are_not_counted(site: Site) -> None:
    base = site.convert(site.image(BASE), tag="base")
    site.convert(site.tar(file("x", noise(200_000, 2)), file("y", noise(300_000, 7))), tag="other")
    upper = tar(file("copy", noise(200_000, 2)), file("y", noise(300_000, 7)), file("z", noise(100_000, 8)))
    report = site.convert(site.image([*BASE, upper]), Role.WORKSPACE, base="base")
    own, first, second = report.layer.packs
    assert own.raw_size == -(-100_000 // 4096) * 4096
    assert (first,) == base.layer.packs
    assert second not in base.layer.packs
    alone = site.convert(site.image([*BASE, upper]), Role.WORKSPACE, base="base", dedup=False)
    assert alone.layer.packs[1:] == base.layer.packs
    assert alone.new_size == report.new_size + -(-300_000 // 4096) * 4096


@pytest.mark.case("C05")
def test_a_base_that_lost_its_pack_is_no_reason_to_fail(site: Site) -> None:
    """Files that come from the base, by a hard link or by equal content, need its data; others don't."""
    base = site.convert(site.image(BASE), tag="base")
    site.flip(base.layer.packs[0].blob, 100)
    warnings: list[str] = []
    upper = tar(file("copy", noise(200_000, 2)))
    report = site.convert(site.image([*BASE, upper]), Role.WORKSPACE, base="base", warn=warnings.append)
    assert str(base.layer.packs[0].digest) in warnings[0]
    assert site.rows(report)[b"copy"].value == noise(200_000, 2)
    assert base.layer.packs[0] not in report.layer.packs
    before = site.snapshot()
    with pytest.raises(CorruptError, match=f"frame 0 of pack {base.layer.packs[0].digest}"):
        site.convert(site.image([*BASE, tar(hardlink("b", "usr/big"))]), Role.WORKSPACE, base="base", tag="work")
    assert site.snapshot() == before


@pytest.mark.case("C05")
def test_a_damaged_metadata_image_of_the_base_is_refused(site: Site) -> None:
    base = site.convert(site.image(BASE), tag="base")
    site.flip(base.layer.blob, 50)
    before = site.snapshot()
    with pytest.raises(CorruptError, match=f"metadata image {base.layer.metadata}"):
        site.convert(site.image(BASE), Role.WORKSPACE, base="base", tag="work")
    assert site.snapshot() == before


def test_what_is_no_base_is_said_to_be_none(site: Site) -> None:
    image = site.image(BASE)
    site.convert(image, tag="base")
    site.convert(image, Role.WORKSPACE, tag="work")
    before = site.snapshot()
    for fields, error, text in (
        ({"base": "work"}, UsageError, "'work' is no base but: workspace"),
        ({"base": "nothing"}, NotFoundError, "nothing"),
        ({"rebase": True}, UsageError, "name it with --base"),
        ({"base": "base", "role": Role.BASE}, UsageError, "a base stands on nothing"),
        ({"base": "no@name"}, UsageError, "not a reference name"),
    ):
        with pytest.raises(error, match=text):
            site.convert(image, **{"role": Role.WORKSPACE, **fields})  # type: ignore[arg-type]
    assert site.snapshot() == before

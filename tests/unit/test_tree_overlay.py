"""Layers applied over a base: the delta that overlayfs stacks on it."""

from __future__ import annotations

import stat

import pytest
from support.trees import Layer, at, clone, content, directory_at, manifest, merged

from layerstore.tree.inode import Attrs, Directory, Inode, Symlink, Whiteout, walk
from layerstore.tree.union import listed_whiteouts, merge_overlay


def delta_of(lower: Layer, *layers: Layer) -> Directory:
    """The delta of ``layers`` over ``lower``, which is checked to show what all of them together are."""
    base = merged(lower)
    before = manifest(base)
    delta = merged(*layers, lower=base)
    assert manifest(base) == before, "the lower was modified"
    assert manifest(merge_overlay([base, clone(delta)])) == manifest(merged(lower, *layers))
    assert list(listed_whiteouts([base, delta])) == []
    return delta


def marks(delta: Directory) -> list[str]:
    """The paths of a delta in walk order: whiteouts with -, opaque directories with !."""

    def mark(inode: Inode) -> str:
        if isinstance(inode, Whiteout):
            return "-"
        return "!" if isinstance(inode, Directory) and inode.opaque else ""

    return [mark(inode) + path.decode() for path, inode in walk(delta)][1:]


def test_nothing_of_the_lower_is_repeated() -> None:
    lower = Layer().dir(b"a", 0o700).file(b"a/x").file(b"b/y")
    assert marks(delta_of(lower)) == []
    assert marks(delta_of(lower, Layer())) == []
    assert marks(delta_of(lower, Layer().dir(b"a", 0o700))) == [], "a directory like the one below adds nothing"
    assert marks(delta_of(lower, Layer().dir(b"a", 0o711))) == ["a"]
    assert marks(delta_of(lower, Layer().file(b"a/x"))) == ["a", "a/x"]


def test_implied_parents_look_like_the_lower_ones() -> None:
    lower = Layer().dir(b".", 0o711, uid=4).dir(b"a", 0o700, uid=5, mtime=6, xattrs=((b"user.x", b"1"),)).dir(b"a/b")
    delta = delta_of(lower, Layer().file(b"a/b/c/d"))
    assert marks(delta) == ["a", "a/b", "a/b/c", "a/b/c/d"]
    assert at(delta, b"a").attrs == Attrs(stat.S_IFDIR | 0o700, 5, 0, 6, 0, ((b"user.x", b"1"),))
    assert at(delta, b"a/b/c").attrs == Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0)
    assert delta.attrs == Attrs(stat.S_IFDIR | 0o711, 4, 0, 1000, 0)


@pytest.mark.case("T11", "T12")
def test_whiteouts_only_of_what_the_lower_shows() -> None:
    lower = Layer().file(b"a/x").file(b"a/y").file(b"f")
    assert marks(delta_of(lower, Layer().file(b"a/.wh.x").file(b".wh.ghost").file(b"no/such/.wh.d"))) == ["a", "-a/x"]
    assert marks(delta_of(lower, Layer().file(b"f/.wh.x").file(b".wh.a"))) == ["-a"]
    assert marks(delta_of(lower, Layer().file(b"g"), Layer().file(b".wh.g"))) == [], "made and removed above"
    assert marks(delta_of(lower, Layer().file(b"a/.wh.x"), Layer().file(b"a/x"))) == ["a", "a/x"]
    assert marks(delta_of(lower, Layer().file(b"a/.wh.x"), Layer().file(b".wh.a"))) == ["-a"]


@pytest.mark.case("O10")
def test_a_root_whiteout() -> None:
    lower = Layer().file(b"test").file(b"root/test").file(b"a/b/test")
    assert marks(delta_of(lower, Layer().file(b".wh.test"))) == ["-test"]


@pytest.mark.case("T04", "T05")
def test_opaque_directories() -> None:
    lower = Layer().dir(b"a", 0o700).file(b"a/old")
    for upper in (
        Layer().dir(b"a").file(b"a/new").file(b"a/.wh..wh..opq"),
        Layer().file(b"a/.wh..wh..opq").dir(b"a").file(b"a/new"),
    ):
        delta = delta_of(lower, upper)
        assert marks(delta) == ["!a", "a/new"]
        assert at(delta, b"a").attrs.mode == stat.S_IFDIR | 0o755
    delta = delta_of(lower, Layer().file(b"a/.wh..wh..opq"))
    assert marks(delta) == ["!a"]
    assert at(delta, b"a").attrs.mode == stat.S_IFDIR | 0o700, "implied, so it looks like the lower one"


def test_opaque_stays_through_later_layers() -> None:
    lower = Layer().file(b"a/old").file(b"a/s/old")
    one = Layer().file(b"a/.wh..wh..opq").file(b"a/one")
    delta = delta_of(lower, one, Layer().dir(b"a", 0o700).file(b"a/two").file(b"a/s/new"), Layer().file(b"a/.wh.one"))
    assert marks(delta) == ["!a", "a/s", "a/s/new", "a/two"], "below an opaque directory nothing needs a mark"
    assert marks(delta_of(lower, one, Layer().file(b".wh.a"))) == ["-a"]


def test_opaque_only_where_the_lower_has_a_directory() -> None:
    lower = Layer().file(b"f").dir(b"d")
    assert marks(delta_of(lower, Layer().dir(b"n").file(b"n/x").file(b"n/.wh..wh..opq"))) == ["n", "n/x"]
    assert marks(delta_of(lower, Layer().file(b".wh.f").dir(b"f").file(b"f/.wh..wh..opq"))) == ["f"]
    assert marks(delta_of(lower, Layer().file(b".wh.d").file(b"d/s/x"))) == ["!d", "d/s", "d/s/x"]


def test_an_opaque_root_becomes_whiteouts() -> None:
    """The kernel merges the roots of all layers, whatever their xattrs say."""
    lower = Layer().file(b"a").file(b"d/x").file(b"e/x")
    delta = delta_of(lower, Layer().file(b"d/y").file(b".wh..wh..opq"))
    assert not delta.opaque
    assert marks(delta) == ["-a", "!d", "d/y", "-e"]


def test_types_that_change() -> None:
    lower = Layer().dir(b"d").file(b"d/x").file(b"f").symlink(b"l", b"d")
    assert marks(delta_of(lower, Layer().file(b"d").dir(b"f").dir(b"l"))) == ["d", "f", "l"]
    assert marks(delta_of(lower, Layer().file(b"d"), Layer().dir(b"d").file(b"d/y"))) == ["!d", "d/y"]
    assert marks(delta_of(lower, Layer().file(b".wh.d"), Layer().dir(b"d").file(b"d/y"))) == ["!d", "d/y"]
    assert marks(delta_of(lower, Layer().file(b"f/q"))) == ["f", "f/q"]


@pytest.mark.case("T18", "T19")
def test_links_and_directories_change_places() -> None:
    lower = Layer().dir(b"real").file(b"real/r").symlink(b"things", b"real").file(b"d/f")
    upper = Layer().file(b".wh.real").dir(b"things").file(b"things/x").symlink(b"d", b"e")
    assert marks(delta_of(lower, upper)) == ["d", "-real", "things", "things/x"]


@pytest.mark.case("T21")
def test_a_symlinked_parent_in_the_lower_is_followed() -> None:
    lower = Layer().dir(b"usr/lib64", 0o700).file(b"usr/lib64/a").symlink(b"lib64", b"usr/lib64")
    delta = delta_of(lower, Layer().file(b"lib64/b", b"new").file(b"lib64/.wh.a"))
    assert marks(delta) == ["usr", "usr/lib64", "-usr/lib64/a", "usr/lib64/b"]
    assert at(delta, b"usr/lib64").attrs.mode == stat.S_IFDIR | 0o700


def test_links_into_the_lower_bring_the_inode_up_under_all_its_names() -> None:
    lower = Layer().file(b"a", b"x").hardlink(b"d/b", b"a").hardlink(b"e/c", b"a").file(b"d/other")
    delta = delta_of(lower, Layer().hardlink(b"n/new", b"d/b"))
    assert marks(delta) == ["a", "d", "d/b", "e", "e/c", "n", "n/new"]
    assert at(delta, b"a") is at(delta, b"n/new")
    assert content(at(delta, b"a")) == b"x"


def test_a_link_keeps_what_its_target_was() -> None:
    lower = Layer().file(b"a", b"old").hardlink(b"b", b"a")
    assert marks(delta_of(lower, Layer().hardlink(b"c", b"a").file(b"a", b"new"))) == ["a", "b", "c"]
    assert marks(delta_of(lower, Layer().hardlink(b"c", b"a").file(b".wh.a").file(b".wh.b"))) == ["-a", "-b", "c"]
    assert marks(delta_of(lower, Layer().hardlink(b"c", b"a"), Layer().file(b".wh.c"))) == ["a", "b"]


def test_a_name_less_in_a_link_set() -> None:
    """The inode that stays would count a name too many if it were left in the lower."""
    lower = Layer().file(b"d/a", b"x").hardlink(b"d/b", b"d/a").hardlink(b"c", b"d/a").file(b"d/z")
    assert marks(delta_of(lower, Layer().file(b"d/.wh.a"))) == ["c", "d", "-d/a", "d/b"]
    assert marks(delta_of(lower, Layer().file(b".wh.d"))) == ["c", "-d"]
    assert marks(delta_of(lower, Layer().file(b"d"))) == ["c", "d"]
    assert marks(delta_of(lower, Layer().file(b"d/.wh..wh..opq"))) == ["c", "!d"]
    assert marks(delta_of(lower, Layer().file(b"c", b"new"))) == ["c", "d", "d/a", "d/b"]
    assert marks(delta_of(lower, Layer().file(b"d/.wh.z"))) == ["d", "-d/z"]


@pytest.mark.case("T24")
def test_a_forward_link_over_the_lower() -> None:
    lower = Layer().file(b"x", b"1").hardlink(b"y", b"x")
    delta = delta_of(lower, Layer().hardlink(b"b", b"a").hardlink(b"a", b"x"))
    assert marks(delta) == ["a", "b", "x", "y"]


@pytest.mark.case("T27")
def test_a_link_to_a_symlink_of_the_lower() -> None:
    delta = delta_of(Layer().symlink(b"l", b"t"), Layer().hardlink(b"m", b"l"))
    assert isinstance(at(delta, b"m"), Symlink) and at(delta, b"m") is at(delta, b"l")


def test_a_link_to_the_inode_the_name_already_has() -> None:
    lower = Layer().file(b"a", b"x").hardlink(b"b", b"a")
    assert marks(delta_of(lower, Layer().hardlink(b"b", b"a"))) == ["a", "b"]
    assert marks(delta_of(lower, Layer().hardlink(b"b", b"a").file(b".wh.b"))) == ["a", "b"]


def test_the_lower_may_be_read_from_an_image() -> None:
    """Directories of other makers are taken as they are: no class of ours is expected in the lower."""
    base = clone(merged(Layer().file(b"a/b/c", b"1").file(b"a/d", b"2")))
    delta = merged(Layer().file(b"a/b/.wh.c").file(b"a/e"), lower=base)
    assert marks(delta) == ["a", "a/b", "-a/b/c", "a/e"]
    assert directory_at(base, b"a/b").entries.keys() == {b"c"}

"""What overlayfs shows for trees, without mounting them."""

from __future__ import annotations

import pytest
from support.trees import Layer, at, content, manifest, merged, names, tree_of

from layerstore.errors import CorruptError
from layerstore.tree.inode import Attrs, Directory, Inode
from layerstore.tree.union import Conflict, conflicts, listed_whiteouts, merge_overlay


def stack() -> list[Directory]:
    """Three trees with every kind of meeting."""
    return [
        merged(
            Layer().file(b"both/x", b"0").file(b"both/y", b"0").file(b"cut/a").file(b"d/a").file(b"e/a").file(b"f/a")
        ),
        tree_of(
            Layer().file(b"both/x", b"1").dir(b"both", 0o700).dir(b"cut").file(b"cut/b").file(b"d").dir(b"e"),
            opaque=[b"cut"],
            whiteouts=[b"both/y", b"f", b"e/a"],
        ),
        merged(Layer().file(b"both/z", b"2").dir(b"both", 0o711).file(b"cut/c").file(b"d/c").file(b"f/c")),
    ]


def test_merge_overlay() -> None:
    tree = merge_overlay(stack())
    assert names(tree) == [
        *(b"both", b"both/x", b"both/z", b"cut", b"cut/b", b"cut/c", b"d", b"d/c", b"e", b"f", b"f/c")
    ]
    assert content(at(tree, b"both/x")) == b"1"
    assert at(tree, b"both").attrs.mode & 0o777 == 0o711
    rows = manifest(tree)
    assert not any(row.opaque or row.type == "Whiteout" for row in rows.values())


def test_what_does_not_differ_is_shared() -> None:
    lower = merged(Layer().file(b"a/b/c").file(b"d/x"))
    tree = merge_overlay([lower, merged(Layer().file(b"d/y"))])
    assert at(tree, b"a") is at(lower, b"a")
    assert at(tree, b"d") is not at(lower, b"d") and names(lower) == [b"a", b"a/b", b"a/b/c", b"d", b"d/x"]


@pytest.mark.case("T12")
def test_a_stray_whiteout_shows_nothing_and_is_found() -> None:
    alone = tree_of(Layer().file(b"home/a"), whiteouts=[b"home/changelog.txt", b"gone"])
    assert names(merge_overlay([alone])) == [b"home", b"home/a"]
    assert list(listed_whiteouts([alone])) == [(b"gone", 0), (b"home/changelog.txt", 0)]
    empty = merged(Layer())
    assert list(listed_whiteouts([empty, alone])) == [(b"home/changelog.txt", 1)]
    assert list(listed_whiteouts([empty, alone, empty])) == [(b"home/changelog.txt", 1)]
    assert list(listed_whiteouts([merged(Layer().dir(b"home")), alone])) == []
    assert list(listed_whiteouts([empty, alone, merged(Layer().dir(b"home"))])) == []


@pytest.mark.case("T12")
def test_whiteouts_under_opaque_directories_are_stray() -> None:
    lower = merged(Layer().file(b"d/x").file(b"d/y"))
    upper = tree_of(Layer().dir(b"d"), opaque=[b"d"], whiteouts=[b"d/x"])
    assert list(listed_whiteouts([lower, upper])) == [(b"d/x", 1)]
    assert list(listed_whiteouts([lower, upper, merged(Layer().dir(b"d"))])) == []
    assert list(listed_whiteouts([lower, upper, merged(Layer().file(b"d"))])) == [], "hidden altogether"


def test_an_opaque_root_hides_nothing() -> None:
    upper = merged(Layer().file(b"b"))
    upper.opaque = True
    assert names(merge_overlay([merged(Layer().file(b"a")), upper])) == [b"a", b"b"]


def test_conflicts() -> None:
    assert list(conflicts(stack())) == [
        Conflict(b"both/x", (0, 1), 1, "file-over-file"),
        Conflict(b"both/y", (0,), 1, "whiteout-hides"),
        Conflict(b"cut", (0, 1, 2), 1, "opaque-hides"),
        Conflict(b"d", (0, 1, 2), 2, "type-change"),
        Conflict(b"e/a", (0,), 1, "whiteout-hides"),
    ]


def test_an_opaque_directory_over_nothing_is_no_conflict() -> None:
    assert list(conflicts([merged(Layer()), tree_of(Layer().dir(b"d"), opaque=[b"d"])])) == []


def test_a_name_that_comes_back_above_a_whiteout() -> None:
    layers = [
        merged(Layer().file(b"a", b"0")),
        tree_of(Layer(), whiteouts=[b"a", b"nothing"]),
        merged(Layer().file(b"a", b"2")),
    ]
    assert list(conflicts(layers)) == [Conflict(b"a", (0, 2), 2, "file-over-file")]
    assert content(at(merge_overlay(layers), b"a")) == b"2"


@pytest.mark.case("O14")
@pytest.mark.parametrize("fault", ["opaque", "entries"])
def test_what_can_not_be_read_is_an_error(fault: str) -> None:
    class Unreadable(Directory):
        """A directory of an image whose xattrs or entries are damaged."""

        def __getattribute__(self, name: str) -> object:
            if name == fault:
                raise CorruptError("inode 36: the xattr area is damaged")
            return super().__getattribute__(name)

    lower = merged(Layer().file(b"d/secret"))
    upper = merged(Layer())
    upper.entries[b"d"] = Unreadable(Attrs(0o40755, 0, 0, 0, 0)) if fault == "opaque" else _with_fault(Unreadable)
    for look in (merge_overlay, lambda trees: list(conflicts(trees)), lambda trees: list(listed_whiteouts(trees))):
        with pytest.raises(CorruptError):
            look([lower, upper])


def _with_fault(kind: type[Directory]) -> Directory:
    directory = kind.__new__(kind)
    Directory.__init__(directory, Attrs(0o40755, 0, 0, 0, 0))
    return directory


@pytest.mark.case("O14")
def test_an_unknown_inode_is_an_error() -> None:
    upper = merged(Layer())
    upper.entries[b"d"] = Inode(Attrs(0o150000, 0, 0, 0, 0))
    with pytest.raises(TypeError):
        merge_overlay([merged(Layer().file(b"d")), upper])

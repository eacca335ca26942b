"""Trees compared, and the delta between them."""

from __future__ import annotations

import stat
from collections.abc import Callable

import pytest
from support.trees import Layer, at, clone, directory_at, manifest, merged, names, same_content

from layerstore.tree.difference import Change, delta, difference
from layerstore.tree.inode import Directory, File, Whiteout, walk
from layerstore.tree.union import merge_overlay


def changes(old: Layer, new: Layer) -> list[tuple[str, str, tuple[str, ...]]]:
    found = difference(merged(old), merged(new), same_content)
    return [(change.path.decode(), change.kind, change.what) for change in found]


def base() -> Layer:
    return (
        Layer()
        .dir(b"d")
        .file(b"d/f", b"one", xattrs=((b"user.a", b"1"),))
        .symlink(b"l", b"d")
        .device(b"c", stat.S_IFCHR, 1, 3)
    )


def test_equal_trees() -> None:
    assert changes(base(), base()) == []
    tree = merged(base())
    assert list(difference(tree, tree, same_content)) == []


@pytest.mark.parametrize(
    ("change", "path", "what"),
    [
        (lambda layer: layer.dir(b"d", 0o700), "d", ("mode",)),
        (lambda layer: layer.dir(b"d", uid=1, mtime=2), "d", ("owner", "mtime")),
        (lambda layer: layer.dir(b"", 0o700), "", ("mode", "mtime")),
        (lambda layer: layer.file(b"d/f", b"two", xattrs=((b"user.a", b"1"),)), "d/f", ("content",)),
        (lambda layer: layer.file(b"d/f", b"three", xattrs=((b"user.a", b"1"),)), "d/f", ("size",)),
        (lambda layer: layer.file(b"d/f", b"one"), "d/f", ("xattrs",)),
        (lambda layer: layer.symlink(b"l", b"e"), "l", ("target",)),
        (lambda layer: layer.device(b"c", stat.S_IFCHR, 1, 5), "c", ("device",)),
        (lambda layer: layer.device(b"c", stat.S_IFBLK, 1, 3), "c", ("type",)),
        (lambda layer: layer.file(b"l"), "l", ("type",)),
    ],
)
def test_what_differs(change: Callable[[Layer], Layer], path: str, what: tuple[str, ...]) -> None:
    assert changes(base(), change(base())) == [(path, "changed", what)]


def test_entries_of_new_and_old_directories_are_listed() -> None:
    old = Layer().file(b"gone/a/b").file(b"x").dir(b"y")
    new = Layer().file(b"new/c").file(b"x/in").file(b"y")
    assert changes(old, new) == [
        ("gone", "removed", ()),
        ("gone/a", "removed", ()),
        ("gone/a/b", "removed", ()),
        ("new", "added", ()),
        ("new/c", "added", ()),
        ("x", "changed", ("type",)),
        ("x/in", "added", ()),
        ("y", "changed", ("type",)),
    ]


def test_link_sets_are_compared() -> None:
    old = Layer().file(b"a").file(b"b").file(b"c").hardlink(b"d", b"c")
    new = Layer().file(b"a").hardlink(b"b", b"a").file(b"c").file(b"d")
    assert changes(old, new) == [(name, "changed", ("links",)) for name in "abcd"]
    assert list(difference(merged(old), merged(old), same_content)) == []


def test_contents_of_links_are_compared_once() -> None:
    calls: list[tuple[File, File]] = []

    def same(old: File, new: File) -> bool:
        calls.append((old, new))
        return False

    layer = Layer().file(b"a", b"x").hardlink(b"b", b"a").hardlink(b"c", b"a")
    found = list(difference(merged(layer), merged(layer), same))
    assert found == [Change(name, "changed", ("content",)) for name in (b"a", b"b", b"c")]
    assert len(calls) == 1


def checked(old: Layer, new: Layer) -> Directory:
    lower, upper = merged(old), merged(new)
    result = delta(lower, upper, same_content)
    assert manifest(merge_overlay([lower, clone(result)])) == manifest(upper)
    return result


def test_delta_of_equal_trees_is_empty() -> None:
    assert names(checked(base(), base())) == []


def test_delta_hides_single_names_with_whiteouts() -> None:
    result = checked(Layer().file(b"d/a").file(b"d/b"), Layer().file(b"d/a").file(b"d/c"))
    assert names(result) == [b"d", b"d/b", b"d/c"]
    assert isinstance(at(result, b"d/b"), Whiteout) and not directory_at(result, b"d").opaque


def test_delta_makes_replaced_directories_opaque() -> None:
    result = checked(
        Layer().file(b"d/a").file(b"d/b/c").file(b"keep"), Layer().file(b"d/x").file(b"d/b/y").file(b"keep")
    )
    assert names(result) == [b"d", b"d/b", b"d/b/y", b"d/x"]
    assert directory_at(result, b"d").opaque and not directory_at(result, b"d/b").opaque
    result = checked(Layer().file(b"a"), Layer().file(b"b"))
    assert not result.opaque and names(result) == [b"a", b"b"], "the root can't be"
    result = checked(Layer().file(b"d/a"), Layer().dir(b"d", 0o755, mtime=0))
    assert names(result) == [b"d"] and directory_at(result, b"d").opaque


def test_delta_keeps_a_directory_of_which_something_remains_deep_down() -> None:
    result = checked(Layer().file(b"d/a").file(b"d/b/c/k"), Layer().file(b"d/b/c/k").file(b"d/b/new"))
    assert not directory_at(result, b"d").opaque
    assert names(result) == [b"d", b"d/a", b"d/b", b"d/b/new"]


def test_delta_brings_changed_link_sets_whole() -> None:
    old = Layer().file(b"a", b"x").hardlink(b"d/b", b"a").hardlink(b"c", b"a").file(b"s")
    assert names(checked(old, Layer().file(b"a", b"x").hardlink(b"d/b", b"a").file(b"s"))) == [b"a", b"c", b"d", b"d/b"]
    assert names(checked(old, Layer().file(b"a", b"x").file(b"d/b", b"x").file(b"c", b"x").file(b"s"))) == [
        *(b"a", b"c", b"d", b"d/b")
    ]
    assert names(checked(Layer().file(b"a").file(b"b"), Layer().file(b"a").hardlink(b"b", b"a"))) == [b"a", b"b"]


def test_delta_of_changed_types() -> None:
    result = checked(Layer().dir(b"d").file(b"d/x").file(b"f"), Layer().file(b"d").file(b"f/x"))
    assert names(result) == [b"d", b"f", b"f/x"]
    assert not any(isinstance(inode, Directory) and inode.opaque for _, inode in walk(result))

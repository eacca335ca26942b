"""Symlinks stay inside the tree."""

from __future__ import annotations

import pytest
from support.trees import Layer, content, merged

from layerstore.errors import MalformedError, NotFoundError
from layerstore.tree.inode import Symlink
from layerstore.tree.resolve import find, lookup, trace


@pytest.mark.case("O13")
def test_absolute_and_climbing_links_start_at_the_image_root() -> None:
    tree = merged(
        Layer()
        .file(b"nix/store/x/passwd", b"image")
        .symlink(b"etc/passwd", b"/nix/store/x/passwd")
        .symlink(b"etc/os-release", b"../../../../etc/shadow")
        .file(b"etc/shadow", b"the image's own")
    )
    assert content(lookup(tree, b"/etc/passwd")) == b"image"
    assert content(lookup(tree, b"etc/os-release")) == b"the image's own"
    assert content(lookup(tree, b"../../etc/passwd")) == b"image"


def test_the_last_component_can_be_left_alone() -> None:
    tree = merged(Layer().symlink(b"a/l", b"nowhere").symlink(b"b", b"a"))
    assert isinstance(lookup(tree, b"b/l", follow=False), Symlink)
    assert isinstance(find(tree, (b"b", b"l")), Symlink)
    with pytest.raises(NotFoundError, match="b/l"):
        lookup(tree, b"b/l")
    assert lookup(tree, b"/") is tree
    assert find(tree, ()) is tree


def test_parts_below_what_is_missing_stand_for_themselves() -> None:
    tree = merged(Layer().file(b"f").symlink(b"l", b"gone/x/../y"))
    assert trace(tree, (b"l", b"z")) == [(b"gone", None), (b"y", None), (b"z", None)]
    assert [name for name, _ in trace(tree, (b"f", b"x"))] == [b"f", b"x"]
    assert find(tree, (b"f", b"x")) is None


def test_loops_are_refused() -> None:
    tree = merged(Layer().symlink(b"a", b"b").symlink(b"b", b"a").symlink(b"s", b"s/s"))
    for path in (b"a", b"b/c", b"s"):
        with pytest.raises(MalformedError, match="40 symlinks"):
            lookup(tree, path)


def test_forty_links_are_no_loop() -> None:
    layer = Layer().file(b"0", b"end")
    for i in range(1, 42):
        layer.symlink(str(i).encode(), str(i - 1).encode())
    tree = merged(layer)
    assert content(lookup(tree, b"40")) == b"end"
    with pytest.raises(MalformedError):
        lookup(tree, b"41")

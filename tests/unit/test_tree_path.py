"""Names of members as components."""

from __future__ import annotations

import pytest

from layerstore.errors import MalformedError
from layerstore.tree.path import clean, steps


@pytest.mark.case("T59", "T22", "T40")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (b"a/b", (b"a", b"b")),
        (b"/abs", (b"abs",)),
        (b"../e", (b"e",)),
        (b"a/../../e", (b"e",)),
        (b"a/./b//c", (b"a", b"b", b"c")),
        (b"..", ()),
        (b"./", ()),
        (b"/", ()),
        (b"", ()),
        (b"././", ()),
        (b"a\\b\\..", (b"a\\b\\..",)),
        (b"...", (b"...",)),
        (b"a/.wh...", (b"a", b".wh...")),
        (b"x\xff\n/\xe9", (b"x\xff\n", b"\xe9")),
        (b"n" * 255, (b"n" * 255,)),
    ],
)
def test_clean(name: bytes, parts: tuple[bytes, ...]) -> None:
    assert clean(name) == parts


@pytest.mark.case("T59")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"a\0b", "NUL"),
        (b"a/" + b"n" * 256, "longer than 255"),
        (b"n/" * 2049, "longer than 4,095"),
    ],
)
def test_refused(name: bytes, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        clean(name)


def test_the_longest_path() -> None:
    name = b"/".join([b"n" * 255] * 15 + [b"m" * 255])
    assert len(name) == 4095
    assert len(clean(name)) == 16
    assert len(clean(b"./././" + name)) == 16


def test_messages_about_huge_names_are_short() -> None:
    with pytest.raises(MalformedError) as caught:
        clean(b"\xff" * 1_000_000 + b"\0")
    assert len(str(caught.value)) < 1000


def test_steps_keep_dot_dot() -> None:
    assert steps(b"/a/../b//./c/") == [b"a", b"..", b"b", b"c"]

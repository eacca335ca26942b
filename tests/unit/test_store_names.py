"""The grammar of reference names."""

from __future__ import annotations

import pytest

from layerstore.errors import UsageError
from layerstore.store.names import NAME_LIMIT, check_name, decode_name, encode_name

GOOD = [
    "a",
    "7",
    "debian-full",
    "Team_1/repo.git:2024.1-rc_1",
    "localhost:5000/base",
    "host:5000/a:1",
    "a..b",
    "a.",
    "a:",
    "sha256/x",
    "sha1:x",
    "x" * NAME_LIMIT,
    "/".join("a" * 64),
]
BAD = [
    "",
    ".",
    "..",
    ".hidden",
    "-option",
    "_x",
    ":tag",
    "/a",
    "a/",
    "a//b",
    "a/../b",
    "a/./b",
    "a/.b",
    "a@sha256:00",
    "a b",
    "a\nb",
    "a\n",
    "a\0",
    "a%2Fb",
    "a\\b",
    "a*",
    "ä",
    "a\ud800",
    "٣",
    "sha256:" + "0" * 64,
    "sha512:AB",
    "sha256:latest",
    "x" * (NAME_LIMIT + 1),
    "/".join("a" * 65),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_one_file(name: str) -> None:
    assert check_name(name) == name
    file = encode_name(name)
    assert "/" not in file
    assert not file.startswith(".")
    assert len(file.encode()) <= 255
    assert decode_name(file) == name


@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 250


def test_names_are_text() -> None:
    for name in (b"bytes", None, 7):
        with pytest.raises(UsageError, match="not a reference name"):
            check_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["a~", "a%2", "a%2f", "%2Fa", "a%2F", "a%3Ab", "#a#", "core "])
def test_files_that_are_no_name_are_told_apart(file: str) -> None:
    with pytest.raises(UsageError):
        decode_name(file)

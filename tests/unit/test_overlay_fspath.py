from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlay.fspath import FsPaths
from overlay.mountapi import FSCONFIG_VALUE_MAX


def test_short_plain_paths_stay_as_they_are() -> None:
    with FsPaths() as paths:
        assert paths.value("/var/lib/imgtool/layers/00/mnt") == b"/var/lib/imgtool/layers/00/mnt"


@pytest.mark.case("O03", "O04")
@pytest.mark.parametrize("name", [b"a:b", b"a,b", b"a\\b", b"a b", b"a\tb", b"a\nb", b"a%b", b"\xff\xfe", b'a"b'])
def test_special_names_go_through_a_descriptor(tmp_path: Path, name: bytes) -> None:
    directory = os.fsencode(tmp_path) + b"/" + name
    os.makedirs(directory + b"/below")
    with FsPaths() as paths:
        for path in (directory, directory + b"/below"):
            value = paths.value(path)
            assert value.startswith(b"/proc/self/fd/")
            assert name not in value
            assert os.path.samefile(value, path)
    assert not os.path.exists(value)


@pytest.mark.case("O03")
def test_many_long_paths_share_one_descriptor(tmp_path: Path) -> None:
    top = os.fsencode(tmp_path) + b"/" + b"x" * 250
    for number in range(50):
        os.makedirs(top + b"/layers/%064d/mnt" % number)
    with FsPaths() as paths:
        before = len(os.listdir("/proc/self/fd"))
        values = [paths.value(top + b"/layers/%064d/mnt" % number) for number in range(50)]
        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert all(len(value) <= FSCONFIG_VALUE_MAX for value in values)
        assert all(os.path.samefile(value, top + b"/layers/%064d/mnt" % i) for i, value in enumerate(values))


@pytest.mark.parametrize("length", range(250, 261))
def test_around_the_limit(tmp_path: Path, length: int) -> None:
    path = os.fsencode(tmp_path) + b"/"
    while len(path) < length - 100:
        path += b"d" * 50 + b"/"
    path += b"e" * (length - len(path))
    os.makedirs(path)
    with FsPaths() as paths:
        value = paths.value(path)
        assert (value == path) == (length <= FSCONFIG_VALUE_MAX)
        assert os.path.samefile(value, path)


def test_a_missing_directory_is_an_oserror(tmp_path: Path) -> None:
    with FsPaths() as paths, pytest.raises(FileNotFoundError):
        paths.value(str(tmp_path / "a:b" / "c"))

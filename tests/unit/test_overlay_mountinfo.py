from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstore.errors import MalformedError
from overlay import mountinfo

LINE = (
    rb"36 35 98:0 /mnt1 /a\040b\011c\012d\134040 rw,noatime master:1 shared:7 - ext3 /dev/ro\040ot rw,errors=continue"
)


@pytest.mark.case("O04")
def test_a_line_with_every_escape() -> None:
    (mount,) = mountinfo.parse(LINE + b"\n")
    assert mount == mountinfo.Mount(
        id=36,
        parent=35,
        device=(98, 0),
        root=b"/mnt1",
        target=b"/a b\tc\nd\\040",
        options=b"rw,noatime",
        fs_type=b"ext3",
        source=b"/dev/ro ot",
        super_options=b"rw,errors=continue",
    )


@pytest.mark.parametrize("optional", [b"", b"master:1 ", b"shared:1 propagate_from:2 unbindable "])
def test_optional_fields_end_at_the_dash(optional: bytes) -> None:
    (mount,) = mountinfo.parse(b"1 2 0:3 / /x rw " + optional + b"- tmpfs none rw")
    assert (mount.target, mount.fs_type, mount.source) == (b"/x", b"tmpfs", b"none")


@pytest.mark.parametrize(
    "line",
    [
        b"1",
        b"1 2 0:3 / /x rw tmpfs none rw",
        b"1 2 03 / /x rw - tmpfs none rw",
        b"x 2 0:3 / /x rw - tmpfs none rw",
        b"1 2 0:3 / /x rw - tmpfs none",
        b"1 2 0:3 / /x rw -",
    ],
)
def test_what_is_no_mountinfo_is_refused(line: bytes) -> None:
    with pytest.raises(MalformedError, match="mountinfo"):
        mountinfo.parse(line)


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=100)
def test_any_path_survives_the_kernels_escapes(path: bytes) -> None:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes((byte,)) for byte in path)
    assert mountinfo.unescape(escaped) == path


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_hostile_text_raises_only_our_error(text: bytes) -> None:
    try:
        mounts = mountinfo.parse(text)
    except MalformedError:
        return
    assert all(isinstance(mount.target, bytes) for mount in mounts)


def test_own_mounts_hold_the_root() -> None:
    root = os.stat("/").st_dev
    assert (os.major(root), os.minor(root)) in {m.device for m in mountinfo.read() if m.target == b"/"}


def test_below_is_the_order_to_unmount_in(tmp_path: Path) -> None:
    text = b"".join(
        b"%d 1 0:9 / %s rw - tmpfs none rw\n" % (number, path)
        for number, path in enumerate([b"/a", b"/a/b", b"/ab", b"/a/b/c", b"/a/b"])
    )
    found = [(mount.id, mount.target) for mount in mountinfo.below("/a/", mountinfo.parse(text))]
    assert found == [(4, b"/a/b"), (3, b"/a/b/c"), (1, b"/a/b"), (0, b"/a")]

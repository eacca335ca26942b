"""Conversions into a store on a small file system, and beside temporary directories that are of no use."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.layouts import compress
from support.tars import file, tar

from layerstore.errors import NoSpaceError

pytestmark = pytest.mark.privileged

MIB = 1 << 20
SIZE = 20 * MIB
_LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2  # linux/mount.h


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Its store is a tmpfs of 20 MiB; its sources are elsewhere."""
    point = tmp_path / "store"
    point.mkdir()
    if _LIBC.mount(b"tmpfs", bytes(point), b"tmpfs", 0, b"size=%d" % SIZE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(point))
    try:
        yield Site(tmp_path)
    finally:
        _LIBC.umount2(bytes(point), MNT_DETACH)


@pytest.mark.case("C06", "C12")
@pytest.mark.parametrize("compression", ["", "gzip"])
def test_what_does_not_fit_leaves_everything_as_it_was(site: Site, compression: str) -> None:
    """Compressed, the spool of the layer is too large; plain, the pack is."""
    small = site.tar(file("before", noise(MIB, 1)))
    site.convert(small, tag="before")
    before = site.snapshot()
    free = os.statvfs(site.store.root).f_bavail
    large = site.raw_tar(compress(tar(*(file(f"f{n}", noise(MIB, n)) for n in range(50))), compression))
    with pytest.raises(NoSpaceError, match="free space"):
        site.convert(large, tag="before")
    assert site.snapshot() == before
    assert os.statvfs(site.store.root).f_bavail == free
    assert site.rows("before")[b"before"].value == noise(MIB, 1)
    site.convert(site.tar(file("after", noise(MIB, 2))), tag="after")


@pytest.mark.case("C12")
@pytest.mark.parametrize("temporary", ["missing", "full"])
def test_a_conversion_needs_no_other_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site, temporary: str
) -> None:
    """The store here is an ordinary directory, and the small file system is what TMPDIR names."""
    monkeypatch.setattr(tempfile, "tempdir", site.store.root if temporary == "full" else str(tmp_path / "nowhere"))
    with open(Path(site.store.root) / ".filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
        while True:
            filler.write(bytes(MIB))
    roomy = Site(tmp_path / "roomy")
    layout = roomy.layout()
    layout.image([layout.layer(tar(file(f"f{n}", noise(8 * MIB, n)))) for n in range(4)], tag="it")
    archive = layout.archive(tmp_path / "it.tar", compression="gzip")
    report = roomy.convert(f"oci-archive:{archive}:it")
    assert report.data_size == 32 * MIB
    assert roomy.leftovers() == []

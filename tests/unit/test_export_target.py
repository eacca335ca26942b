"""Targets: all of an image or nothing of it, and whatever else is there stays."""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import Site, noise
from support.exports import documents, entry
from support.faults import failing, fsync_for_free
from support.layouts import Layout
from support.tars import file, tar

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    MalformedError,
    NoSpaceError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from layerstore.export.archivetarget import ArchiveTarget, _member
from layerstore.export.compress import Compression
from layerstore.export.layouttarget import LayoutTarget
from layerstore.export.ociimage import export_image
from layerstore.export.target import Target
from layerstore.export.targetname import open_target
from layerstore.oci.descriptor import Descriptor
from layerstore.tar.format import Header, parse_number

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fsync_for_free():
        site = Site(tmp_path)
        for name in ("one", "two"):
            site.convert(site.image([tar(file(name, noise(300_000, len(name))), file("both", b"b"))]), tag=name)
        yield site


def export(site: Site, name: str, target: str, **fields: Compression) -> Digest:
    with open_target(target) as opened:
        return export_image(site.store, name, opened, **fields).manifest.digest


def state(path: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with the content of files."""
    return {str(each): each.read_bytes() if each.is_file() else None for each in sorted(path.rglob("*"))}


def tags(layout: Path) -> list[str | None]:
    index = json.loads((layout / "index.json").read_bytes())
    return [each.get("annotations", {}).get("org.opencontainers.image.ref.name") for each in index["manifests"]]


# ---- layouts


def test_a_new_layout(site: Site, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        digest = export(site, "one", f"oci:{tmp_path / 'out'}:v1")
    finally:
        os.umask(before)
    out = tmp_path / "out"
    assert json.loads((out / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert tags(out) == ["v1"]
    assert {path.name for path in out.iterdir()} == {"blobs", "index.json", "oci-layout"}
    manifest, _ = documents(out, "v1")
    named = {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"]), str(digest)}
    assert {f"sha256:{path.name}" for path in (out / "blobs" / "sha256").iterdir()} == named
    for path in out.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)


def test_other_tags_and_fields_stay(site: Site, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "out")
    other = layout.image([tar(file("other"))], tag="other")
    layout.image([tar(file("old"))], tag="v1")
    layout.image([tar(file("unnamed"))])
    index = json.loads((layout.path / "index.json").read_bytes())
    index["annotations"] = {"kept": "yes"}
    index["manifests"][0]["unknown"] = [1.5]
    (layout.path / "index.json").write_text(json.dumps(index))
    digest = export(site, "one", layout.name("v1"))
    now = json.loads((layout.path / "index.json").read_bytes())
    assert now["annotations"] == {"kept": "yes"}
    assert now["manifests"][:2] == [index["manifests"][0], index["manifests"][2]]
    assert entry(layout.path, "v1")["digest"] == str(digest)
    assert entry(layout.path, "other")["digest"] == other["digest"]
    # Again changes nothing, and another image moves the tag.
    before = state(layout.path)
    export(site, "one", layout.name("v1"))
    assert state(layout.path) == before
    export(site, "two", layout.name("v1"))
    assert sorted(map(str, tags(layout.path))) == ["None", "other", "v1"]


def test_without_a_tag(site: Site, tmp_path: Path) -> None:
    """An image is there once, whatever its name."""
    out = tmp_path / "out"
    for name in ("one", "two", "one"):
        export(site, name, f"oci:{out}")
    assert tags(out) == [None, None]
    export(site, "one", f"oci:{out}:v1")
    assert tags(out) == [None, None, "v1"]


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_what_was_there(site: Site, tmp_path: Path, call: str, there: bool) -> None:
    """Wherever it strikes: at each write, the last of which is that of index.json."""
    out = tmp_path / "out"
    target = f"oci:{out}:v1"
    if there:
        export(site, "two", target)
    before = state(out)
    steps = 0
    while True:
        try:
            with failing(call, errno.ENOSPC, after=steps):
                export(site, "one", target, compression=Compression.ZSTD)
            break
        except NoSpaceError:
            assert state(out) == before
            assert out.exists() == there
        steps += 1
    assert steps >= 4 + (not there)
    assert tags(out) == ["v1"]


def test_interruption_leaves_what_was_there(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), open_target(f"oci:{out}:v1") as target, target.upload() as upload:
        upload.write(b"half")
        raise KeyboardInterrupt
    assert not out.exists()


def test_exports_at_once(site: Site, tmp_path: Path) -> None:
    """Every one finds its tag in the index, and none takes another's away."""
    out = tmp_path / "out"
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(3):
                export(site, ("one", "two")[turn % 2], f"oci:{out}:t{number}", compression=Compression.NONE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(map(str, tags(out))) == ["t0", "t1", "t2", "t3"]
    assert not [path for path in out.rglob("*") if path.name.startswith(".tmp-")]


def blob(target: Target, data: bytes) -> Digest:
    digest = Digest.of(data)
    with target.upload() as upload:
        upload.write(data)
        upload.commit(digest, len(data))
    return digest


def test_a_failure_beside_another_writer_removes_nothing(tmp_path: Path) -> None:
    """The other one may have found a blob that it need not write again."""
    out = tmp_path / "out"
    with LayoutTarget(str(out), "kept") as other:
        with pytest.raises(RuntimeError), LayoutTarget(str(out), "failed") as failed:
            shared = blob(failed, b"shared")
            raise RuntimeError
        assert (out / "blobs" / "sha256" / shared.hex).exists()
        data = b"{}"
        other.publish(data, Descriptor(MANIFEST, Digest.of(data), len(data)))
    assert tags(out) == ["kept"]
    with pytest.raises(RuntimeError), LayoutTarget(str(out), "failed") as failed:
        blob(failed, b"shared")  # was there before
        mine = blob(failed, b"mine")
        raise RuntimeError
    assert (out / "blobs" / "sha256" / shared.hex).exists()
    assert not (out / "blobs" / "sha256" / mine.hex).exists()


def test_a_blob_has_to_be_what_it_is_said_to_be(tmp_path: Path) -> None:
    targets: list[Target] = [LayoutTarget(str(tmp_path / "out"), None), ArchiveTarget(str(tmp_path / "a.tar"), None)]
    for opened in targets:
        for written in (b"other", b"two"):  # of another size, and of the same
            with pytest.raises(CorruptError, match=Digest.of(b"one").hex), opened as target, target.upload() as upload:
                upload.write(written)
                upload.commit(Digest.of(b"one"), 3)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_no_layouts(site: Site, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is no OCI layout, and not empty"):
        export(site, "one", f"oci:{tmp_path / 'full'}:v1")
    assert state(tmp_path / "full") == {str(tmp_path / "full" / "file"): b"mine"}
    (tmp_path / "empty").mkdir()
    export(site, "one", f"oci:{tmp_path / 'empty'}:v1")
    assert tags(tmp_path / "empty") == ["v1"]
    with pytest.raises(NotFoundError, match="make the layout"):
        export(site, "one", f"oci:{tmp_path / 'no' / 'where'}:v1")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "oci-layout").write_text('{"imageLayoutVersion":"2.0.0"}')
    with pytest.raises(UnsupportedError, match="layout version"):
        export(site, "one", f"oci:{tmp_path / 'new'}:v1")
    for number, text in enumerate(("{", "[]", '{"manifests":{}}', '{"manifests":[1]}')):
        layout = Layout(tmp_path / f"bad{number}")
        (layout.path / "index.json").write_text(text)
        with pytest.raises(MalformedError, match=r"index\.json of"):
            export(site, "one", layout.name("v1"))
        assert (layout.path / "index.json").read_text() == text


# ---- archives


def test_an_archive(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "out.tar"
    digest = export(site, "one", f"oci-archive:{path}:v1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert [member.name for member in members][:3] == ["oci-layout", "blobs", "blobs/sha256"]
        assert members[-1].name == "index.json"
        for member in members[3:-1]:
            content = archive.extractfile(member)
            assert content is not None
            assert Digest.of(content.read()).hex == member.name.rpartition("/")[2]
        assert f"blobs/sha256/{digest.hex}" in archive.getnames()
    again = Site(tmp_path / "again")
    report = again.convert(f"oci-archive:{path}:v1")
    assert again.rows(report) == site.rows("one")
    # The same image gives the same file, and another one replaces it.
    data = path.read_bytes()
    export(site, "one", f"oci-archive:{path}:v1")
    assert path.read_bytes() == data
    export(site, "two", f"oci-archive:{path}:v1")
    assert again.rows(again.convert(f"oci-archive:{path}")) == site.rows("two")


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_archive(site: Site, tmp_path: Path, call: str) -> None:
    path = tmp_path / "out.tar"
    path.write_bytes(b"old")
    names = sorted(os.listdir(tmp_path))
    steps = 0
    while True:
        try:
            with failing(call, errno.ENOSPC, after=steps):
                export(site, "one", f"oci-archive:{path}", compression=Compression.ZSTD)
            break
        except NoSpaceError:
            assert path.read_bytes() == b"old"
            assert sorted(os.listdir(tmp_path)) == names
        steps += 1
    assert steps >= 1
    assert tarfile.is_tarfile(path)


def test_an_archive_has_each_blob_once(tmp_path: Path) -> None:
    path = tmp_path / "out.tar"
    with ArchiveTarget(str(path), "t") as target:
        for data in (b"a", b"b" * 600, b"a", b""):
            blob(target, data)
        with target.upload() as upload:
            upload.write(b"given up")
        data = b"{}"
        target.publish(data, Descriptor(MANIFEST, Digest.of(data), len(data)))
    with tarfile.open(path) as archive:
        sizes = [member.size for member in archive if member.name.startswith("blobs/sha256/")]
        assert len(archive.getnames()) == len(set(archive.getnames()))
    assert sizes == [1, 600, 0, 2]


def test_sizes_beyond_eight_gigabytes_are_in_one_block() -> None:
    for size in (8**11 - 1, 8**11, 1 << 40):
        assert parse_number(Header.unpack(_member(b"n", b"0", size)).size) == size


# ---- names


def test_names_of_targets(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    with pytest.raises(UsageError, match="is a directory; write oci:"), open_target(f"oci-archive:{tmp_path}"):
        pass
    for text in ("", "dir", "tar:x", "tree:x", "docker-archive:x", "/abs", "s3://b/p"):
        with pytest.raises(UsageError, match="not a target"):
            open_target(text)
    with pytest.raises(UsageError, match="needs a path"):
        open_target("oci:")
    for text in ("oci:d@1", f"oci:d@sha256:{'0' * 64}", f"docker://h.example/r@sha256:{'0' * 64}"):
        with pytest.raises(UsageError, match="a target has a tag"):
            open_target(text)
    with LayoutTarget(str(tmp_path / "out"), "x") as target:
        assert target.scratch == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()

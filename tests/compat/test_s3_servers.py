"""Servers of S3 as they are: what an object store relies on, and an image from its conversion to a lazy sandbox."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import noise
from support.sandboxes import mounts_unchanged, node_root
from support.servers import S3Server
from support.stores import assert_sound, image, publish, put
from support.tars import directory, file, tar
from support.tools import need_root

from imgtool.cli import run
from layerstore.digest import Digest
from layerstore.errors import ConflictError, NotFoundError
from layerstore.store import s3parts
from layerstore.store.bucket import ABSENT, Guarantees
from layerstore.store.collect import collect, plan_collection
from layerstore.store.objectblob import SMALL_BYTES
from layerstore.store.objects import ObjectStore
from layerstore.store.reading import is_intact
from layerstore.store.s3 import S3Bucket

__all__ = ["mounts_unchanged"]

pytestmark = pytest.mark.compat
PART = 5 << 20


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def bucket(server: S3Server) -> S3Bucket:
    return server.open()


@pytest.mark.case("S09")
def test_conditions_are_honoured(bucket: S3Bucket) -> None:
    assert bucket.guarantees() == Guarantees(True, True)
    etag = bucket.write("refs/x", b"1", expected=ABSENT)
    for expected in (ABSENT, '"0"'):
        with pytest.raises(ConflictError):
            bucket.write("refs/x", b"2", expected=expected)
    with pytest.raises(ConflictError):
        bucket.write("refs/y", b"2", expected=etag)
    with pytest.raises(ConflictError):
        bucket.delete("refs/x", expected='"0"')
    other = bucket.write("refs/x", b"2", expected=etag)
    assert bucket.head("refs/x").etag == other != etag
    assert bucket.delete("refs/x", expected=other)
    assert bucket.delete("refs/x", expected=other), "it is gone already"


def test_listings_come_by_pages_and_in_order(bucket: S3Bucket, server: S3Server) -> None:
    keys = sorted(
        f"refs/{name}" for name in ("a", "b", "a%2Fb", "a-b", "a.b", "B", "z:1", *(f"n{n}" for n in range(20)))
    )
    for key in keys:
        bucket.write(key, b"x" * len(key))
    real = bucket._client.ask

    def by_three(what: str, operation: str, /, *rest: object, **arguments: object) -> object:
        if operation == "list_objects_v2":
            arguments["MaxKeys"] = 3
        return real(what, operation, *rest, **arguments)  # type: ignore[arg-type]

    assert [(entry.key, entry.size) for entry in bucket.entries("refs/")] == [(key, len(key)) for key in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket._client, "ask", by_three)
        assert [entry.key for entry in bucket.entries("refs/")] == keys
        assert [entry.key for entry in bucket.entries("refs/n1")] == [key for key in keys if key.startswith("refs/n1")]
    entries = {entry.key: entry for entry in bucket.entries("refs/")}
    assert entries["refs/a"].etag == bucket.head("refs/a").etag
    assert abs(entries["refs/a"].modified - bucket.now()) < 60 * 10**9


@pytest.mark.case("S01", "S05")
def test_large_blobs_go_in_parts_and_none_are_left(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3parts, "PART_BYTES", PART)
    store = ObjectStore.create(server.open())
    data = os.urandom(2 * PART + SMALL_BYTES + 17)
    digest = put(store, data)
    assert put(store, data) == digest
    with store.open(digest) as blob:
        assert blob.size == len(data)
        assert is_intact(blob, digest)
        assert blob.read_at(PART - 5, 10) == data[PART - 5 : PART + 5]
    assert store.reclaim(older_than=0, dry_run=True) == 0


def test_parts_of_uploads_that_were_broken_off_are_reclaimed(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url()
    bucket = server.open(url)
    store = ObjectStore.create(bucket)
    publish(store, "name", image(b"layer"))
    prefix = url.partition("?")[0].removeprefix(f"s3://{server.bucket}/")
    where = {"Bucket": server.bucket, "Key": f"{prefix}/blobs/sha256/{Digest.of(b'x').hex}"}
    upload = server.client.create_multipart_upload(**where)["UploadId"]
    server.client.upload_part(**where, UploadId=upload, PartNumber=1, Body=bytes(PART))
    assert store.reclaim(older_than=3600) == 0
    with store.lease() as lease:
        lease.pin([Digest.of(b"x")])
        assert (
            bucket.abort_uploads(
                before=bucket.now() + 10**10, keep={where["Key"].removeprefix(f"{prefix}/")}, dry_run=False
            )
            == 0
        )
    assert bucket.abort_uploads(before=bucket.now() + 10**10, keep=(), dry_run=True) == PART
    assert bucket.abort_uploads(before=bucket.now() + 10**10, keep=(), dry_run=False) == PART
    assert bucket.abort_uploads(before=bucket.now() + 10**10, keep=(), dry_run=True) == 0


def test_large_objects_are_copied_in_parts(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3parts, "PART_BYTES", PART)
    data = os.urandom(PART + 100)
    with tempfile.TemporaryFile() as spool:
        spool.write(data)
        spool.seek(0)
        bucket.send("blobs/x", spool, len(data))
    bucket.copy("blobs/x", "quarantine/whole")
    monkeypatch.setattr(s3parts, "MAX_PART_BYTES", PART)
    bucket.copy("blobs/x", "quarantine/parts")
    for key in ("quarantine/whole", "quarantine/parts"):
        assert bucket.read(key, 0, len(data) + 1).data == data
    with pytest.raises(NotFoundError):
        bucket.copy("blobs/nothing", "quarantine/x")


def test_garbage_goes_and_all_else_stays(server: S3Server) -> None:
    store = ObjectStore.create(server.open())
    kept = image(b"shared", b"kept")
    publish(store, "kept", kept)
    garbage = {put(store, b"garbage %d" % number) for number in range(20)}
    assert {blob.digest for blob in collect(store, plan_collection(store, grace=0)).deleted} == garbage
    assert assert_sound(store) == {blob.digest for blob in store.blobs()} == kept.blobs.keys()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    need_root()
    root = node_root(tmp_path)
    yield root
    run(["down", "--all", "--root", root])
    run(["node", "stop", "--root", root])


@pytest.mark.privileged
@pytest.mark.usefixtures("mounts_unchanged")
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_an_image_is_converted_started_and_read_from_a_bucket(
    server: S3Server, root: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    content = noise(3_000_000, 3)
    layer = tmp_path / "layer.tar"
    layer.write_bytes(tar(directory("data"), file("data/large", content), file("data/small", b"small")))
    url = server.url()
    assert run(["convert", f"tar:{layer}", "--role", "base", "--tag", "it", "--root", root, "--store", url]) == 0
    capfd.readouterr()
    assert run(["up", "it", "--id", "box", "--mode", mode, "--root", root, "--store", url, "--json"]) == 0
    box = json.loads(capfd.readouterr().out)
    rootfs = Path(box["rootfs"])
    assert (rootfs / "data/small").read_bytes() == b"small"
    with (rootfs / "data/large").open("rb") as stream:
        stream.seek(2_000_000)
        assert stream.read(1000) == content[2_000_000:2_001_000]
    assert (rootfs / "data/large").read_bytes() == content

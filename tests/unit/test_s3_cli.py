"""Every verb with a store in a bucket: the same as with a directory, but for what needs files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conversions import noise
from support.faults import fsync_for_free
from support.httpstore import StoreServer
from support.servers import ACCESS, SECRET, S3Server
from support.tars import directory, file, symlink, tar

from imgtool.cli import run
from imgtool.exitcodes import ExitCode
from layerstore.errors import NotFoundError, UnsupportedError, UsageError
from layerstore.store.directory import DirectoryStore
from layerstore.store.objects import ObjectStore
from layerstore.store.opening import Stores, open_prune_store, open_store, open_write_store
from layerstore.store.registry import RegistryStore

CONTENT = noise(300_000, 1)


class Places:
    """A bucket and a directory, to which the same is done."""

    def __init__(self, url: str, path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self.url = url
        self.directory = str(path / "store")
        self.path = path
        self._captured = capfdbinary

    def source(self, name: str, *parts: bytes) -> str:
        (self.path / name).write_bytes(tar(*parts))
        return f"tar:{self.path / name}"

    def both(self, *command: str, code: int = ExitCode.OK) -> bytes:
        """Run it on both; the output, which has to be the same."""
        outputs = []
        for location in (self.directory, self.url):
            assert run([*command, "--store", location]) == code, self._captured.readouterr()
            captured = self._captured.readouterr()
            assert captured.err == b"" or code != ExitCode.OK
            outputs.append(captured.out.replace(location.encode(), b"STORE"))
        assert outputs[0] == outputs[1]
        return outputs[0]

    def json(self, *command: str) -> object:
        return json.loads(self.both(*command, "--json"))

    def refused(self, *command: str, code: int) -> str:
        self._captured.readouterr()
        assert run(list(command)) == code, self._captured.readouterr()
        captured = self._captured.readouterr()
        assert captured.out == b""
        assert captured.err.count(b"\n") == 1
        assert SECRET.encode() not in captured.err
        assert ACCESS.encode() not in captured.err
        return captured.err.decode()


@pytest.fixture
def places(
    moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Places]:
    monkeypatch.setenv("IMGTOOL_ROOT", str(tmp_path / "root"))
    with fsync_for_free():
        yield Places(moto.url(), tmp_path, capfdbinary)


def test_every_verb_does_the_same_in_a_bucket(places: Places, tmp_path: Path) -> None:
    base = places.source("base", directory("bin"), file("bin/tool", CONTENT), symlink("tool", "bin/tool"))
    tools = places.source("tools", file("bin/tool", b"else"), file("bin/more", noise(100_000, 2)))
    converted = places.json("convert", base, "--role", "base", "--tag", "one")
    assert isinstance(converted, dict)
    places.both("convert", tools, "--role", "toolkit", "--tag", "two")
    assert b"shared" in places.both("convert", base, "--role", "base", "--tag", "again")
    for command in (
        ["ls"],
        ["ls", "--json", "--all"],
        ["inspect", "one", "--json"],
        ["tree", "one"],
        ["cat", "one", "/tool"],
        ["dump", "one"],
        ["verify", "--json"],
    ):
        assert places.both(*command)
    places.both("diff", "one", "two", code=ExitCode.FINDINGS)
    places.both("compose", "--base", "one", "--toolkit", "two", "--tag", "stack", "--json")
    places.both("tag", "stack", "other", "--json")
    places.both("rm", "stack", "two", "again", "--json")
    swept = places.json("gc", "--grace", "0", "--dry-run")
    assert isinstance(swept, dict)
    places.both("rm", "other", "--json")
    swept = places.json("gc", "--grace", "0")
    assert isinstance(swept, dict)
    assert len(swept["deleted_blobs"]) == 6
    assert places.json("verify") == []
    assert converted["manifest"] in places.both("ls", "--json").decode()


def test_copies_from_and_to_a_bucket(places: Places, moto: S3Server, tmp_path: Path) -> None:
    places.both("convert", places.source("base", file("a", CONTENT)), "--role", "base", "--tag", "one")
    second = moto.url()
    for source, destination in ((places.url, second), (second, str(tmp_path / "back"))):
        assert run(["copy", "one", source, destination]) == 0
    assert open_store(second).resolve("one") == DirectoryStore(str(tmp_path / "back")).resolve("one")
    assert run(["verify", "--store", str(tmp_path / "back")]) == 0
    assert run(["verify", "--store", second]) == 0
    places.refused("copy", "one", moto.url(), str(tmp_path / "none"), code=ExitCode.NOT_FOUND)
    assert not (tmp_path / "none").exists()


def test_a_file_url_is_its_directory(places: Places) -> None:
    places.both("convert", places.source("base", file("a", b"x")), "--role", "base", "--tag", "one")
    store = open_store(f"file://{places.directory}")
    assert isinstance(store, DirectoryStore)
    assert list(store.names()) == ["one"]
    assert isinstance(open_write_store(f"file://localhost{places.directory}%20new", create=True), DirectoryStore)
    assert Path(places.directory + " new", "store.json").exists()
    for url in ("file://otherhost/store", "file://store", "file:///store?x=y"):
        with pytest.raises(UsageError, match="file:///PATH"):
            open_store(url)


def test_a_public_bucket_is_read_by_its_web_address(places: Places, moto: S3Server) -> None:
    """Its objects are laid out as a directory's files, and need no signature there."""
    places.both("convert", places.source("base", file("a", CONTENT)), "--role", "base", "--tag", "some/name:1")
    address = places.url.replace("s3:/", moto.endpoint).partition("?")[0]
    prefix = places.url.partition("?")[0].removeprefix(f"s3://{moto.bucket}/")
    for key in moto.keys(places.url):
        moto.client.put_object_acl(Bucket=moto.bucket, Key=f"{prefix}/{key}", ACL="public-read")
    assert run(["cat", "some/name:1", "/a", "--store", address]) == 0
    places.refused("cat", "some/other", "/a", "--store", address, code=ExitCode.NOT_FOUND)
    places.refused("gc", "--store", address, code=ExitCode.USAGE)


def test_what_needs_files_says_so(places: Places) -> None:
    source = places.source("base", file("a", CONTENT))
    places.both("convert", source, "--role", "base", "--tag", "one")
    for command in (
        ["convert", source, "--role", "base", "--raw", "--store", places.url],
        ["raw", "one", "--store", places.url],
        ["copy", "one", places.directory, places.url, "--raw"],
    ):
        assert "is no directory, and the kernel reads raw packs from files" in places.refused(
            *command, code=ExitCode.UNSUPPORTED
        )
    assert run(["verify", "--store", places.url]) == 0


def test_failures_are_one_line_without_credentials(places: Places, moto: S3Server) -> None:
    url = places.url
    assert "is not a store" in places.refused("ls", "--store", url, code=ExitCode.NOT_FOUND)
    assert "is not a store" in places.refused("gc", "--store", url, code=ExitCode.NOT_FOUND)
    missing = url.replace("//images/", "//no-such-bucket/")
    assert "no such bucket" in places.refused("ls", "--store", missing, code=ExitCode.UNAVAILABLE)
    places.refused("ls", "--store", f"s3://{ACCESS}:{SECRET}@bucket/x", code=ExitCode.USAGE)
    places.refused("ls", "--store", f"{url}&{SECRET}=1", code=ExitCode.USAGE)
    places.refused("ls", "--store", f"{url}&profile=nobody", code=ExitCode.USAGE)
    listed = places.refused("ls", "--store", f"nobodys://{ACCESS}:{SECRET}@x", code=ExitCode.UNSUPPORTED)
    assert "s3, oci, oci+http" in listed
    assert "memory" in listed


def test_stores_are_known_by_where_they_are(places: Places, moto: S3Server, tmp_path: Path) -> None:
    """Also by what a store says of itself, for who has no more than that: the endpoint is part of it."""
    open_write_store(places.url, create=True)
    with Stores() as stores:
        store = stores.open(places.url)
        assert isinstance(store, ObjectStore)
        assert stores.open(store.location) is store
        assert open_store(store.location).location == store.location
    assert list(store.names()) == [], "closed, and usable yet"
    memory = open_write_store(f"memory:/{tmp_path}", create=True)
    assert isinstance(memory, ObjectStore)
    assert list(open_prune_store(f"memory:/{tmp_path}").names()) == []
    with pytest.raises(NotFoundError, match="is not a store"):
        open_store(f"memory:/{tmp_path}/other")
    registry = open_write_store("oci+http://127.0.0.1:1/repository", create=True)
    assert isinstance(registry, RegistryStore)
    with pytest.raises(UnsupportedError, match="its own garbage collection"):
        open_prune_store("oci+http://127.0.0.1:1/repository")


def test_mirrors_are_one_store_that_is_read(places: Places, tmp_path: Path) -> None:
    places.both("convert", places.source("base", file("a", CONTENT)), "--role", "base", "--tag", "one")
    with StoreServer(places.directory, listing=True) as server:
        mirrors = f"{server.url}|{places.url}"
        assert run(["cat", "one", "/a", "--store", mirrors]) == 0
        assert run(["copy", "one", mirrors, str(tmp_path / "copy")]) == 0
        places.refused("gc", "--store", mirrors, code=ExitCode.USAGE)
    assert DirectoryStore(str(tmp_path / "copy")).resolve("one") == open_store(places.url).resolve("one")

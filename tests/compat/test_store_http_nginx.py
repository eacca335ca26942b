"""A store behind nginx, as most will be."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.faults import fsync_for_free
from support.stores import assert_sound, image, publish, put
from support.tools import CHECKOUT, need_tool

from layerstore.digest import Digest
from layerstore.errors import NotFoundError, UnavailableError
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore
from layerstore.store.reading import stream_blob

pytestmark = pytest.mark.compat

BIG = hashlib.shake_128(b"nginx").digest(3_000_000)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    with fsync_for_free():
        store = DirectoryStore.create(str(tmp_path_factory.mktemp("nginx") / "a store"))
        publish(store, "team/repo:1", image(b"layer", BIG))
        publish(store, "other", image(b"other"))
        put(store, b"")
    return store


@contextmanager
def nginx(root: str, *options: str) -> Iterator[str]:
    need_tool("nginx", "1.18")
    command = [sys.executable, "-m", "benchmarks.fileserver", root, *options]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def test_everything_is_read_as_it_was_written(directory: DirectoryStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with nginx(directory.root, "--log", str(log)) as url, closing(HttpStore(url)) as store:
        assert list(store.names()) == ["other", "team/repo:1"]
        assert list(store.references()) == list(directory.references())
        assert assert_sound(store) == assert_sound(directory)
        for info in directory.blobs():
            assert store.stat(info.digest) == info.size
            assert b"".join(stream_blob(store, info.digest, info.size)) == b"".join(stream_blob(directory, info.digest))
        with pytest.raises(NotFoundError, match="is not in http"):
            store.open(Digest.of(b"nowhere"))
        with pytest.raises(NotFoundError, match="is not in http"):
            store.resolve("nothing")
        blob = store.open(Digest.of(BIG))
        dice = random.Random(1)
        spans = [(dice.randrange(len(BIG)), dice.randrange(1, 500_000)) for _ in range(300)]
        spans = [(offset, min(length, len(BIG) - offset)) for offset, length in spans]
        before = len(log.read_text().splitlines())
        with ThreadPoolExecutor(8) as pool:
            for (offset, length), data in zip(spans, pool.map(lambda span: blob.read_at(*span), spans), strict=True):
                assert data == BIG[offset : offset + length]
        lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert len(lines) == sum(offset + length > 16 << 10 for offset, length in spans)
    assert {line["status"] for line in lines} == {206}


def test_over_tls(directory: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = [need_tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    with nginx(directory.root, "--tls", str(certificate), str(key)) as url:
        localhost = url.replace("127.0.0.1", "localhost")
        with pytest.raises(UnavailableError, match="no secure connection, self-signed certificate"):
            HttpStore(localhost)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with closing(HttpStore(localhost)) as store:
            assert b"".join(stream_blob(store, Digest.of(BIG), len(BIG))) == BIG
            assert store.open(Digest.of(BIG)).read_at(1_000_000, 1_999_999) == BIG[1_000_000:2_999_999]
        with pytest.raises(UnavailableError, match="no secure connection, ip address mismatch"):
            HttpStore(url)
    with pytest.raises(UnavailableError, match="refused"):
        HttpStore(localhost)


def test_nginx_leaves_nothing(directory: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nginx(directory.root) as url, closing(HttpStore(url)) as store:
        assert store.resolve("other")
        assert os.listdir(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(UnavailableError, match="refused"):
        HttpStore(url)

"""A store behind HTTP: what it asks for, and that of every fault on the way nothing wrong is taken as data.

What all stores do is in ``test_store_conformance.py``, which has this one as well.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from support.faults import fsync_for_free
from support.httpstore import (
    PAGE,
    Exchange,
    Fault,
    StoreServer,
    another_range,
    chunked,
    cut_short,
    drip,
    drip_headers,
    gzipped,
    ignore_ranges,
    page,
    raw,
    redirect,
    reset,
    stall,
    status,
    wrong_bytes,
)
from support.stores import image, publish, unpublish

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from layerstore.image import load_image
from layerstore.store import httpget
from layerstore.store.directory import DirectoryStore
from layerstore.store.format import MARKER_BYTES, ReferenceDocument
from layerstore.store.http import START_BYTES, HttpStore
from layerstore.store.opening import Stores, open_store
from layerstore.store.reading import read_blob, stream_blob

BIG = hashlib.shake_128(b"pack").digest(300_000)
"""Longer than what comes with the opening."""
SAMPLE = image(b"layer", BIG)
NAME = "team/repo:1"
SECRET = "s3cret%2Fword"


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    with fsync_for_free():
        store = DirectoryStore.create(str(tmp_path / "store"))
        publish(store, NAME, SAMPLE)
    return store


@pytest.fixture
def server(directory: DirectoryStore) -> Iterator[StoreServer]:
    with StoreServer(directory.root) as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> Iterator[HttpStore]:
    with closing(HttpStore(server.url, read_timeout=20)) as store:
        server.forget()
        yield store


@pytest.fixture
def hasty(server: StoreServer) -> Iterator[HttpStore]:
    """One that waits half a second, and two more for ``BIG``."""
    with closing(HttpStore(server.url, read_timeout=0.5)) as store:
        server.forget()
        yield store


def fails(kind: type[ImgtoolError], attempt: Callable[[], object], match: str | None = None) -> str:
    """The message of the error, which has to be of exactly that class, or of a private one below it."""
    with pytest.raises(kind, match=match) as caught:
        attempt()
    assert next(each for each in type(caught.value).__mro__ if each.__module__ == "layerstore.errors") is kind
    text = str(caught.value)
    assert text.isprintable(), text
    assert "word" not in text
    return text


# What is asked for


def test_a_read_is_one_range_on_a_connection_that_stays(server: StoreServer, store: HttpStore) -> None:
    with store.open(Digest.of(BIG)) as blob:
        server.forget()
        for offset in range(START_BYTES, START_BYTES + 20):
            assert blob.read_at(offset, 100_000) == BIG[offset : offset + 100_000]
    assert server.requests() == server.requests(Digest.of(BIG).hex) == 20
    assert 20 * 100_000 < server.sent() < 20 * 101_000
    assert server.connections == 0, "another one than that of the opening"
    assert {(each["range"], each["accept-encoding"]) for each in server.headers()} == {
        (f"bytes={offset}-{offset + 99_999}", "identity") for offset in range(START_BYTES, START_BYTES + 20)
    }


def test_opening_brings_what_a_document_has(server: StoreServer, store: HttpStore) -> None:
    assert read_blob(store, SAMPLE.target, limit=10_000) == SAMPLE.blobs[SAMPLE.target.digest]
    assert server.requests() == 1
    with store.open(Digest.of(BIG)) as blob:
        assert blob.size == len(BIG)
        assert blob.read_at(0, START_BYTES) == BIG[:START_BYTES]
        assert blob.read_at(7, 0) == b""
    assert store.stat(Digest.of(BIG)) == len(BIG)
    assert server.requests() == 3
    assert server.sent() < START_BYTES + 2_000


def test_a_blob_of_a_known_size_is_opened_without_a_request(server: StoreServer, store: HttpStore) -> None:
    server.forget()
    with store.open_sized(Digest.of(BIG), len(BIG)) as blob:
        assert server.requests() == 0
        assert (blob.size, blob.read_at(0, 100), blob.read_at(200_000, 7)) == (
            len(BIG),
            BIG[:100],
            BIG[200_000:200_007],
        )
    assert server.requests() == 2
    with store.open_sized(Digest.of(BIG), len(BIG) - 1) as other, pytest.raises(CorruptError, match="another size"):
        other.read_at(0, 100)
    with store.open_sized(Digest.of(b"none"), 100) as none, pytest.raises(NotFoundError, match="is not in"):
        none.read_at(0, 100)


def test_many_threads_read_at_once(server: StoreServer, store: HttpStore) -> None:
    blob = store.open(Digest.of(BIG))
    spans = [(offset, 50_000 + offset % 977) for offset in range(0, 240_000, 601)]
    with ThreadPoolExecutor(8) as pool:
        for (offset, length), data in zip(spans, pool.map(lambda span: blob.read_at(*span), spans), strict=True):
            assert data == BIG[offset : offset + length]
    assert server.connections <= 8


def test_names_are_escaped_once_more(server: StoreServer, store: HttpStore) -> None:
    asked = []
    server.misbehave(lambda exchange: (asked.append(exchange.path), exchange.answer())[1], "refs/")
    assert store.resolve(NAME).digest == SAMPLE.target.digest
    assert asked == ["refs/team%2Frepo:1"]
    assert server.headers()[0]["cache-control"] == "no-cache"
    for bad in ("../store.json", "a/../b", "a%2Fb", "", "a?b", "a#b"):
        fails(UsageError, lambda bad=bad: store.resolve(bad))  # type: ignore[misc]
    assert server.requests() == 1


def test_answers_without_a_length_are_read_to_their_end(server: StoreServer, store: HttpStore) -> None:
    blob = store.open(Digest.of(BIG))
    server.misbehave(chunked)
    assert store.resolve(NAME).digest == SAMPLE.target.digest
    for _ in range(3):
        assert blob.read_at(20_000, 250_000) == BIG[20_000:270_000]
    assert server.connections == 0


# Faults of a read: class, and that it says why


def _moved(exchange: Exchange) -> None:
    status(302, Location="/elsewhere")(exchange)


READ_FAULTS: dict[str, tuple[Fault, type[ImgtoolError], str]] = {
    "cut short": (cut_short(70_000), UnavailableError, "cut short"),
    "reset in the middle": (reset(70_000), UnavailableError, "reset by peer|cut short"),
    "reset at once": (reset(), UnavailableError, "reset by peer|closed the connection"),
    "stalled": (stall(Event()), UnavailableError, "no answer in time"),
    "drips": (drip, UnavailableError, "no answer in time"),
    "headers drip": (drip_headers, UnavailableError, "no answer in time"),
    "another range": (another_range(1), CorruptError, "another range.*bytes 20000-.*got bytes 20001-"),
    "another size": (
        lambda exchange: _changed(exchange, Content_Range="bytes 20000-119999/300001"),
        CorruptError,
        "another size",
    ),
    "no range": (lambda exchange: _changed(exchange, Content_Range=None), UnavailableError, "doesn't say which range"),
    "unit without sense": (
        lambda exchange: _changed(exchange, Content_Range="pages 1-2/3"),
        CorruptError,
        "another range",
    ),
    "of unknown size": (
        lambda exchange: _changed(exchange, Content_Range="bytes 20000-119999/*"),
        CorruptError,
        "another range",
    ),
    "too short and says so": (lambda exchange: _resized(exchange, -1), CorruptError, "100000 bytes, got 99999"),
    "too long and says so": (lambda exchange: _resized(exchange, 1), CorruptError, "100000 bytes, got 100001"),
    "a web page": (page(), UnavailableError, "web page"),
    "a web page as long as the blob": (page(like=True), UnavailableError, "web page"),
    "a page that says it is data": (page(typed=False), CorruptError, "another size"),
    "compressed by a proxy": (gzipped, CorruptError, "Content-Encoding 'gzip'"),
    "redirected in a circle": (redirect(lambda path: f"/{path}"), UnavailableError, "redirects more than"),
    "redirected to another scheme": (redirect("ftp://127.0.0.1/x"), UnavailableError, "no address of http"),
    "redirected to no URL": (redirect("http://[::1/x"), UnavailableError, "no address of http"),
    "redirected to nowhere": (status(302), UnavailableError, "no address of http"),
    "redirected to nobody": (redirect("http://127.0.0.1:1/x"), UnavailableError, "refused"),
    "400": (status(400), UnavailableError, "400 Bad Request"),
    "401": (status(401), PermissionError_, "401 Unauthorized"),
    "403": (status(403), PermissionError_, "403 Forbidden"),
    "404": (status(404), NotFoundError, "is not in http"),
    "410": (status(410), NotFoundError, "is not in http"),
    "416": (status(416, Content_Range="bytes */100"), CorruptError, "has no bytes 20000-119999 any more"),
    "429": (status(429, Retry_After="5"), UnavailableError, "429 Too Many Requests"),
    "500": (status(500), UnavailableError, "500 Internal Server Error"),
    "503": (status(503), UnavailableError, "503 Service Unavailable"),
    "204": (status(204), UnavailableError, "204 No Content"),
    "304": (status(304), UnavailableError, "304 Not Modified"),
    "a status that isn't known": (raw(b"HTTP/1.1 799 \r\nContent-Length: 0\r\n\r\n"), UnavailableError, "answered 799"),
    "not HTTP": (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), UnavailableError, "not HTTP"),
    "nothing": (raw(b""), UnavailableError, "closed the connection"),
    "half of the headers": (raw(b"HTTP/1.1 206 Partial Content\r\nContent-Le"), UnavailableError, "which range"),
    "endless headers": (raw(b"HTTP/1.1 200 OK\r\n" + b"X-More: 1\r\n" * 5_000), UnavailableError, "not HTTP"),
    "a long header": (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 400_000), UnavailableError, "not HTTP"),
    "endless interim answers": (raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000), UnavailableError, "longer than|closed"),
    "a chunk of negative length": (
        raw(
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 20000-119999/300000\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
            + b"x" * (20 << 20)
        ),
        UnavailableError,
        "longer than|cut short|can't be used",
    ),
    "two framings": (
        lambda exchange: _changed(exchange, Transfer_Encoding="chunked"),
        UnavailableError,
        "no clear end",
    ),
    "a framing that isn't known": (
        lambda exchange: _changed(exchange, Transfer_Encoding="gzip, chunked", Content_Length=None),
        UnavailableError,
        "no clear end",
    ),
    "lengths that contradict": (
        lambda exchange: _changed(exchange, Content_Length="100000\r\nContent-Length: 7"),
        UnavailableError,
        "Content-Length|address",
    ),
    "no length at all": (lambda exchange: _unsized(exchange), UnavailableError, "cut short"),
}


def _changed(exchange: Exchange, **headers: str | None) -> None:
    for name, value in headers.items():
        exchange.answer_headers.pop(name.replace("_", "-"), None)
        if value is not None:
            exchange.answer_headers[name.replace("_", "-")] = value
    exchange.answer()
    exchange.keep = False


def _resized(exchange: Exchange, by: int) -> None:
    exchange.body = exchange.body[:by] if by < 0 else exchange.body + b"?" * by
    _changed(exchange, Content_Length=str(len(exchange.body)))


def _unsized(exchange: Exchange) -> None:
    exchange.body = exchange.body[:70_000]
    _changed(exchange, Content_Length=None, Connection="close")


@pytest.mark.case("C11")
@pytest.mark.case("D01")
@pytest.mark.parametrize("name", READ_FAULTS)
def test_a_fault_of_a_read_is_an_error_of_its_class(server: StoreServer, hasty: HttpStore, name: str) -> None:
    fault, kind, words = READ_FAULTS[name]
    blob = hasty.open(Digest.of(BIG))
    server.forget()
    server.misbehave(fault, "blobs/")
    started = time.monotonic()
    text = fails(kind, lambda: blob.read_at(20_000, 100_000), words)
    assert time.monotonic() - started < 15, "2.5 s is the time it has"
    assert Digest.of(BIG).hex in text
    assert hasty.location in text
    server.behave()
    assert blob.read_at(20_000, 100_000) == BIG[20_000:120_000], "well again"


@pytest.mark.case("C11")
@pytest.mark.parametrize("fault", [wrong_bytes, page(like=True, typed=False)])
def test_wrong_bytes_of_the_right_length_are_refused_by_their_digest(
    server: StoreServer, store: HttpStore, fault: Fault
) -> None:
    server.misbehave(fault, "blobs/")
    for digest, data in SAMPLE.blobs.items():
        fails(CorruptError, lambda digest=digest: list(stream_blob(store, digest, None)), digest.hex)  # type: ignore[misc]
        fails(CorruptError, lambda digest=digest, data=data: list(stream_blob(store, digest, len(data))))  # type: ignore[misc]
    fails(CorruptError, lambda: load_image(store, NAME))


@pytest.mark.case("C11")
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (page(), UnavailableError),
        (page(like=True), UnavailableError),
        (redirect("/portal"), UnavailableError),
        (gzipped, CorruptError),
        (cut_short(20), UnavailableError),
        (status(403), PermissionError_),
        (status(503), UnavailableError),
    ],
)
@pytest.mark.parametrize("path", ["store.json", "refs/", "blobs/"])
def test_no_page_is_taken_for_a_document(
    server: StoreServer, directory: DirectoryStore, fault: Fault, kind: type[ImgtoolError], path: str
) -> None:
    Path(directory.root, "portal").write_bytes(PAGE)
    server.misbehave(page(), "portal")
    server.misbehave(fault, path)

    def attempt() -> None:
        with closing(HttpStore(server.url)) as store:
            load_image(store, NAME)

    fails(kind, attempt)
    server.behave()
    with closing(HttpStore(server.url)) as store, pytest.raises(ImgtoolError, match=r"role|layer"):
        load_image(store, NAME)  # well again: a whole document, of no image of ours


def test_ranges_that_are_ignored(server: StoreServer, store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    server.misbehave(ignore_ranges)
    blob = store.open(Digest.of(BIG))
    assert blob.size == store.stat(Digest.of(BIG)) == len(BIG)
    for offset, length in ((0, 10), (20_000, 100_000), (299_999, 1), (0, len(BIG))):
        assert blob.read_at(offset, length) == BIG[offset : offset + length]
    monkeypatch.setattr(httpget, "WHOLE_LIMIT", 100_000)
    assert blob.read_at(50_000, 50_000) == BIG[50_000:100_000]
    fails(UnavailableError, lambda: blob.read_at(50_000, 50_001), "ignores ranges.*serve the store by one")


@pytest.mark.case("C05")
@pytest.mark.parametrize("data", [BIG[:-1], BIG + b"?", b""])
def test_a_blob_that_changes_its_size_is_corrupt(directory: DirectoryStore, store: HttpStore, data: bytes) -> None:
    digest = Digest.of(BIG)
    blob = store.open(digest)
    Path(directory.local_path(digest)).write_bytes(data)
    fails(CorruptError, lambda: blob.read_at(20_000, 100_000), digest.hex)
    fails(CorruptError, lambda: list(stream_blob(store, digest, len(BIG))), digest.hex)


@pytest.mark.parametrize(
    "fault", [cut_short(10), stall(Event()), drip, drip_headers, chunked, gzipped, page(), page(typed=False)]
)
def test_faults_of_an_opening(server: StoreServer, hasty: HttpStore, fault: Fault) -> None:
    server.misbehave(fault, "blobs/")
    for attempt in (lambda: hasty.open(Digest.of(BIG)).size, lambda: hasty.stat(Digest.of(BIG))):
        try:
            size = attempt()
        except (UnavailableError, CorruptError):
            continue
        # What comes whole may be believed: readers compare the size with the descriptor's, and the bytes with a digest.
        assert size == (len(PAGE) if fault.__qualname__.startswith("page") else len(BIG))


def test_one_that_hides_its_length_is_unavailable(server: StoreServer, store: HttpStore) -> None:
    def endless(exchange: Exchange) -> None:
        exchange.set_body(exchange.whole)
        chunked(exchange)

    server.misbehave(endless, "blobs/")
    fails(UnavailableError, lambda: store.open(Digest.of(BIG)), "doesn't say its length")
    server.behave()
    server.misbehave(status(416), "blobs/")
    fails(UnavailableError, lambda: store.open(Digest.of(BIG)), "which range")
    server.behave()
    server.misbehave(status(416, Content_Range="bytes */300000"), "blobs/")
    fails(UnavailableError, lambda: store.open(Digest.of(BIG)), "416")


# Connections


def test_a_lost_connection_is_made_again(server: StoreServer, store: HttpStore) -> None:
    blob = store.open(Digest.of(BIG))
    for _ in range(3):
        server.drop_connections()
        assert blob.read_at(20_000, 100_000) == BIG[20_000:120_000]


def test_a_read_connects_again_once_and_a_document_twice(server: StoreServer, store: HttpStore) -> None:
    blob = store.open(Digest.of(BIG))
    for path, attempt, most in (
        ("blobs/", lambda: blob.read_at(20_000, 100_000), 2),
        ("refs/", lambda: store.resolve(NAME), 3),
    ):
        server.forget()
        server.misbehave(reset(), path, times=most - 1)
        attempt()
        assert server.requests(path) == most
        server.misbehave(reset(), path)
        server.forget()
        fails(UnavailableError, attempt)
        assert server.requests(path) == most
        server.behave()


@pytest.mark.parametrize("fault", [cut_short(70_000), stall(Event()), status(503), wrong_bytes, page()])
def test_no_other_failure_is_tried_again_here(server: StoreServer, hasty: HttpStore, fault: Fault) -> None:
    blob = hasty.open(Digest.of(BIG))
    server.forget()
    server.misbehave(fault, "blobs/")
    try:
        blob.read_at(20_000, 100_000)
    except UnavailableError:
        pass
    assert server.requests() == 1


def test_a_server_that_comes_back_serves_what_is_open(directory: DirectoryStore) -> None:
    with StoreServer(directory.root) as first, closing(HttpStore(first.url)) as store:
        blob = store.open(Digest.of(BIG))
        port = first.port
        first.close()
        fails(UnavailableError, lambda: blob.read_at(20_000, 100_000), "refused|reset|closed")
        fails(UnavailableError, lambda: store.resolve(NAME))
        with StoreServer(directory.root, port=port):
            assert blob.read_at(20_000, 100_000) == BIG[20_000:120_000]
            assert store.resolve(NAME).digest == SAMPLE.target.digest


def test_a_stalled_read_goes_on_when_the_server_does(server: StoreServer, store: HttpStore) -> None:
    blob = store.open(Digest.of(BIG))
    until = Event()
    server.misbehave(stall(until), "blobs/", times=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(blob.read_at, 20_000, 100_000)
        assert server.stalled.acquire(timeout=20)
        assert blob.read_at(20_000, 100_000) == BIG[20_000:120_000], "others aren't held up"
        assert not waiting.done()
        until.set()
        assert waiting.result(20) == BIG[20_000:120_000]


def test_one_that_listens_and_never_accepts_is_given_up() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fails(UnavailableError, lambda: HttpStore(url, connect_timeout=0.3, read_timeout=0.3), "no answer in time")


def test_a_name_that_no_host_has(store: HttpStore) -> None:
    fails(UnavailableError, lambda: HttpStore("http://no-such-host.invalid/"), "name of the host isn't known")
    fails(UnavailableError, lambda: HttpStore(store.location.replace("http:", "https:")), "no secure connection")


# The store as a whole


def test_what_is_no_store(server: StoreServer, directory: DirectoryStore, tmp_path: Path) -> None:
    fails(NotFoundError, lambda: HttpStore(f"{server.url}/refs"), "is not a store, it has no store.json")
    marker = Path(directory.root, "store.json")
    whole = marker.read_bytes()
    for data, kind, words in (
        (b"", CorruptError, "is this a store"),
        (b"{}", CorruptError, "is this a store"),
        (b"x" * (MARKER_BYTES + 1), CorruptError, "more than"),
        (whole.replace(b'"version":1', b'"version":2'), UnsupportedError, "version 2"),
        (whole.replace(b'"incompatible":[]', b'"incompatible":["new"]'), UnsupportedError, "'new'"),
    ):
        marker.write_bytes(data)
        fails(kind, lambda: HttpStore(server.url), words)
    marker.write_bytes(whole)
    with closing(HttpStore(f"{server.url}//")) as store:
        assert store.location == server.url
    server.misbehave(status(403))
    fails(PermissionError_, lambda: HttpStore(server.url), "403")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "http://",
        "https:///path",
        "http://host:port/",
        "http://host:99999/",
        "http://user:word@/x",
        f"http://user:{SECRET}@host/x?token=word",
        "http://host/x#word",
        "http://[::1/x",
        "/path",
        "",
    ],
)
def test_what_is_no_url_of_a_store(url: str) -> None:
    fails(UsageError, lambda: HttpStore(url), "not the URL of a store")


@pytest.mark.case("G06")
def test_a_store_that_has_gone_is_unavailable_and_not_empty(directory: DirectoryStore, store: HttpStore) -> None:
    nowhere = Digest.of(b"nowhere")
    blob = store.open(Digest.of(BIG))
    attempts: list[Callable[[], object]] = [
        lambda: store.stat(nowhere),
        lambda: store.open(nowhere),
        lambda: store.resolve("nothing"),
    ]
    for attempt in attempts:
        fails(NotFoundError, attempt, "is not in http")
    os.unlink(directory.local_path(Digest.of(BIG)))
    attempts.append(lambda: blob.read_at(20_000, 100_000))
    fails(NotFoundError, attempts[-1], Digest.of(BIG).hex)
    os.rename(os.path.join(directory.root, "store.json"), os.path.join(directory.root, "away"))
    for attempt in attempts:
        fails(UnavailableError, attempt, "not served any more")


def test_references_are_checked(directory: DirectoryStore, store: HttpStore) -> None:
    path = Path(directory.root, "refs/team%2Frepo:1")
    for data, kind, words in (
        (b"", CorruptError, "publish it again"),
        (ReferenceDocument("other", SAMPLE.target).to_bytes(), CorruptError, "says that it is 'other'"),
        (path.read_bytes().replace(b'"version":1', b'"version":2'), UnsupportedError, "version 2"),
        (b" " * (2 << 20), CorruptError, "more than"),
    ):
        path.write_bytes(data)
        fails(kind, lambda: store.resolve(NAME), words)


def test_a_reference_is_asked_for_each_time(directory: DirectoryStore, store: HttpStore) -> None:
    other = image(b"other")
    publish(directory, NAME, other)
    assert store.resolve(NAME).digest == other.target.digest
    unpublish(directory, NAME)
    fails(NotFoundError, lambda: store.resolve(NAME))


# Listing


def test_names_can_be_listed_only_where_the_server_does(server: StoreServer, store: HttpStore) -> None:
    for attempt in (lambda: list(store.names()), lambda: list(store.references())):
        fails(UnsupportedError, attempt, "can't be listed.*autoindex_format json")
    server.listing = True
    Path(server.root, "refs", ".tmp-1-abc").touch()
    assert list(store.names()) == [NAME]
    assert [each.target for each in store.references()] == [SAMPLE.target]
    Path(server.root, "refs", "a b").touch()
    fails(CorruptError, lambda: list(store.names()), "'a b', which is no reference")


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'[{"name": 1}]', b'["a"]', b"<xml/>", b"\xff", b"[" * 5_000])
def test_what_is_no_listing_is_none(server: StoreServer, store: HttpStore, body: bytes) -> None:
    def fault(exchange: Exchange) -> None:
        exchange.set_body(body)
        exchange.answer()

    server.misbehave(fault, "refs/")
    fails(UnsupportedError, lambda: list(store.names()), "can't be listed")


def test_a_portal_in_place_of_a_listing_is_unavailable(server: StoreServer, store: HttpStore) -> None:
    server.misbehave(page())
    fails(UnavailableError, lambda: list(store.names()), "web page")


# Credentials and redirects


def _locked(exchange: Exchange) -> None:
    expected = "Basic " + b64encode(b"user:s3cret/word").decode()
    if exchange.headers.get("authorization") == expected:
        exchange.answer()
    else:
        status(401, WWW_Authenticate="Basic")(exchange)


def test_credentials_are_sent_and_never_shown(server: StoreServer) -> None:
    server.misbehave(_locked)
    fails(PermissionError_, lambda: HttpStore(server.url), "401 Unauthorized")
    with closing(HttpStore(server.url.replace("//", f"//user:{SECRET}@"))) as store:
        assert store.location == server.url
        assert list(stream_blob(store, Digest.of(BIG), len(BIG)))
        fails(NotFoundError, lambda: store.resolve("nothing"))
        server.behave()
        for fault in (page(), reset(), status(503), status(403), gzipped, redirect("http://x:word@127.0.0.1:1/word")):
            server.misbehave(fault, "refs/")
            fails_somehow(lambda: store.resolve(NAME))
            server.behave()
    for port in (1, server.port):
        fails_somehow(lambda port=port: HttpStore(f"https://user:{SECRET}@127.0.0.1:{port}/store"))  # type: ignore[misc]


def fails_somehow(attempt: Callable[[], object]) -> None:
    with pytest.raises(ImgtoolError) as caught:
        attempt()
    assert "word" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed_but_credentials_stay(directory: DirectoryStore, code: int) -> None:
    with StoreServer(directory.root) as there, StoreServer(directory.root) as here:
        here.misbehave(_locked)
        with closing(HttpStore(here.url.replace("//", f"//user:{SECRET}@"))) as store:
            here.behave()
            here.misbehave(redirect(lambda path: f"http://x:y@localhost:{there.port}/{path}#part", code), "blobs/")
            assert b"".join(stream_blob(store, Digest.of(BIG), len(BIG))) == BIG
            here.behave()
            here.misbehave(redirect("/blobs/../store.json", code), "refs/", times=1)
            fails(CorruptError, lambda: store.resolve(NAME))
    assert there.requests() == here.requests("blobs/")
    assert all("authorization" not in headers for headers in there.headers())
    assert all(headers["range"].startswith("bytes=") for headers in there.headers())
    assert all("authorization" in headers for headers in here.headers())


def test_a_redirect_from_https_to_http_is_refused() -> None:
    fails(
        UnavailableError,
        lambda: httpget._redirected("https://host/a", "http://host/b", "blob x"),
        "from https to http",
    )


# Opening by location


def test_stores_open_by_path_and_by_url(directory: DirectoryStore, server: StoreServer) -> None:
    assert open_store(directory.root).resolve(NAME) == SAMPLE.target
    with closing(open_store(server.url.replace("http", "HTTP"))) as store:  # type: ignore[type-var]
        assert isinstance(store, HttpStore)
        assert store.resolve(NAME) == SAMPLE.target
    fails(
        UnsupportedError, lambda: open_store("nobodys://user:word@host/"), "path of a directory, or a URL of file, http"
    )
    fails(NotFoundError, lambda: open_store("http:/not-a-url"), "is not a store")


def test_stores_stay_open_and_are_known_without_their_credentials(server: StoreServer) -> None:
    with Stores() as stores:
        fails(PermissionError_, lambda: _during(server, status(403), lambda: stores.open(server.url)))
        plain = stores.open(server.url)
        assert stores.open(server.url) is plain
        server.misbehave(_locked)
        url = server.url.replace("//", f"//user:{SECRET}@")
        locked = stores.open(url)
        assert locked is not plain
        assert locked.location == server.url
        assert stores.open(url) is locked
        assert stores.open(server.url) is locked
        assert stores.open(server.url).resolve(NAME) == SAMPLE.target


def _during(server: StoreServer, fault: Fault, attempt: Callable[[], object]) -> None:
    server.misbehave(fault)
    try:
        attempt()
    finally:
        server.behave()


def test_several_threads_open_one_store(server: StoreServer) -> None:
    with Stores() as stores, ThreadPoolExecutor(8) as pool:
        assert len({id(store) for store in pool.map(stores.open, [server.url] * 8)}) == 1


def test_nothing_stays_behind(directory: DirectoryStore) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with StoreServer(directory.root) as server:
        for fault in (page(), cut_short(100), stall(Event()), gzipped, raw(b"x")):
            with closing(HttpStore(server.url, read_timeout=0.3)) as store:
                server.misbehave(fault, "blobs/")
                fails_somehow(lambda: list(stream_blob(store, Digest.of(BIG), len(BIG))))
                server.behave()
        server.misbehave(page())
        fails(UnavailableError, lambda: HttpStore(server.url))
    assert {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before} == {}

"""Whatever a web server sends: our errors and nothing else, in bounded time and memory; or what has the right form."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import fsync_for_free
from support.httpstore import Exchange, StoreServer, raw
from support.stores import image, publish

from layerstore.digest import Digest
from layerstore.errors import ImgtoolError
from layerstore.oci.descriptor import Descriptor
from layerstore.store import httpget
from layerstore.store.directory import DirectoryStore
from layerstore.store.http import HttpStore

DATA = bytes(range(256)) * 200
DIGEST = Digest.of(DATA)
OFFSET, LENGTH = 30_000, 100

STATUSES = [b"200 OK", b"206 Partial Content", b"416 No", b"404 No", b"302 There", b"100 Continue", b"204 No", b"999 ?"]
NUMBERS = [
    b"0",
    b"1",
    b"99",
    b"100",
    b"101",
    b"51200",
    b"-1",
    b"+5",
    b"1_0",
    b"1e3",
    b"",
    b"\xb2",
    b"9" * 30,
    b"100, 7",
]
HEADERS = {
    b"Content-Length": st.sampled_from(NUMBERS),
    b"Content-Range": st.one_of(
        st.sampled_from(
            [b"bytes 30000-30099/51200", b"bytes 0-16383/51200", b"bytes */51200", b"bytes */0", b"bytes 1-2/*", b""]
        ),
        st.builds(
            b"bytes %b-%b/%b".__mod__,
            st.tuples(*[st.sampled_from(NUMBERS)] * 3),  # any three of them
        ),
    ),
    b"Transfer-Encoding": st.sampled_from([b"chunked", b"Chunked", b"gzip", b"identity", b"chunked, chunked", b""]),
    b"Content-Encoding": st.sampled_from([b"identity", b"gzip", b"br", b"zstd", b"gzip, gzip", b"\xff", b""]),
    b"Content-Type": st.sampled_from(
        [b"text/html", b"TEXT/HTML;charset=x", b"application/json", b"multipart/byteranges; boundary=x", b"\xff", b""]
    ),
    b"Location": st.sampled_from(
        [
            *(b"/x", b"", b"//", b"x:y", b"\x01", b"http://", b"http://[::1", b"http://[v1.x]/", b"http://h:99999/"),
            *(b"http://\xff.invalid/", b"http://127.0.0.1:0/", b"http://127.0.0.1:1/\r\n\tX: y", b"http://%00/"),
            *(b"http://a@b@127.0.0.1:1/", b"https://127.0.0.1:1/", b"http://" + b"x" * 300 + b"/"),
        ]
    ),
    b"Connection": st.sampled_from([b"close", b"keep-alive", b"upgrade", b""]),
    b"X-Other": st.binary(max_size=20),
}
FRAMING = {b"Content-Length", b"Transfer-Encoding"}
header = st.sampled_from(sorted(HEADERS)).flatmap(lambda name: st.tuples(st.just(name), HEADERS[name]))
chunk_size = st.sampled_from([b"0", b"1", b"64", b"-1", b"-5", b"0x5", b"f" * 16, b"1_0", b"", b"5;x=y", b"zz"])
chunks = st.lists(st.tuples(chunk_size, st.binary(max_size=120)), max_size=4).map(
    lambda pieces: b"".join(b"%b\r\n%b\r\n" % piece for piece in pieces)
)
bodies = st.one_of(st.binary(max_size=300), chunks, st.just(DATA[OFFSET : OFFSET + LENGTH]), st.just(DATA))
answers = st.builds(
    lambda status, headers, end, body: b"HTTP/1.1 " + status + b"\r\n" + b"".join(headers) + end + body,
    st.one_of(st.sampled_from(STATUSES), st.binary(max_size=10)),
    st.lists(header.map(lambda pair: b"%b: %b\r\n" % pair), max_size=6),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b""]),
    bodies,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with fsync_for_free():
        store = DirectoryStore.create(str(tmp_path_factory.mktemp("http") / "store"))
        publish(store, "name", image(DATA))
    with StoreServer(store.root, listing=True) as server:
        yield server


@pytest.fixture(scope="module")
def store(server: StoreServer) -> Iterator[HttpStore]:
    with pytest.MonkeyPatch.context() as patch, closing(HttpStore(server.url, read_timeout=5)) as store:
        patch.setattr(httpget, "_RECONNECT_PAUSES", (0.0, 0.0))
        yield store


def believed(attempt: Callable[[], object]) -> object:
    """What came, or None for one of our errors, which is one line."""
    try:
        return attempt()
    except ImgtoolError as error:
        assert str(error).isprintable()
        return None


def survive(server: StoreServer, store: HttpStore, answer: bytes, keep: bool) -> None:
    blob = store.open(DIGEST)
    server.misbehave(raw(answer, keep=keep))
    try:
        data = believed(lambda: blob.read_at(OFFSET, LENGTH))
        assert data is None or (isinstance(data, bytes) and len(data) == LENGTH)
        opened = believed(lambda: store.open(DIGEST))
        assert opened is None or opened.size >= 0  # type: ignore[attr-defined]
        target = believed(lambda: store.resolve("name"))
        assert target is None or isinstance(target, Descriptor)
        assert isinstance(believed(lambda: list(store.names())), list | None)
        assert believed(lambda: HttpStore(server.url)) is None
    finally:
        server.behave()
    assert blob.read_at(OFFSET, LENGTH) == DATA[OFFSET : OFFSET + LENGTH], "nothing of it is left over"


@given(answer=answers)
@settings(max_examples=1500, deadline=None)
def test_any_answer(server: StoreServer, store: HttpStore, answer: bytes) -> None:
    survive(server, store, answer, keep=False)


@given(
    status=st.sampled_from([each for each in STATUSES if not each.startswith((b"1", b"204"))]),
    headers=st.lists(
        header.filter(lambda pair: pair[0] not in FRAMING).map(lambda pair: b"%b: %b\r\n" % pair), max_size=3
    ),
    body=bodies,
    more=st.one_of(answers, st.binary(max_size=100)),
)
@settings(max_examples=500, deadline=None)
def test_what_comes_after_an_answer(
    server: StoreServer, store: HttpStore, status: bytes, headers: list[bytes], body: bytes, more: bytes
) -> None:
    head = b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n" % (status, b"".join(headers), len(body))
    survive(server, store, head + body + more, keep=True)


@given(answer=st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes(server: StoreServer, store: HttpStore, answer: bytes) -> None:
    survive(server, store, answer, keep=False)


@pytest.mark.parametrize("head", [b"Content-Length: 999999999999", b"Transfer-Encoding: chunked\r\n\r\n-1", b"X: y"])
@pytest.mark.parametrize("path", ["store.json", "refs/", "blobs/"])
def test_endless_answers_cost_bounded_memory(server: StoreServer, head: bytes, path: str) -> None:
    def endless(exchange: Exchange) -> None:
        exchange.keep = False
        exchange.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        while True:  # until the client hangs up
            exchange.send(b" " * (1 << 20))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server.misbehave(endless, path)
    try:
        with closing(HttpStore(server.url)) as store:
            assert believed(lambda: store.resolve("name")) is None or path == "blobs/"
            believed(lambda: store.open(DIGEST).read_at(OFFSET, LENGTH))
            believed(lambda: list(store.names()))
    except ImgtoolError:
        assert path == "store.json"
    finally:
        server.behave()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


def test_the_server_of_these_tests_is_right_when_told_nothing(server: StoreServer, store: HttpStore) -> None:
    assert list(store.names()) == ["name"]
    assert store.open(DIGEST).read_at(0, len(DATA)) == DATA
    assert Path(server.root, "store.json").exists()

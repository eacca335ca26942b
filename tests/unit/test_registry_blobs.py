"""Reading from a registry: ranges, downloads, redirects, and what servers do instead of answering."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.httpstore import (
    Exchange,
    Fault,
    StoreServer,
    another_range,
    chunked,
    cut_short,
    gzipped,
    page,
    redirect,
    reset,
    stall,
    status,
    wrong_bytes,
)
from support.registries import Recorded, client_of, own_authority
from support.registry_faults import FakeRegistry, Gate, RegistryExchange, serve

from layerstore.digest import Digest
from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.registry.blobs import WHOLE_LIMIT, Blobs
from layerstore.registry.client import RegistryClient
from layerstore.registry.wire import MAX_REDIRECTS, resolve

DATA = os.urandom(3_000_000)
DIGEST = Digest.of(DATA)
LAYER = Descriptor("x", DIGEST, len(DATA))
BLOB = f"GET /v2/a/blobs/{DIGEST}"
CUT = cut_short(1_800_000)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        registry.repository("a").blobs[str(DIGEST)] = DATA
        yield registry


@pytest.fixture
def client(registry: FakeRegistry) -> Iterator[RegistryClient]:
    client = client_of(registry)
    yield client
    client.close()


@pytest.fixture
def blobs(client: RegistryClient) -> Blobs:
    return Blobs(client)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[StoreServer]:
    """Where a registry sends who wants a blob."""
    root = tmp_path / "storage"
    root.mkdir()
    (root / "blob").write_bytes(DATA)
    with StoreServer(str(root)) as server:
        yield server


def download(blobs: Blobs, path: Path, descriptor: Descriptor = LAYER) -> bytes:
    with (path / "layer").open("w+b") as file:
        blobs.download(descriptor, file.fileno(), "layer 0", threading.Event())
        return file.read()


def ranges(registry: FakeRegistry) -> list[str | None]:
    return [each.get("range") for each in registry.headers(BLOB)]


def whole_again(exchange: Exchange) -> None:
    """The range is ignored."""
    exchange.set_body(exchange.whole, Content_Type="application/octet-stream")
    exchange.answer()


def another_etag(exchange: Exchange) -> None:
    exchange.answer_headers["ETag"] = '"another"'
    exchange.answer()


# Downloads


@pytest.mark.case("R02")
@pytest.mark.parametrize("cut", [CUT, reset(1_800_000)], ids=["cut", "reset"])
def test_a_download_that_breaks_off_goes_on(registry: FakeRegistry, blobs: Blobs, tmp_path: Path, cut: Fault) -> None:
    registry.misbehave(cut, BLOB, times=1)
    assert download(blobs, tmp_path) == DATA
    first, second = ranges(registry)
    assert first is None
    if cut is CUT:  # after a reset, what had arrived may be gone
        assert second == "bytes=1800000-2999999"


@pytest.mark.case("R02")
@pytest.mark.parametrize("fault", [whole_again, status(416), another_etag, another_range()])
def test_a_download_starts_anew_where_it_can_not_go_on(
    registry: FakeRegistry, blobs: Blobs, tmp_path: Path, fault: Fault
) -> None:
    registry.misbehave(cut_short(2_000_000), BLOB, times=1)
    registry.misbehave(fault, BLOB, times=1)
    assert download(blobs, tmp_path) == DATA
    assert ranges(registry)[:2] == [None, "bytes=2000000-2999999"]
    assert ranges(registry)[2:] in ([], [None])


@pytest.mark.case("R02")
def test_a_download_that_never_goes_on_ends(registry: FakeRegistry, blobs: Blobs, tmp_path: Path) -> None:
    registry.misbehave(cut_short(0), BLOB)
    with pytest.raises(UnavailableError, match=r"layer 0.*again and again"):
        download(blobs, tmp_path)
    registry.behave()

    def halves(exchange: Exchange) -> None:
        exchange.set_body(exchange.whole)
        cut_short(1_000_000)(exchange)

    registry.misbehave(halves, BLOB)
    with pytest.raises(UnavailableError, match="can't go on"):
        download(blobs, tmp_path)


@pytest.mark.case("R02")
@pytest.mark.case("C11")
@pytest.mark.parametrize("fault", [wrong_bytes, page(like=True, typed=False)])
def test_a_download_is_verified(registry: FakeRegistry, blobs: Blobs, tmp_path: Path, fault: Fault) -> None:
    registry.misbehave(fault, BLOB)
    with pytest.raises(CorruptError, match=f"layer 0 .*expected {DIGEST}"):
        download(blobs, tmp_path)


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_a_layer_of_another_size_is_refused(registry: FakeRegistry, blobs: Blobs, tmp_path: Path, size: int) -> None:
    with pytest.raises(CorruptError, match="wrong size"):
        download(blobs, tmp_path, Descriptor("x", DIGEST, size))


def test_an_empty_layer(registry: FakeRegistry, blobs: Blobs, tmp_path: Path) -> None:
    registry.repository("a").blobs[str(Digest.of(b""))] = b""
    assert download(blobs, tmp_path, Descriptor("x", Digest.of(b""), 0)) == b""


def test_a_download_is_given_up_when_it_is_told(registry: FakeRegistry, blobs: Blobs, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with (tmp_path / "x").open("wb") as file, pytest.raises(UnavailableError, match="given up"):
        blobs.download(LAYER, file.fileno(), "layer 0", stop)


def test_a_link_that_stands_still_is_left(registry: FakeRegistry, tmp_path: Path) -> None:
    def half(exchange: Exchange) -> None:
        exchange.send(exchange.head() + exchange.body[:1_500_000])
        stall(threading.Event())(exchange)

    client = client_of(registry, read_timeout=0.3)
    registry.misbehave(half, BLOB, times=1)
    try:
        assert download(Blobs(client), tmp_path) == DATA
    finally:
        client.close()
    assert len(ranges(registry)) == 2


# Ranges


def test_ranges_are_single(registry: FakeRegistry, blobs: Blobs) -> None:
    place = blobs.place(DIGEST)
    assert blobs.start(place, 16) == (len(DATA), DATA[:16])
    assert blobs.read(place, 1000, 2_000_000, len(DATA)) == DATA[1000:2_001_000]
    assert blobs.read(place, len(DATA) - 1, 1, len(DATA)) == DATA[-1:]
    end = len(DATA) - 1
    assert ranges(registry) == ["bytes=0-15", "bytes=1000-2000999", f"bytes={end}-{end}"]


@pytest.mark.parametrize("cut", [cut_short(70_000), reset(70_000), cut_short(0)])
def test_a_range_that_breaks_off_is_completed(registry: FakeRegistry, blobs: Blobs, cut: Fault) -> None:
    registry.misbehave(cut, BLOB, times=2)
    place = blobs.place(DIGEST)
    assert blobs.start(place, 100_000) == (len(DATA), DATA[:100_000])
    registry.misbehave(cut, BLOB, times=2)
    assert blobs.read(place, 5, 200_000, len(DATA)) == DATA[5:200_005]
    registry.misbehave(cut_short(0), BLOB)
    with pytest.raises(UnavailableError, match="again and again"):
        blobs.read(place, 5, 10, len(DATA))


def test_a_range_that_is_ignored_is_noticed(registry: FakeRegistry, blobs: Blobs) -> None:
    registry.misbehave(whole_again, BLOB)
    place = blobs.place(DIGEST)
    assert blobs.start(place, 16) == (len(DATA), DATA[:16])
    assert blobs.read(place, 1000, 10, len(DATA)) == DATA[1000:1010]
    large = bytes(WHOLE_LIMIT + 10)
    registry.repository("a").blobs[str(Digest.of(large))] = large
    registry.misbehave(whole_again, "blobs")
    with pytest.raises(UnavailableError, match="ignores ranges"):
        blobs.read(blobs.place(Digest.of(large)), WHOLE_LIMIT, 10, len(large))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (another_range(), CorruptError),
        (gzipped, CorruptError),
        (page(), UnavailableError),
        (status(416, Content_Range="bytes */5"), CorruptError),
        (status(206, Content_Range="bytes 0-9/10"), ImgtoolError),
        (status(206), ImgtoolError),
    ],
)
def test_answers_to_another_question(
    registry: FakeRegistry, blobs: Blobs, fault: Fault, error: type[ImgtoolError]
) -> None:
    registry.misbehave(fault, BLOB)
    with pytest.raises(error, match=DIGEST.hex):
        blobs.read(blobs.place(DIGEST), 100, 10, len(DATA))


def test_a_blob_that_has_another_size_is_corrupt(registry: FakeRegistry, blobs: Blobs) -> None:
    for wrong in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(CorruptError, match=DIGEST.hex):
            blobs.read(blobs.place(DIGEST), 0, 10, wrong)


def test_a_range_without_a_length_is_read(registry: FakeRegistry, blobs: Blobs) -> None:
    registry.misbehave(chunked, BLOB)
    assert blobs.read(blobs.place(DIGEST), 7, 5000, len(DATA)) == DATA[7:5007]


# Sizes


@pytest.mark.case("R04")
@pytest.mark.parametrize(
    "fault",
    [
        status(405),
        status(403),
        status(400),
        lambda exchange: (exchange.set_body(b""), exchange.answer()),  # 200 with a length of 0
    ],
    ids=["405", "403", "400", "0"],
)
def test_where_head_is_of_no_use_a_byte_is_read(registry: FakeRegistry, blobs: Blobs, fault: Fault) -> None:
    registry.misbehave(fault, "HEAD /v2/a/blobs")
    assert blobs.size(DIGEST) == len(DATA)
    registry.behave()
    with pytest.raises(NotFoundError):
        blobs.size(Digest.of(b"nowhere"))


@pytest.mark.case("R04")
def test_a_url_that_is_signed_for_get_alone(registry: FakeRegistry, blobs: Blobs, storage: StoreServer) -> None:
    registry.elsewhere = lambda digest: f"{storage.url}/blob?X-Signature=secret"

    def get_only(exchange: Exchange) -> None:
        if "range" not in exchange.headers:  # the server of files can't tell a HEAD
            exchange.set_body(b"", status=403)
        exchange.answer()

    storage.misbehave(get_only)
    assert blobs.size(DIGEST) == len(DATA)
    assert blobs.size(DIGEST) == len(DATA)
    assert len(registry.requests("HEAD")) == 1  # it isn't tried again


# Redirects


@pytest.mark.case("R03")
def test_authorization_does_not_follow_a_redirect(registry: FakeRegistry, storage: StoreServer, tmp_path: Path) -> None:
    registry.gate = Gate()
    registry.elsewhere = lambda digest: f"{storage.url}/blob?X-Signature=secret"
    client = client_of(registry)
    blobs = Blobs(client)
    assert download(blobs, tmp_path) == DATA
    assert blobs.start(blobs.place(DIGEST), 10) == (len(DATA), DATA[:10])
    client.close()
    assert all("authorization" in each for each in registry.headers(BLOB)[1:])
    assert storage.requests() == 2
    assert not any("authorization" in each for each in storage.headers())


@pytest.mark.case("R03")
def test_a_redirect_within_the_registry_keeps_it(registry: FakeRegistry) -> None:
    registry.gate = Gate()
    registry.misbehave(redirect(f"../../b/blobs/{DIGEST}", 301), "GET /v2/a/blobs")
    registry.repository("b").blobs[str(DIGEST)] = DATA
    client = client_of(registry)
    blobs = Blobs(client)
    assert blobs.size(DIGEST) == len(DATA)
    assert blobs.start(blobs.place(DIGEST), 5) == (len(DATA), DATA[:5])
    client.close()
    assert ["authorization" in each for each in registry.headers("GET /v2/b/blobs")] == [True, True]
    assert registry.gate.issued == [("repository:a:pull",), ("repository:a:pull", "repository:b:pull")]


@pytest.mark.case("R03")
def test_redirects_end(registry: FakeRegistry, blobs: Blobs) -> None:
    registry.misbehave(redirect(lambda path: path), BLOB)
    with pytest.raises(UnavailableError, match="redirects more than 5 times"):
        blobs.start(blobs.place(DIGEST), 5)
    assert len(ranges(registry)) == MAX_REDIRECTS + 1


@pytest.mark.case("R03")
@pytest.mark.parametrize("location", ["ftp://h/", "http://", "", "//", "http://[x/"])
def test_redirects_to_nowhere(registry: FakeRegistry, blobs: Blobs, location: str) -> None:
    registry.misbehave(redirect(location), BLOB)
    with pytest.raises(ImgtoolError):
        blobs.start(blobs.place(DIGEST), 5)


@pytest.mark.case("R03")
def test_from_https_nothing_leads_to_http(
    registry: FakeRegistry, storage: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_authority(tmp_path, monkeypatch) as tls, FakeRegistry(tls=tls) as secure:
        secure.repository("a").blobs[str(DIGEST)] = DATA
        client = client_of(secure)
        assert Blobs(client).size(DIGEST) == len(DATA)
        assert download(Blobs(client), tmp_path) == DATA
        secure.elsewhere = lambda digest: f"{storage.url}/blob?X-Signature=secret"
        with pytest.raises(UnavailableError, match="from https to http") as caught:
            Blobs(client).start(Blobs(client).place(DIGEST), 5)
        client.close()
    assert "secret" not in str(caught.value)
    assert storage.requests() == 0


def test_who_is_not_trusted_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_authority(tmp_path, monkeypatch, trusted=False) as tls, FakeRegistry(tls=tls) as secure:
        client = client_of(secure)
        with pytest.raises(UnavailableError, match=r"no secure connection, .*certificate"):
            Blobs(client).size(DIGEST)
        client.close()
        assert secure.requests() == []


def test_where_a_blob_lies_is_remembered_while_it_is_read(
    registry: FakeRegistry, blobs: Blobs, storage: StoreServer
) -> None:
    registry.elsewhere = lambda digest: f"{storage.url}/blob?X-Signature=secret"
    place = blobs.place(DIGEST)
    blobs.start(place, 10)
    for offset in range(0, 100, 10):
        assert blobs.read(place, offset, 10, len(DATA)) == DATA[offset : offset + 10]
    assert (len(registry.requests(BLOB)), storage.requests()) == (1, 11)
    storage.misbehave(status(403), times=1)  # the signature has expired
    assert blobs.read(place, 5, 10, len(DATA)) == DATA[5:15]
    assert (len(registry.requests(BLOB)), storage.requests()) == (2, 13)
    storage.misbehave(status(403))
    with pytest.raises(PermissionError_) as caught:
        blobs.read(place, 5, 10, len(DATA))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "location", "end"),
    [
        ("https://r/v2/a/b", "../uploads/u?x=1", "https://r/v2/uploads/u?x=1"),
        ("https://r/v2/a/b", "/c", "https://r/c"),
        ("https://r/v2/a/b", "https://u:p@s:1/c?d#e", "https://s:1/c?d"),
        ("http://r/v2", "https://s/c", "https://s/c"),
        ("https://r/v2", "//s/c", "https://s/c"),
    ],
)
def test_locations(base: str, location: str, end: str) -> None:
    assert resolve(base, location, "it") == end


# Repetition


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_heeded(registry: FakeRegistry, code: int) -> None:
    recorded = Recorded()
    client = client_of(registry, patience=recorded.patience())
    registry.misbehave(status(code, Retry_After="7"), BLOB, times=2)
    assert Blobs(client).start(Blobs(client).place(DIGEST), 1)[0] == len(DATA)
    assert recorded.pauses == [7, 7]
    registry.misbehave(
        status(code, Retry_After="Wed, 21 Oct 2026 07:28:09 GMT", Date="Wed, 21 Oct 2026 07:28:00 GMT"), BLOB, times=1
    )
    assert Blobs(client).start(Blobs(client).place(DIGEST), 1)[0] == len(DATA)
    assert recorded.pauses[2:] == [9]
    client.close()


def test_who_asks_to_wait_too_long_is_left_at_once(registry: FakeRegistry) -> None:
    recorded = Recorded()
    client = client_of(registry, patience=recorded.patience())
    registry.misbehave(status(429, Retry_After="31"), BLOB)
    with pytest.raises(UnavailableError, match="429 Too Many Requests"):
        Blobs(client).start(Blobs(client).place(DIGEST), 1)
    registry.behave()
    registry.misbehave(status(429, Retry_After="11"), BLOB)
    with pytest.raises(UnavailableError, match="429"):
        Blobs(client).start(Blobs(client).place(DIGEST), 1)
    assert recorded.pauses == [11, 11]
    client.close()


@pytest.mark.parametrize("fault", [status(500), status(502), status(504), status(408), reset()])
def test_pauses_grow_and_end(registry: FakeRegistry, fault: Fault) -> None:
    recorded = Recorded()
    client = client_of(registry, patience=recorded.patience())
    registry.misbehave(fault, "GET /v2/a/manifests")
    with pytest.raises(UnavailableError), client.ask("GET", "manifests/x", "it") as answer:
        answer.whole(1000)
    assert all(0.1 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(recorded.pauses))
    assert (len(recorded.pauses), len(registry.requests())) == (4, 5)
    client.close()


def test_idle_connections_that_were_closed_are_made_again(registry: FakeRegistry, blobs: Blobs) -> None:
    place = blobs.place(DIGEST)
    for _ in range(3):
        assert blobs.read(place, 0, 10, len(DATA)) == DATA[:10]
    assert registry.connections == 1
    registry.drop_connections()
    assert blobs.read(place, 0, 10, len(DATA)) == DATA[:10]


@pytest.mark.parametrize(
    ("code", "error"), [(403, PermissionError_), (405, UnsupportedError), (404, NotFoundError), (400, UnavailableError)]
)
def test_other_failures_are_not_repeated(
    registry: FakeRegistry, blobs: Blobs, code: int, error: type[Exception]
) -> None:
    registry.misbehave(status(code), BLOB)
    with pytest.raises(error, match=DIGEST.hex):
        blobs.start(blobs.place(DIGEST), 1)
    assert len(registry.requests(BLOB)) == 1


def test_only_a_registry_is_believed_that_something_is_missing(tmp_path: Path) -> None:
    with StoreServer(str(tmp_path)) as server:
        client = client_of(_Somewhere(server.port))
        for missing in (
            lambda: Blobs(client).size(DIGEST),
            lambda: Blobs(client).start(Blobs(client).place(DIGEST), 1),
        ):
            with pytest.raises(UnavailableError, match="as no registry does"):
                missing()
        client.close()


class _Somewhere(FakeRegistry):
    """The address of something else."""

    def __init__(self, port: int) -> None:
        self.tls = None
        self.address = "127.0.0.1"
        self.port = port


def test_a_registry_may_say_little(registry: FakeRegistry, blobs: Blobs) -> None:
    registry.misbehave(lambda exchange: (exchange.set_body(b"", status=404), exchange.answer()), "HEAD")
    with pytest.raises(NotFoundError):
        blobs.size(DIGEST)
    assert registry.requests("GET") == ["GET /v2/"]


def test_the_fake_serves_open_ranges() -> None:
    exchange = RegistryExchange(None, None, "", {"range": "bytes=2-"}, b"abcdef", 404, {}, b"")  # type: ignore[arg-type]
    serve(exchange)
    assert (exchange.status, exchange.body) == (206, b"cdef")

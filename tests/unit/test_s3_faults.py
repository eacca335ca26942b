"""S3 that misbehaves: a proxy with scripted faults in front of moto."""

from __future__ import annotations

import http.client
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from support.faultproxy import FaultProxy, Request, answer, hang_up, s3_error, then, twice, without
from support.httpstore import Exchange, Fault, cut_short, gzipped, page, raw, reset, stall, status
from support.servers import ACCESS, SECRET, S3Server
from support.stores import Sample, assert_sound, image, publish, put, put_missing, unpublish

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
)
from layerstore.store import s3, s3client, s3parts
from layerstore.store.bucket import ABSENT, Entry
from layerstore.store.collect import collect, plan_collection
from layerstore.store.objects import ObjectStore
from layerstore.store.reading import is_intact
from layerstore.store.s3 import S3Bucket
from layerstore.store.s3client import ATTEMPTS, S3Client, S3Url

SAMPLE = image(b"layer", b"second")
NOWHERE = Digest.of(b"nowhere")
PART = 5 << 20
"""As small as servers take."""


class Shared:
    """A proxy and a client for the whole module: to make a client takes a tenth of a second."""

    def __init__(self, server: S3Server, proxy: FaultProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.pauses: list[float] = []
        self.client = S3Client(S3Url.parse(server.url("", endpoint=proxy.url)), pause=self.pauses.append)


class Bench:
    """A prefix of moto, behind a proxy; nobody pauses."""

    def __init__(self, shared: Shared) -> None:
        self.server, self.proxy, self.pauses = shared.server, shared.proxy, shared.pauses
        self.straight = shared.server.url()
        self.url = self.straight.replace(shared.server.endpoint, shared.proxy.url)
        self._client = shared.client
        self.bucket = self.another()
        self.pauses.clear()

    def another(self) -> S3Bucket:
        return S3Bucket(self.url, client=self._client)

    def fresh(self, url: str | None = None) -> S3Bucket:
        """With a client of its own, and so with credentials of its own."""
        url = url or self.url
        return S3Bucket(url, client=S3Client(S3Url.parse(url), pause=self.pauses.append))

    def store(self) -> ObjectStore:
        return ObjectStore.create(self.another())

    def behind(self) -> S3Bucket:
        """The same bucket without the proxy."""
        return self.server.open(self.straight)

    def uploads(self) -> list[str]:
        prefix = self.straight.partition("?")[0].removeprefix(f"s3://{self.server.bucket}/")
        found = self.server.client.list_multipart_uploads(Bucket=self.server.bucket, Prefix=prefix)
        return [upload["Key"] for upload in found.get("Uploads", ())]


@pytest.fixture(scope="module")
def shared(moto: S3Server) -> Iterator[Shared]:
    with FaultProxy(moto.endpoint) as proxy:
        yield Shared(moto, proxy)


@pytest.fixture
def bench(shared: Shared) -> Iterator[Bench]:
    yield Bench(shared)
    shared.proxy.behave()
    shared.proxy.forget()


@pytest.fixture
def bucket(bench: Bench) -> S3Bucket:
    bench.bucket.guarantees()
    bench.proxy.forget()
    return bench.bucket


def sent(bucket: S3Bucket, key: str, data: bytes) -> str:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return bucket.send(key, file, len(data))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3parts, "PART_BYTES", PART)


# Uploads


@pytest.mark.case("S01")
def test_uploads_have_no_trailers_and_a_length(bench: Bench, small_parts: None) -> None:
    """Servers that know no checksum trailers refuse them, or store them as content."""

    def strict(exchange: Exchange) -> None:
        headers = exchange.headers
        hashed = headers.get("x-amz-content-sha256", "")
        if "x-amz-trailer" in headers or hashed.startswith("STREAMING") or "content-length" not in headers:
            exchange.set_body(b"<Error><Code>MissingContentLength</Code></Error>", status=411)
        exchange.answer()

    bench.proxy.misbehave(strict, method="PUT")
    store = bench.store()
    publish(store, "name", SAMPLE)
    data = os.urandom(2 * PART + 1)
    digest = put(store, data)
    with store.open(digest) as blob:
        assert is_intact(blob, digest)
    assert assert_sound(store) == SAMPLE.blobs.keys()


def test_bodies_that_arrive_damaged_are_sent_again(seaweedfs: S3Server, small_parts: None) -> None:
    def damage(request: Request) -> None:
        request.body = b"?" + request.body[1:]

    with seaweedfs.proxied(seaweedfs.url()) as (proxy, url):
        bucket = S3Bucket(url, client=S3Client(S3Url.parse(url), pause=lambda seconds: None))
        proxy.alter(damage, "blobs/", method="PUT", times=1)
        sent(bucket, "blobs/x", b"payload")
        assert bucket.read("blobs/x", 0, 100).data == b"payload"
        assert proxy.requests("blobs/x", method="PUT") == 2
        proxy.alter(damage, "partNumber=2", method="PUT", times=1)
        data = os.urandom(PART + 5)
        sent(bucket, "blobs/y", data)
        assert bucket.read("blobs/y", 0, 2 * PART).data == data


@pytest.mark.case("S04")
def test_a_completion_that_fails_with_status_200_is_repeated(bench: Bench, bucket: S3Bucket, small_parts: None) -> None:
    error = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>again</Message></Error>'
    bench.proxy.misbehave(answer(200, error), "uploadId=", method="POST", times=2, reach=False)
    bench.proxy.misbehave(s3_error(500, "InternalError"), "partNumber=2", method="PUT", times=3, reach=False)
    data = os.urandom(2 * PART + 5)
    sent(bucket, "blobs/x", data)
    assert bucket.read("blobs/x", 0, len(data) + 1).data == data
    assert bench.proxy.requests("uploadId=", method="POST") == 3
    assert bench.proxy.requests("blobs/x", method="HEAD") == 1, "the last look"


@pytest.mark.case("S04")
def test_a_completion_that_never_succeeds_leaves_nothing(bench: Bench, bucket: S3Bucket, small_parts: None) -> None:
    error = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>again</Message></Error>'
    bench.proxy.misbehave(answer(200, error), "uploadId=", method="POST", reach=False)
    with pytest.raises(UnavailableError, match="InternalError"):
        sent(bucket, "blobs/x", os.urandom(PART + 1))
    bench.proxy.behave()
    with pytest.raises(NotFoundError):
        bucket.head("blobs/x")
    assert bench.uploads() == []


@pytest.mark.case("S04")
@pytest.mark.parametrize("lost", [hang_up, reset(), s3_error(500, "InternalError"), status(502)])
def test_a_completion_whose_answer_was_lost_is_found(
    bench: Bench, bucket: S3Bucket, small_parts: None, lost: Fault
) -> None:
    """The second attempt is told that there is no such upload, since the first one has completed it."""
    bench.proxy.misbehave(then(lost, s3_error(404, "NoSuchUpload")), "uploadId=", method="POST", times=2)
    data = os.urandom(PART + 1)
    sent(bucket, "blobs/x", data)
    assert bucket.read("blobs/x", 0, len(data) + 1).data == data


@pytest.mark.case("S04")
def test_an_upload_that_was_given_up_by_others_is_no_success(bench: Bench, bucket: S3Bucket, small_parts: None) -> None:
    """Although an object of that name and size is there, which is damaged."""
    data = os.urandom(PART + 1)
    sent(bench.behind(), "blobs/x", bytes(len(data)))
    bench.proxy.misbehave(
        then(hang_up, s3_error(404, "NoSuchUpload")), "uploadId=", method="POST", times=2, reach=False
    )
    with pytest.raises(UnavailableError, match="given up meanwhile: repeat"):
        sent(bucket, "blobs/x", data)


@pytest.mark.case("S05")
@pytest.mark.parametrize(
    "parts",
    [
        b"<Part><PartNumber>1</PartNumber><ETag>x</ETag><Size>5242880</Size></Part>"
        b"<Part><PartNumber>3</PartNumber><ETag>x</ETag><Size>1</Size></Part>",
        b"<Part><PartNumber>1</PartNumber><ETag>x</ETag><Size>5242880</Size></Part>",
        b"<Part><PartNumber>1</PartNumber><ETag>x</ETag><Size>5242880</Size></Part>"
        b"<Part><PartNumber>2</PartNumber><ETag>x</ETag><Size>5242879</Size></Part>"
        b"<Part><PartNumber>3</PartNumber><ETag>x</ETag><Size>1</Size></Part>",
    ],
)
def test_parts_that_a_server_has_lost_are_noticed_before_they_are_joined(
    bench: Bench, bucket: S3Bucket, small_parts: None, parts: bytes
) -> None:
    listing = b'<?xml version="1.0"?><ListPartsResult><IsTruncated>false</IsTruncated>' + parts + b"</ListPartsResult>"
    bench.proxy.misbehave(answer(200, listing), "uploadId=", method="GET")
    with pytest.raises(UnavailableError, match="has lost parts"):
        sent(bucket, "blobs/x", os.urandom(2 * PART + 1))
    with pytest.raises(NotFoundError):
        bucket.head("blobs/x")
    assert bench.uploads() == []


@pytest.mark.case("S05")
def test_an_object_that_arrived_short_is_taken_away(bench: Bench, bucket: S3Bucket, small_parts: None) -> None:
    def shorter(exchange: Exchange) -> None:
        exchange.answer_headers["Content-Length"] = "17"
        exchange.answer()

    bench.proxy.misbehave(shorter, "blobs/x", method="HEAD", times=1)
    with pytest.raises(CorruptError, match=f"expected {PART + 1} bytes, got 17"):
        sent(bucket, "blobs/x", os.urandom(PART + 1))
    with pytest.raises(NotFoundError):
        bench.behind().head("blobs/x")


def test_an_upload_that_is_interrupted_is_given_up(
    bench: Bench, bucket: S3Bucket, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = S3Bucket._check_parts

    def interrupted(self: S3Bucket, key: str, upload: str, size: int) -> None:
        real(self, key, upload, size)
        raise KeyboardInterrupt

    monkeypatch.setattr(S3Bucket, "_check_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sent(bucket, "blobs/x", os.urandom(PART + 1))
    assert bench.uploads() == []


def test_what_a_dead_publisher_had_begun_is_reclaimed(bench: Bench, bucket: S3Bucket) -> None:
    name = bench.straight.partition("?")[0].removeprefix(f"s3://{bench.server.bucket}/")
    for key in ("blobs/a", "blobs/b"):
        where = {"Bucket": bench.server.bucket, "Key": f"{name}/{key}"}
        upload = bench.server.client.create_multipart_upload(**where)["UploadId"]
        bench.server.client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    later = bucket.now() + 10**10
    assert bucket.abort_uploads(before=bucket.now() - 10**12, keep=(), dry_run=False) == 0
    assert bucket.abort_uploads(before=later, keep=(), dry_run=True) == 200
    assert len(bench.uploads()) == 2
    assert bucket.abort_uploads(before=later, keep={"blobs/b"}, dry_run=False) == 100
    assert bench.uploads() == [f"{name}/blobs/b"]
    assert bucket.abort_uploads(before=later, keep=(), dry_run=False) == 100


# Reading

CUT = cut_short(1000)


@pytest.mark.case("S05", "S06")
@pytest.mark.parametrize("broken", [CUT, reset(1000), reset(), hang_up])
def test_a_body_that_breaks_off_goes_on_where_it_did(bench: Bench, bucket: S3Bucket, broken: Fault) -> None:
    data = os.urandom(10_000)
    etag = sent(bucket, "blobs/x", data)
    bench.proxy.misbehave(broken, "blobs/x", method="GET", times=2)
    assert bucket.read("blobs/x", 0, 20_000).data == data
    gets = bench.proxy.seen("blobs/x", method="GET")
    assert len(gets) == 3
    if broken is CUT:  # a reset takes back what hasn't been read yet
        assert [each.headers["range"] for each in gets] == ["bytes=0-19999", "bytes=1000-19999", "bytes=2000-19999"]
        assert [each.headers.get("if-match") for each in gets] == [None, etag, etag]


@pytest.mark.case("S05")
def test_an_object_whose_body_always_ends_early_is_corrupt(bench: Bench, bucket: S3Bucket) -> None:
    sent(bucket, "blobs/x", os.urandom(10_000))

    def shorter(exchange: Exchange) -> None:
        exchange.send(exchange.head() + exchange.body[:100])
        exchange.keep = False

    bench.proxy.misbehave(shorter, "blobs/x", method="GET")
    with pytest.raises(CorruptError, match="500 of 10000 bytes at 0 came, whatever was asked"):
        bucket.read("blobs/x", 0, 20_000)


LARGE = os.urandom(200_000)


@pytest.mark.parametrize("fault", [hang_up, reset(), status(503), status(403), status(404), answer(206), page()])
def test_a_large_read_that_fails_is_repeated_the_careful_way(bench: Bench, bucket: S3Bucket, fault: Fault) -> None:
    """Large reads go by a signed URL, which is quicker; what is wrong is found out as for all others."""
    sent(bucket, "blobs/x", LARGE)
    entry = bucket.head("blobs/x")
    bench.proxy.misbehave(fault, "X-Amz-Signature", method="GET", times=1)
    assert bucket.read_at(entry, 10, 150_000) == LARGE[10:150_010]
    quick, careful = bench.proxy.seen("blobs/x", method="GET")
    assert "X-Amz-Signature" in quick.target
    assert "X-Amz-Signature" not in careful.target
    bench.proxy.forget()
    assert bucket.read_at(entry, 10, 150_000) == LARGE[10:150_010]
    [quick] = bench.proxy.seen("blobs/x", method="GET")
    assert "X-Amz-Signature" in quick.target


@pytest.mark.case("S05", "S06")
def test_a_large_read_that_breaks_off_goes_on_where_it_did(bench: Bench, bucket: S3Bucket) -> None:
    etag = sent(bucket, "blobs/x", LARGE)
    bench.proxy.misbehave(cut_short(1000), "blobs/x", method="GET", times=1)
    assert bucket.read_at(bucket.head("blobs/x"), 0, 200_000) == LARGE
    gets = bench.proxy.seen("blobs/x", method="GET")
    assert [each.headers["range"] for each in gets] == ["bytes=0-199999", "bytes=1000-199999"]
    assert gets[1].headers["if-match"] == etag


def test_a_large_read_is_of_the_same_object(bench: Bench, bucket: S3Bucket) -> None:
    sent(bucket, "blobs/x", bytes(100_000))
    entry = bucket.head("blobs/x")
    sent(bench.behind(), "blobs/x", b"1" * 100_000)
    with pytest.raises(ConflictError):
        bucket.read_at(entry, 0, 100_000)
    bench.behind().delete("blobs/x")
    with pytest.raises(NotFoundError):
        bucket.read_at(entry, 0, 100_000)


def test_no_message_has_a_signed_url(bench: Bench, bucket: S3Bucket) -> None:
    sent(bucket, "blobs/x", LARGE)
    entry = bucket.head("blobs/x")
    for fault in (hang_up, status(503), s3_error(403, "SignatureDoesNotMatch", "https://x/?X-Amz-Signature=y")):
        bench.proxy.misbehave(fault, "blobs/x", method="GET")
        with pytest.raises(ImgtoolError) as caught:
            bucket.read_at(entry, 0, 100_000)
        assert "Signature=" not in str(caught.value)
        bench.proxy.behave()


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(bench: Bench, bucket: S3Bucket) -> None:
    sent(bucket, "blobs/x", bytes(10_000))
    entry = bucket.head("blobs/x")

    def replaced(exchange: Exchange) -> None:
        sent(bench.behind(), "blobs/x", b"1" * 10_000)
        cut_short(1000)(exchange)

    bench.proxy.misbehave(replaced, "blobs/x", method="GET", times=1)
    for _ in range(2):
        with pytest.raises(ConflictError):
            bucket.read_at(entry, 0, 10_000)
    bench.proxy.alter(without("if-match"), method="GET")
    with pytest.raises(ConflictError, match="was replaced"):
        bucket.read_at(entry, 0, 10_000)


def test_a_server_that_ignores_ranges_can_be_read_as_far_as_that_is_no_waste(
    bench: Bench, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(100_000)
    sent(bucket, "blobs/x", data)
    bench.proxy.alter(without("range"), method="GET")
    assert bucket.read("blobs/x", 50_000, 100).data == data[50_000:50_100]
    assert bucket.read("blobs/x", 99_990, 100).data == data[99_990:]
    monkeypatch.setattr(s3, "SKIPPED_BYTES", 10_000)
    assert bucket.read("blobs/x", 10_000, 100).data == data[10_000:10_100]
    with pytest.raises(UnsupportedError, match="ignores ranges"):
        bucket.read("blobs/x", 10_001, 100)


def test_another_range_than_was_asked_for_is_refused(bench: Bench, bucket: S3Bucket) -> None:
    sent(bucket, "blobs/x", os.urandom(10_000))

    def shift(request: Request) -> None:
        request.headers["range"] = "bytes=1-100"

    bench.proxy.alter(shift, method="GET")
    with pytest.raises(CorruptError, match="another range: bytes 1-100/10000"):
        bucket.read("blobs/x", 0, 100)


@pytest.mark.case("S07")
def test_what_another_process_wrote_is_seen_at_once(bench: Bench) -> None:
    one, two = bench.store(), ObjectStore(bench.another())
    assert list(one.references()) == []
    with pytest.raises(NotFoundError):
        one.stat(SAMPLE.target.digest)
    publish(two, "name", SAMPLE)
    assert one.stat(SAMPLE.target.digest) == SAMPLE.target.size
    assert [each.target for each in one.references()] == [SAMPLE.target]
    longer = image(b"layer", b"second", b"third and more")
    publish(two, "name", longer)
    assert one.resolve("name") == longer.target
    assert [each.target for each in one.references()] == [longer.target]
    assert assert_sound(one) == longer.blobs.keys()
    unpublish(two, "name")
    assert list(one.references()) == list(one.names()) == []


# Missing, and not to be seen


@pytest.mark.case("S08")
def test_403_is_never_missing(bench: Bench) -> None:
    """Without permission to list, S3 says 403 of what isn't there."""
    store = bench.store()
    publish(store, "name", SAMPLE)

    def hidden(exchange: Exchange) -> None:
        if exchange.status == 404:
            exchange.set_body(b"", status=403)
        exchange.answer()

    bench.proxy.misbehave(hidden, method="HEAD")
    bench.proxy.misbehave(hidden, method="GET")
    assert store.stat(SAMPLE.target.digest) == SAMPLE.target.size
    with pytest.raises(PermissionError_, match="perhaps missing"):
        store.stat(NOWHERE)
    with pytest.raises(PermissionError_, match="perhaps missing"):
        store.open(NOWHERE)
    with pytest.raises(PermissionError_, match="perhaps missing"):
        publish(store, "name", image(b"layer", b"another"))
    bench.proxy.behave()
    assert store.resolve("name") == SAMPLE.target


@pytest.mark.case("S08", "G04")
def test_a_collection_that_may_not_read_a_manifest_deletes_nothing(bench: Bench) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    put(store, b"garbage")
    plan = plan_collection(store, grace=0)
    bench.proxy.misbehave(s3_error(403, "AccessDenied"), SAMPLE.target.digest.hex, method="GET")
    with pytest.raises(PermissionError_, match="403"):
        collect(ObjectStore(bench.another()), plan)
    with pytest.raises(PermissionError_, match="403"):
        plan_collection(ObjectStore(bench.another()), grace=0)
    assert len(list(store.blobs())) == 5


def test_404_of_somebody_else_is_not_missing(bench: Bench) -> None:
    """A web page instead of S3's own word for it; where there is no body, the whole store has to be there."""
    store = bench.store()
    publish(store, "name", SAMPLE)
    bench.proxy.misbehave(status(404), reach=False)
    attempts: list[Callable[[], object]] = [
        lambda: store.resolve("name"),
        lambda: store.open(SAMPLE.target.digest),
        lambda: list(store.names()),
        lambda: ObjectStore(bench.another()).stat(SAMPLE.target.digest),
    ]
    for attempt in attempts:
        with pytest.raises(UnavailableError):
            attempt()


def test_a_bucket_that_does_not_exist_is_said(bench: Bench) -> None:
    url = bench.url.replace("s3://images", "s3://no-such-bucket")
    with pytest.raises(UnavailableError, match="no such bucket: create it"):
        ObjectStore.create(S3Bucket(url, client=bench.bucket._client))


@pytest.mark.case("S10")
def test_throttling_passes_and_is_never_missing(bench: Bench) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    bench.proxy.misbehave(status(503), SAMPLE.target.digest.hex, method="HEAD", times=ATTEMPTS - 1)
    assert store.stat(SAMPLE.target.digest) == SAMPLE.target.size
    assert [0.5 * 2**n * s3client.FIRST_PAUSE < pause for n, pause in enumerate(bench.pauses)].count(True) >= 5
    bench.proxy.behave()
    for fault in (status(503), s3_error(503, "SlowDown"), status(500), hang_up, reset()):
        bench.proxy.misbehave(fault, reach=False)
        with pytest.raises(UnavailableError):
            store.stat(SAMPLE.target.digest)
        with pytest.raises(UnavailableError):
            store.resolve("nowhere")
        bench.proxy.behave()


@pytest.mark.case("S10", "G04")
def test_a_listing_that_fails_on_its_second_page_stops_a_collection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    garbage = put(store, b"garbage")

    def one_a_page(request: Request) -> None:
        request.target = request.target.replace("list-type=2", "list-type=2&max-keys=1")

    bench.proxy.alter(one_a_page, "list-type=2")
    assert len(list(store.blobs())) == 5
    bench.proxy.misbehave(s3_error(503, "SlowDown"), "continuation-token")
    with pytest.raises(UnavailableError, match="SlowDown"):
        plan_collection(store, grace=0)
    bench.proxy.behave()
    assert store.stat(garbage) == 7


@pytest.mark.case("G04", "S10")
@pytest.mark.parametrize(
    "listing",
    [
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken></NextContinuationToken>"
        b"</ListBucketResult>",
        b"<ListBucketResult></ListBucketResult>",
        b"<html><body>Please log in</body></html>",
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>elsewhere/refs/x</Key><Size>1</Size>"
        b"<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>1</ETag></Contents></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Size>1</Size></Contents></ListBucketResult>",
        b"",
        b"<ListBucketResult><IsTruncated>fal",
    ],
)
def test_what_may_be_part_of_a_listing_is_none(bench: Bench, listing: bytes) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    put(store, b"garbage")
    bench.proxy.misbehave(answer(200, listing, Content_Type="application/xml"), "list-type=2")
    for attempt in (store.names, store.blobs, store.pinned, store.references):
        with pytest.raises(UnavailableError):
            list(attempt())
    with pytest.raises(UnavailableError):
        plan_collection(store, grace=0, force=True)
    with pytest.raises(UnavailableError):
        ObjectStore.create(S3Bucket(bench.url.replace("?", "x?"), client=bench.bucket._client))


def test_a_listing_that_goes_in_circles_ends(bench: Bench) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    publish(store, "name2", SAMPLE)

    def first_page(request: Request) -> None:
        request.target = re.sub("&?continuation-token=[^&]*", "", request.target).replace("?&", "?")
        request.target = request.target.replace("list-type=2", "list-type=2&max-keys=1")

    bench.proxy.alter(first_page, "list-type=2")
    with pytest.raises(UnavailableError, match=r"lists .* after|breaks off"):
        list(store.names())


@pytest.mark.case("S10")
def test_nobody_there_is_unavailable(bench: Bench) -> None:
    with FaultProxy(bench.server.endpoint) as proxy:
        url = bench.url.replace(bench.proxy.url, proxy.url)
    with pytest.raises(UnavailableError, match="Could not connect"):
        ObjectStore(bench.fresh(url))
    assert len(bench.pauses) == ATTEMPTS - 1


def test_a_server_that_says_nothing_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3client, "READ_TIMEOUT", 0.2)
    bucket = bench.fresh()
    sent(bucket, "blobs/x", b"payload")
    never = threading.Event()
    bench.proxy.misbehave(stall(never), "blobs/x", method="GET", times=1)
    assert bucket.read("blobs/x", 0, 10).data == b"payload", "the second attempt is answered"
    bench.proxy.misbehave(stall(never), "blobs/x", method="GET")
    with pytest.raises(UnavailableError, match=r"timed out|timeout"):
        bucket.read("blobs/x", 0, 10)


# Conditions


@pytest.mark.case("S09")
def test_a_server_that_honours_conditions_is_known(bench: Bench) -> None:
    store = bench.store()
    assert store.exclusive
    assert bench.bucket.guarantees().conditional_deletes
    assert bench.server.keys(bench.straight) == ["store.json"], "nothing is left of finding it out"


@pytest.mark.case("S09")
@pytest.mark.parametrize("mode", ["ignores", "501", "only new ones"])
def test_a_server_without_conditions_is_found_out_and_still_used(bench: Bench, mode: str) -> None:
    if mode == "501":

        def refuses(exchange: Exchange) -> None:
            if {"if-match", "if-none-match"} & exchange.headers.keys() and exchange.headers[":method"] != "GET":
                s3_error(501, "NotImplemented")(exchange)
            else:
                exchange.answer()

        bench.proxy.misbehave(refuses)
    else:
        headers = ["if-match", "if-none-match"] if mode == "ignores" else ["if-match"]
        for method in ("PUT", "DELETE"):
            bench.proxy.alter(without(*headers), method=method)
    store = bench.store()
    assert not store.exclusive
    publish(store, "name", SAMPLE)
    other = image(b"other")
    put_missing(store, other)
    with store.lease() as lease, pytest.raises(ConflictError, match="was expected"):
        lease.pin(other.blobs)
        store.set_reference("name", other.target, expected=None, lease=lease, reaches=other.blobs)
    assert store.resolve("name") == SAMPLE.target
    publish(store, "name", other)
    collect(store, plan_collection(store, grace=0))
    assert assert_sound(store) == other.blobs.keys()
    unpublish(store, "name")


@pytest.mark.case("S09")
def test_a_busy_moment_while_finding_out_is_no_answer(bench: Bench) -> None:
    store = bench.store()
    another = bench.another()
    bench.proxy.misbehave(status(503), "probe-", method="PUT", skip=1, reach=False)
    with pytest.raises(UnavailableError):
        another.guarantees()
    bench.proxy.behave()
    assert another.guarantees() == store.bucket.guarantees()


@pytest.mark.case("S09")
def test_409_is_repeated(bench: Bench, bucket: S3Bucket) -> None:
    conflict = s3_error(409, "ConditionalRequestConflict")
    bench.proxy.misbehave(conflict, "refs/x", method="PUT", times=2, reach=False)
    etag = bucket.write("refs/x", b"1", expected=ABSENT)
    assert bucket.head("refs/x").etag == etag
    assert bench.proxy.requests("refs/x", method="PUT") == 3
    with pytest.raises(ConflictError):
        bucket.write("refs/x", b"2", expected=ABSENT)


@pytest.mark.case("S09")
def test_of_two_publishers_one_wins(bench: Bench) -> None:
    store = bench.store()
    samples = [image(b"one"), image(b"two")]
    barrier = threading.Barrier(2)

    def race(sample: Sample) -> bool:
        own = ObjectStore(bench.another())
        with own.lease() as lease:
            lease.pin(sample.blobs)
            put_missing(own, sample)
            barrier.wait()
            try:
                own.set_reference("name", sample.target, expected=None, lease=lease, reaches=sample.blobs)
            except ConflictError:
                return False
            return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(race, samples))
    assert won.count(True) == 1
    assert store.resolve("name") == samples[won.index(True)].target


LOST = [hang_up, reset(), status(502), s3_error(500, "InternalError")]


@pytest.mark.case("S09")
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("expected", ["nothing", "an etag"])
def test_a_conditional_write_whose_answer_is_lost_is_done(
    bench: Bench, bucket: S3Bucket, lost: Fault, reached: bool, expected: str
) -> None:
    """The second attempt fails since the first came through: that is no conflict."""
    before = ABSENT if expected == "nothing" else bucket.write("refs/x", b"before")
    bench.proxy.misbehave(lost, "refs/x", method="PUT", times=2, reach=reached)
    etag = bucket.write("refs/x", b"after", expected=before)
    assert bucket.read("refs/x", 0, 10).data == b"after"
    assert bucket.head("refs/x").etag == etag


@pytest.mark.case("S09")
def test_a_lost_answer_is_no_success_where_another_was_faster(bench: Bench, bucket: S3Bucket) -> None:
    def overtaken(exchange: Exchange) -> None:
        bench.behind().write("refs/x", b"another's")
        hang_up(exchange)

    bench.proxy.misbehave(overtaken, "refs/x", method="PUT", times=1, reach=False)
    with pytest.raises(ConflictError):
        bucket.write("refs/x", b"ours", expected=ABSENT)
    assert bucket.read("refs/x", 0, 100).data == b"another's"


@pytest.mark.case("S09")
def test_a_write_that_never_gets_an_answer_is_found_or_unavailable(bench: Bench, bucket: S3Bucket) -> None:
    bench.proxy.misbehave(hang_up, "refs/x", method="PUT")
    etag = bucket.write("refs/x", b"came through", expected=ABSENT)
    assert bucket.head("refs/x").etag == etag
    bench.proxy.misbehave(hang_up, "refs/y", method="PUT", reach=False)
    with pytest.raises(UnavailableError):
        bucket.write("refs/y", b"never did", expected=ABSENT)


@pytest.mark.case("S09")
def test_requests_that_come_twice_change_nothing(bench: Bench) -> None:
    bench.proxy.alter(twice)
    store = bench.store()
    publish(store, "name", SAMPLE)
    publish(store, "name", image(b"another"))
    garbage = put(store, b"garbage")
    plan = plan_collection(store, grace=0)
    assert garbage in {blob.digest for blob in collect(store, plan).deleted}
    assert assert_sound(store) == image(b"another").blobs.keys()
    unpublish(store, "name")
    assert list(store.names()) == []


@pytest.mark.parametrize("lost", LOST)
def test_a_delete_whose_answer_is_lost_is_done_and_said_to_be_in_doubt(
    bench: Bench, bucket: S3Bucket, lost: Fault
) -> None:
    etag = bucket.write("refs/x", b"1")
    assert bucket.delete("refs/x", expected=etag)
    etag = bucket.write("refs/x", b"1")
    bench.proxy.misbehave(lost, "refs/x", method="DELETE", times=1)
    assert not bucket.delete("refs/x", expected=etag)
    with pytest.raises(NotFoundError):
        bucket.head("refs/x")
    bucket.write("refs/x", b"2")
    with pytest.raises(ConflictError):
        bucket.delete("refs/x", expected=etag)
    assert bucket.delete("refs/nothing")
    assert bucket.delete("refs/nothing", expected=etag)


# Credentials


@pytest.mark.case("S13")
def test_every_store_has_its_own_credentials(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("".join(f"[{name}]\naws_access_key_id=key-{name}\naws_secret_access_key=x\n" for name in "ab"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    bench.store()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    bench.proxy.forget()
    stores = [ObjectStore(S3Bucket(f"{bench.url}&profile={name}")) for name in "ab"]
    for store in (*stores, *reversed(stores)):
        with pytest.raises(NotFoundError):
            store.resolve("name")
    used = [re.search("Credential=([^/]*)/", each.headers["authorization"]) for each in bench.proxy.seen("refs/")]
    assert [each[1] for each in used if each] == ["key-a", "key-b", "key-b", "key-a"]
    assert stores[0].location != stores[1].location


def test_expired_credentials_are_looked_for_anew(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when something beside us renews the file."""
    file = tmp_path / "credentials"
    text = "[x]\naws_access_key_id=key-{}\naws_secret_access_key=x\naws_session_token=token\n"
    file.write_text(text.format("old"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    bench.store()
    store = ObjectStore(bench.fresh(f"{bench.url}&profile=x"))

    def expired(exchange: Exchange) -> None:
        if "key-old" in exchange.headers["authorization"]:
            s3_error(400, "ExpiredToken")(exchange)
        else:
            exchange.answer()

    bench.proxy.misbehave(expired)
    with pytest.raises(PermissionError_, match="have expired: renew them"):
        list(store.names())
    monkeypatch.setattr(s3client, "RENEWED_SECONDS", 0.0)
    file.write_text(text.format("new"))
    assert list(store.names()) == []
    assert put(store, b"blob") in {blob.digest for blob in store.blobs()}


def test_without_credentials_it_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermissionError_, match="boto3 finds no credentials"):
        ObjectStore(bench.fresh())


# Whatever comes


GARBAGE: list[Fault] = [
    page(),
    gzipped,
    status(204),
    status(400),
    status(418),
    answer(200),
    answer(200, b"\xff\xfe" * 100, Content_Type="application/xml"),
    answer(200, b"<a>" * 1000, Content_Type="application/xml"),
    answer(206, b"123", Content_Range="bytes 9-1/x", ETag="x", Last_Modified="Tue, 01 Jan 2030 00:00:00 GMT"),
    answer(206, b"123", Content_Range="bytes 0-2/-5", ETag="x", Last_Modified="Tue, 01 Jan 2030 00:00:00 GMT"),
    answer(200, b"123", ETag="x", Date="never", Last_Modified="Tue, 01 Jan 2030 00:00:00 GMT"),
    answer(500, b"<Error><Code>\xe2\x80\xa8two\nlines</Code></Error>", Content_Type="application/xml"),
    raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"),
    raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nx"),
    raw(b"\x00\x01\x02"),
]


@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_whatever_comes_is_one_of_our_errors_in_one_line(bench: Bench, number: int) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    bench.another().guarantees()
    bucket = bench.bucket
    bucket._guarantees = store.bucket.guarantees()
    attempts: list[Callable[[], object]] = [
        lambda: bucket.head("refs/name"),
        lambda: bucket.read("refs/name", 0, 100),
        lambda: bucket.read_at(Entry("refs/name", 1 << 20, 0, "x"), 0, 1 << 20),
        lambda: bucket.read_at(Entry("refs/name", 100, 0, "x"), 0, 100),
        lambda: bucket.write("refs/other", b"x", expected=ABSENT),
        lambda: bucket.send("blobs/x", io.BytesIO(b"x"), 1),
        lambda: list(bucket.entries("refs/")),
        lambda: bucket.delete("refs/name", expected="x"),
        lambda: bucket.copy("refs/name", "refs/copy"),
        lambda: bucket.abort_uploads(before=0, keep=(), dry_run=True),
        lambda: ObjectStore(bench.another()),
    ]
    bench.proxy.misbehave(GARBAGE[number], reach=False)
    for attempt in attempts:
        try:
            attempt()
        except ImgtoolError as error:
            message = str(error)
            assert "\n" not in message
            assert len(message) < 1000
            assert SECRET not in message
            assert ACCESS not in message


@pytest.mark.parametrize("moment", ["yesterday", "Tue, 99 Foo 99999 00:00:00 GMT", ""])
def test_a_date_that_is_none_is_unavailable(bench: Bench, moment: str) -> None:
    bench.store()
    bench.proxy.misbehave(answer(200, ETag="x", Last_Modified=moment), method="HEAD")
    with pytest.raises(UnavailableError):
        bench.bucket.head("store.json")


def test_a_redirect_to_nowhere_is_unavailable(bench: Bench) -> None:
    bench.store()
    bench.proxy.misbehave(s3_error(301, "PermanentRedirect"), reach=False)
    with pytest.raises(UnavailableError, match=r"redirects|301"):
        bench.bucket.read("store.json", 0, 10)


# What it costs


def test_opening_and_reading_cost_one_request_each(bench: Bench) -> None:
    store = bench.store()
    data = os.urandom(100_000)
    digest = put(store, data)
    bench.proxy.forget()
    reader = ObjectStore(bench.another())
    assert bench.proxy.requests() == 1
    blob = reader.open(digest)
    assert bench.proxy.requests() == 2
    assert blob.read_at(50_000, 20_000) == data[50_000:70_000]
    assert bench.proxy.requests() == 3
    assert bench.proxy.sent() < 16_384 + 20_000 + 4000
    sized = reader.open_sized(digest, len(data))
    assert sized.read_at(50_000, 20_000) == data[50_000:70_000]
    assert bench.proxy.requests() == 4
    assert bench.proxy.requests(method="PUT") == 0, "who reads needs no leave to write"


def test_publishing_what_is_there_costs_a_handful(bench: Bench) -> None:
    store = bench.store()
    sample = image(*(b"layer %d" % number for number in range(10)))
    publish(store, "first", sample)
    bench.proxy.forget()
    publish(store, "second", sample)
    looks = bench.proxy.requests("blobs/", method="HEAD")
    assert looks == len(sample.blobs)
    assert bench.proxy.requests() - looks <= 10, [f"{each.method} {each.target}" for each in bench.proxy.seen()]


def test_many_references_are_listed_by_pages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.store()
    publish(store, "name", SAMPLE)
    document = bench.behind().read("refs/name", 0, 10_000).data
    prefix = bench.straight.partition("?")[0].removeprefix("s3:/")
    connection = http.client.HTTPConnection(bench.server.endpoint.removeprefix("http://"))
    with closing(connection):
        for number in range(1200):  # moto looks at no signature, and to sign takes longer than all else
            body = document.replace(b'"name"', b'"many/%d"' % number)
            connection.request("PUT", f"{prefix}/refs/many%252F{number}", body)
            assert connection.getresponse().read() == b""
    bench.proxy.forget()
    names = list(store.names())
    assert bench.proxy.requests() == 2
    assert len(names) == 1201
    monkeypatch.setattr(store, "_resolve", lambda name: (SAMPLE.target, Entry(name, 1, 0, "x")))
    assert [each.name for each in store.references()] == names

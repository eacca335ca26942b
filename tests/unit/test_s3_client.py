"""URLs of buckets, and how parts are cut."""

from __future__ import annotations

import pytest

from layerstore.errors import LimitError, UsageError
from layerstore.store.s3client import S3Url
from layerstore.store.s3parts import MAX_PART_BYTES, MAX_PARTS, PART_BYTES, part_ranges

TIB = 1 << 40


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("s3://images", S3Url("images")),
        ("s3://images/", S3Url("images")),
        ("S3://images/a/b/", S3Url("images", "a/b")),
        ("s3://my.images/a-b_c.d", S3Url("my.images", "a-b_c.d")),
        ("s3://i/p?endpoint=http://127.0.0.1:9000", S3Url("i", "p", "http://127.0.0.1:9000")),
        ("s3://i/p?region=eu-west-1&profile=ci", S3Url("i", "p", None, "eu-west-1", "ci")),
        ("s3://i?endpoint=https%3A%2F%2Fhost%2Fs3", S3Url("i", "", "https://host/s3")),
    ],
)
def test_urls_of_buckets(url: str, parsed: S3Url) -> None:
    assert S3Url.parse(url) == parsed
    assert S3Url.parse(str(parsed)) == parsed, "its text opens the same bucket, elsewhere too"


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///key",
        "s3://key:hunter2@bucket/p",
        "s3://hunter2@bucket/p",
        "s3://host:9000/bucket",
        "s3://bucket/p#hunter2",
        "s3://bucket/a//b",
        "s3://bucket/ä",
        "s3://bucket/a\nb",
        "s3://bucket/a%2Fb",
        "s3://bucket?secret=hunter2",
        "s3://bucket?endpoint=",
        "s3://bucket?endpoint=127.0.0.1:9000",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=http://key:hunter2@host",
        "s3://bucket?endpoint=http://host?hunter2",
        "s3://bucket?endpoint=http://host:99999",
        "s3://[bucket/p",
        "http://bucket/p",
    ],
)
def test_what_is_no_url_of_a_bucket_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        S3Url.parse(url)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "size",
    [
        PART_BYTES + 1,
        PART_BYTES * MAX_PARTS - 1,
        PART_BYTES * MAX_PARTS,
        PART_BYTES * MAX_PARTS + 1,
        TIB,
        5 * TIB - 1,
        5 * TIB,
        5 * TIB + 1,
        MAX_PART_BYTES * MAX_PARTS,
    ],
)
def test_parts_of_any_size_of_object(size: int) -> None:
    """S3: 10,000 parts of 5 MiB to 5 GiB, all but the last of one size where the last is smaller."""
    parts = part_ranges(size)
    assert len(parts) <= 10_000
    assert [number for number, _, _ in parts] == list(range(1, len(parts) + 1))
    assert sum(length for _, _, length in parts) == size
    end = 0
    for _, offset, length in parts:
        assert offset == end
        end += length
    assert {length for _, _, length in parts[:-1]} == {parts[0][2]}
    assert 5 << 20 <= parts[0][2] <= 5 << 30
    assert 0 < parts[-1][2] <= parts[0][2]


def test_what_no_object_can_hold_is_refused() -> None:
    with pytest.raises(LimitError, match="more than an object"):
        part_ranges(MAX_PART_BYTES * MAX_PARTS + 1)

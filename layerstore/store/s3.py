"""Buckets of S3, and of servers that speak its protocol, by boto3.

A body that breaks off is asked for again, from where it did, of the same object (its ETag). A conditional write that
fails after an attempt whose answer was lost looks at what is there: it may be what that attempt wrote.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    printable,
)
from layerstore.store import s3parts
from layerstore.store.bucket import ABSENT, PROBE, Absent, Entry, Guarantees, Piece
from layerstore.store.clock import NANOSECONDS
from layerstore.store.s3client import Attempts, BeyondEnd, Lost, S3Client, S3Url

PARTS_AT_ONCE = 4
RESUMES = 4
"""Times that a body which broke off is asked for again."""
QUICK_BYTES = 64 << 10
"""Of a read of an object that has been looked at before: for one that is read once, to sign a URL doesn't pay."""
SKIPPED_BYTES = 8 << 20
"""Of a whole object that are read to get at a range, where a server ignores ranges."""


class S3Bucket:
    """A :class:`~layerstore.store.bucket.Bucket` of S3.

    Attributes:
        location: its URL. Credentials are never in it.
    """

    def __init__(self, url: str, *, client: S3Client | None = None) -> None:
        """The bucket at ``url``; nothing is asked yet. ``client`` is used instead of one that is made for the URL.

        Raises:
            UsageError: not such a URL, or no such profile.
        """
        parsed = S3Url.parse(url)
        self.location = str(parsed)
        self._name = parsed.bucket
        self._prefix = f"{parsed.prefix}/" if parsed.prefix else ""
        self._client = client or S3Client(parsed)
        self._probing = threading.Lock()
        self._guarantees: Guarantees | None = None

    def guarantees(self) -> Guarantees:
        known = self._guarantees
        if known is None:
            with self._probing:
                known = self._guarantees = self._guarantees or self._probe()
        return known

    def _probe(self) -> Guarantees:
        """Write and delete an object on conditions that don't hold."""
        key = PROBE + secrets.token_hex(8)
        self._ask("put_object", key, Body=b"1")
        try:
            writes = self._refuses("put_object", key, Body=b"2", IfNoneMatch="*")
            writes = writes and self._refuses("put_object", key, Body=b"3", IfMatch='"0"')
            return Guarantees(writes, writes and self._refuses("delete_object", key, IfMatch='"0"'))
        finally:
            try:
                self._ask("delete_object", key)
            except PermissionError_:
                pass  # who may only publish leaves it to collection

    def _refuses(self, operation: str, key: str, **arguments: Any) -> bool:
        try:
            self._ask(operation, key, **arguments)
        except ConflictError:
            return True
        except UnsupportedError:
            return False
        except PermissionError_:
            if operation != "delete_object":
                raise
        return False

    def close(self) -> None:
        self._client.close()

    def now(self) -> int:
        return self._client.now()

    def head(self, key: str) -> Entry:
        return self._entry(key, self._ask("head_object", key))

    def read(self, key: str, offset: int, length: int) -> Piece:
        return self._read(key, offset, length, None)

    def read_at(self, entry: Entry, offset: int, length: int) -> bytes:
        return self._read(entry.key, offset, length, entry).data

    def _read(self, key: str, offset: int, length: int, entry: Entry | None) -> Piece:
        if length <= 0:
            return Piece(b"", entry or self.head(key))
        parts: list[bytes] = []
        got, wanted = 0, length
        for _ in range(RESUMES + 1):
            start = offset + got
            bounds = f"bytes={start}-{offset + length - 1}"
            answer = None
            if entry is not None and length >= QUICK_BYTES and not parts:
                headers = {"Range": bounds, "If-Match": entry.etag}
                answer = self._client.get_quickly(self._name, self._prefix + key, headers)
            try:
                answer = answer or self._ask("get_object", key, Range=bounds, **_match(entry))
            except BeyondEnd:
                return Piece(b"".join(parts), entry or self.head(key))
            entry = self._same(entry, key, answer, start)
            wanted = min(length, max(0, entry.size - offset))
            data = self._body(answer, start, offset + wanted)
            parts.append(data)
            got += len(data)
            if got == wanted:
                return Piece(data if len(parts) == 1 else b"".join(parts), entry)
        raise CorruptError(
            f"{self._what(key)}: {got} of {wanted} bytes at {offset} came, whatever was asked: publish it again"
        )

    def _same(self, entry: Entry | None, key: str, answer: Any, start: int) -> Entry:
        """The object that a body from ``start`` on is of, which has to be the one that ``entry`` is of."""
        try:
            found = self._entry(key, answer, whole=_whole_size(answer, start, self._what(key)))
            if entry is not None and found.etag != entry.etag:
                raise ConflictError(f"{self._what(key)} was replaced")
        except BaseException:
            answer["Body"].close()
            raise
        return found

    def _body(self, answer: Any, start: int, end: int) -> bytes:
        """What came of bytes ``start`` to ``end`` before the body broke off."""
        import botocore.exceptions
        import urllib3.exceptions

        body = answer["Body"]
        parts = []
        try:
            skip = 0 if "ContentRange" in answer else start  # the range was ignored: the whole object comes
            if skip > SKIPPED_BYTES:
                raise UnsupportedError(f"the server of {self.location} ignores ranges: it can't be read lazily")
            while skip:
                skipped = len(body.read(min(skip, 1 << 20)))
                if not skipped:
                    return b""
                skip -= skipped
            left = end - start
            while left and (part := body.read(left)):
                parts.append(part)
                left -= len(part)
        except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError):
            pass
        finally:
            body.close()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, key: str, data: bytes, *, expected: str | Absent | None = None) -> str:
        condition: dict[str, Any] = {}
        if expected is not None and self.guarantees().conditional_writes:
            condition = {"IfNoneMatch": "*"} if expected is ABSENT else {"IfMatch": str(expected)}
        elif expected is not None:
            self._compare(key, expected)
        tried = Attempts()
        try:
            return self._put(key, tried, Body=data, **condition)
        except NotFoundError as error:
            failure: ImgtoolError = ConflictError(f"{self._what(key)} is gone")
            failure.__cause__ = error
        except ConflictError as error:
            failure = error
        except UnavailableError as error:
            if not tried.lost:
                raise
            failure = error
        etag = self._written(key, data)
        if etag is None:
            raise failure
        return etag

    def _written(self, key: str, data: bytes) -> str | None:
        """The etag of what is there, if it is that.

        The answer to an attempt before may have been lost, and not what it was the answer to; or somebody on the way
        has sent the request twice.
        """
        try:
            piece = self.read(key, 0, len(data) + 1)
        except (NotFoundError, UnavailableError):
            return None
        return piece.entry.etag if piece.data == data else None

    def _compare(self, key: str, expected: str | Absent) -> None:
        """What a service without conditions is worth: another may write between this look and our write."""
        try:
            found: str | Absent = self.head(key).etag
        except NotFoundError:
            found = ABSENT
        if found != expected:
            raise ConflictError(f"{self._what(key)} is not what was expected")

    def send(self, key: str, file: BinaryIO, size: int) -> str:
        if size > s3parts.PART_BYTES:
            return self._send_parts(key, file, size)
        data = file.read(size)
        sum = hashlib.md5(data, usedforsecurity=False)
        etag = self._put(key, Attempts(), Body=data, ContentMD5=_base64(sum.digest()))
        if etag.strip('"') == sum.hexdigest():
            return etag  # it says itself that it has these bytes
        return self._arrived(key, size).etag

    def _arrived(self, key: str, size: int) -> Entry:
        """The last look at what has been sent."""
        entry = self.head(key)
        if entry.size != size:
            self.delete(key, expected=entry.etag)
            raise CorruptError(
                f"{self._what(key)} arrived wrong: publish it again", expected=f"{size} bytes", actual=f"{entry.size}"
            )
        return entry

    def _send_parts(self, key: str, file: BinaryIO, size: int) -> str:
        descriptor = file.fileno()

        def part(upload: str, number: int, offset: int, length: int) -> str:
            body = s3parts.Slice(descriptor, offset, length)
            sum = hashlib.md5(usedforsecurity=False)
            while piece := body.read(1 << 20):
                sum.update(piece)
            arguments: dict[str, Any] = {"PartNumber": number, "Body": body, "ContentMD5": _base64(sum.digest())}
            return self._etag(self._ask("upload_part", key, UploadId=upload, **arguments), key)

        self._in_parts(key, size, part)
        return self._arrived(key, size).etag

    def _in_parts(self, key: str, size: int, part: Callable[[str, int, int, int], str]) -> None:
        """A multipart upload, from its parts on."""
        upload = str(self._ask("create_multipart_upload", key)["UploadId"])
        tried = Attempts()
        etag = None
        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="s3-part") as pool:
                futures: list[Future[str]] = []
                try:
                    futures += [pool.submit(part, upload, *each) for each in s3parts.part_ranges(size)]
                    etags = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            etag = s3parts.joint_etag(etags)
            self._check_parts(key, upload, size)
            parts = [{"PartNumber": number, "ETag": each} for number, each in enumerate(etags, 1)]
            self._ask("complete_multipart_upload", key, tried=tried, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException as error:
            # The answer to an attempt before may have been lost: then the upload is gone since it is complete.
            if tried.lost and isinstance(error, (NotFoundError, Lost)) and self._is_complete(key, etag):
                return
            try:
                self._ask("abort_multipart_upload", key, UploadId=upload)
            except ImgtoolError:
                pass  # collection gives up what is left
            if isinstance(error, NotFoundError):
                raise UnavailableError(f"{self._what(key)}: the upload was given up meanwhile: repeat") from error
            raise

    def _check_parts(self, key: str, upload: str, size: int) -> None:
        """Before they are joined: a part that was forgotten would be missing from the object, and nobody would say."""
        found = [(int(part["PartNumber"]), int(part["Size"])) for part in self._parts(key, upload)]
        if found != [(number, length) for number, _, length in s3parts.part_ranges(size)]:
            raise UnavailableError(
                f"{self._what(key)}: the server has lost parts of it: {len(found)} are there, "
                f"{sum(length for _, length in found)} of {size} bytes: repeat"
            )

    def _is_complete(self, key: str, etag: str | None) -> bool:
        try:
            return etag is not None and self.head(key).etag.strip('"') == etag
        except ImgtoolError:
            return False

    def entries(self, prefix: str) -> Iterator[Entry]:
        whole = self._prefix + prefix
        what = f"list {self.location}/{printable(prefix)}"
        last = ""
        for page in self._pages("list_objects_v2", what, whole, {"ContinuationToken": "NextContinuationToken"}):
            for item in page.get("Contents") or ():
                key = self._told(item, "Key", what)
                if not key.startswith(whole) or (last and key <= last):
                    raise UnavailableError(f"{what}: the server lists {printable(key)!r} after {printable(last)!r}")
                last = key
                yield Entry(
                    key.removeprefix(self._prefix),
                    int(self._told(item, "Size", what)),
                    _nanoseconds(self._told(item, "LastModified", what)),
                    str(self._told(item, "ETag", what)),
                )

    def delete(self, key: str, *, expected: str | None = None) -> bool:
        condition: dict[str, Any] = {}
        if expected is not None and self.guarantees().conditional_deletes:
            condition = {"IfMatch": expected}
        elif expected is not None:
            try:
                self._compare(key, expected)
            except ConflictError:
                if self._is_gone(key):
                    return True
                raise
        tried = Attempts()
        try:
            self._ask("delete_object", key, tried=tried, **condition)
        except NotFoundError:
            pass
        except ConflictError:
            if not self._is_gone(key):  # as some say of what isn't there
                raise
        return not tried.lost

    def _is_gone(self, key: str) -> bool:
        try:
            self.head(key)
        except NotFoundError:
            return True
        return False

    def copy(self, key: str, target: str) -> None:
        source = {"Bucket": self._name, "Key": self._prefix + key}
        entry = self.head(key)
        if entry.size <= s3parts.MAX_PART_BYTES:
            self._ask("copy_object", target, CopySource=source)
            return

        def part(upload: str, number: int, offset: int, length: int) -> str:
            bounds = f"bytes={offset}-{offset + length - 1}"
            arguments: dict[str, Any] = {"PartNumber": number, "CopySource": source, "CopySourceRange": bounds}
            answer = self._ask("upload_part_copy", target, UploadId=upload, **arguments, CopySourceIfMatch=entry.etag)
            return self._etag(answer.get("CopyPartResult", {}), target)

        self._in_parts(target, entry.size, part)
        self._arrived(target, entry.size)

    def abort_uploads(self, *, before: int, keep: Container[str], dry_run: bool) -> int:
        what = f"list uploads to {self.location}"
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        freed = 0
        for page in self._pages("list_multipart_uploads", what, self._prefix, markers):
            for upload in page.get("Uploads") or ():
                key, name = str(self._told(upload, "Key", what)), self._told(upload, "UploadId", what)
                if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in keep:
                    begun = _nanoseconds(self._told(upload, "Initiated", what))
                    freed += self._abort(key.removeprefix(self._prefix), str(name), begun, before, dry_run)
        return freed

    def _abort(self, key: str, upload: str, begun: int, before: int, dry_run: bool) -> int:
        try:
            parts = list(self._parts(key, upload))
            if max([begun, *(_nanoseconds(part["LastModified"]) for part in parts)]) > before:
                return 0
            if not dry_run:
                self._ask("abort_multipart_upload", key, UploadId=upload)
        except NotFoundError:
            return 0  # it has been completed
        return sum(int(part["Size"]) for part in parts)

    # --- requests

    def _ask(self, operation: str, key: str, *, tried: Attempts | None = None, **arguments: Any) -> Any:
        """One request about one object."""
        names = {"Bucket": self._name, "Key": self._prefix + key}
        return self._client.ask(self._what(key), operation, tried, **names, **arguments)

    def _put(self, key: str, tried: Attempts, **arguments: Any) -> str:
        return self._etag(self._ask("put_object", key, tried=tried, **arguments), key)

    def _pages(self, operation: str, what: str, prefix: str, markers: dict[str, str]) -> Iterator[Any]:
        """All pages of a listing. One that could be the page of something else than S3 is no empty listing."""
        arguments: dict[str, Any] = {}
        while True:
            page = self._client.ask(what, operation, Bucket=self._name, Prefix=prefix, **arguments)
            if "IsTruncated" not in page:
                raise UnavailableError(f"{what}: the answer is no listing: is that a server of S3?")
            yield page
            if not page["IsTruncated"]:
                return
            following = {name: page.get(told) for name, told in markers.items()}
            if not any(following.values()) or following == arguments:
                raise UnavailableError(f"{what}: the listing breaks off")
            arguments = {name: marker for name, marker in following.items() if marker}

    def _parts(self, key: str, upload: str) -> Iterator[Any]:
        arguments: dict[str, Any] = {}
        while True:
            page = self._ask("list_parts", key, UploadId=upload, **arguments)
            yield from page.get("Parts") or ()
            following = page.get("NextPartNumberMarker")
            if not page.get("IsTruncated") or not following or following == arguments.get("PartNumberMarker"):
                return
            arguments = {"PartNumberMarker": following}

    def _entry(self, key: str, answer: Any, *, whole: int | None = None) -> Entry:
        what = self._what(key)
        size = int(self._told(answer, "ContentLength", what)) if whole is None else whole
        return Entry(key, size, _nanoseconds(self._told(answer, "LastModified", what)), self._etag(answer, key))

    def _etag(self, answer: Any, key: str) -> str:
        return str(self._told(answer, "ETag", self._what(key)))

    def _told(self, answer: Any, name: str, what: str) -> Any:
        value = answer.get(name)
        if value is None:
            raise UnavailableError(f"{what}: the answer has no {name}: is that a server of S3?")
        return value

    def _what(self, key: str) -> str:
        return f"{self.location}: {printable(key)}"


def _match(entry: Entry | None) -> dict[str, Any]:
    return {} if entry is None else {"IfMatch": entry.etag}


def _whole_size(answer: Any, start: int, what: str) -> int | None:
    """Of the object that a range is of, which has to begin where it was asked to; None where all of it comes."""
    said = answer.get("ContentRange")
    if said is None:
        return None
    try:
        unit, _, rest = str(said).partition(" ")
        place, _, whole = rest.partition("/")
        if unit != "bytes" or int(place.partition("-")[0]) != start:
            raise ValueError(said)
        return int(whole)
    except ValueError as error:
        raise CorruptError(f"{what}: the answer is of another range: {printable(str(said))[:100]}") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _nanoseconds(moment: Any) -> int:
    return int(moment.timestamp()) * NANOSECONDS

"""Requests to S3 and to servers that speak its protocol: where they go, which are repeated, what their errors mean.

A URL is ``s3://BUCKET[/PREFIX]``; in its query ``endpoint`` names a server other than AWS, and ``region`` and
``profile`` what boto3 otherwise takes from its own configuration, as it does credentials.

Repeating is done here and not by botocore, since what a repeated conditional write means depends on whether an attempt
before may have come through.
"""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    UsageError,
    printable,
)
from layerstore.store.clock import NANOSECONDS, elapsed

ATTEMPTS = 6
"""Of each request."""
LONGEST = 90.0
"""Seconds after which no further attempt begins."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between attempts; each is twice the one before, and less by chance."""
CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 20.0
CONNECTIONS = 64
RENEWED_SECONDS = 5.0
"""Between attempts to find fresh credentials where those there were have expired."""

SIGNED_SECONDS = 600
"""For which a signed URL is used; it holds for twice as long."""
SIGNED_URLS = 1024

_MISSING = frozenset({"NoSuchKey", "NoSuchUpload"})
_MISSING_HEAD = frozenset({"NotFound", "404"})
"""All that is said of it where an answer has no body. Elsewhere a bare 404 is some other server's page."""
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_LATER = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException"}
    | {"RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict"}
    | {"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}  # damaged on its way
)
_UNKNOWN = frozenset({"NotImplemented", "MethodNotAllowed", "UnsupportedOperation"})
_OPTIONS = ("endpoint", "region", "profile")


@dataclass(frozen=True, slots=True)
class S3Url:
    """What a URL says. ``prefix`` has no slash at its ends."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Url:
        """Raises UsageError. It doesn't repeat the URL, which may have what doesn't belong there."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError("that is not s3://BUCKET[/PREFIX][?endpoint=URL]") from error
        prefix = parts.path.strip("/")
        if (
            not url.isprintable()
            or parts.scheme != "s3"
            or not parts.hostname
            or "@" in parts.netloc
            or port
            or parts.fragment
        ):
            raise UsageError(
                "a bucket's URL is s3://BUCKET[/PREFIX][?endpoint=URL]: another server than AWS is its endpoint, and "
                "credentials don't belong in it"
            )
        if "//" in prefix or not prefix.isascii() or not prefix.isprintable() or "%" in prefix:
            raise UsageError(f"{printable(prefix)!r}: a prefix has printable ASCII but %, and no empty part")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown or "" in options.values():
            raise UsageError(f"the query of a bucket's URL may have {', '.join(_OPTIONS)}, each with a value")
        if "endpoint" in options:
            _check_endpoint(options["endpoint"])
        return cls(parts.netloc, prefix, **options)

    def __str__(self) -> str:
        options = [(name, getattr(self, name)) for name in _OPTIONS if getattr(self, name) is not None]
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options)
        return f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "") + (f"?{query}" if query else "")


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or not endpoint.isascii() or not endpoint.isprintable():
        raise UsageError("an endpoint is http://HOST[:PORT] or https://HOST[:PORT]; credentials don't belong in it")


class Lost(UnavailableError):
    """No answer that tells whether the request was done."""


class BeyondEnd(UnavailableError):
    """416: the object ends before the range. It doesn't leave the bucket."""


@dataclass
class Attempts:
    """What there was of a request that was repeated.

    Attributes:
        lost: an attempt wasn't answered, or not so that it tells whether it was done.
    """

    lost: bool = False


class S3Client:
    """One server, with credentials of its own; any thread may call.

    Attributes:
        where: for messages.
    """

    def __init__(self, url: S3Url, *, pause: Callable[[float], None] = time.sleep) -> None:
        """Ask nothing yet. ``pause`` is called between attempts, with seconds.

        Raises:
            UsageError: no such profile, or not an endpoint.
        """
        self._url = url
        self._pause = pause
        self._lock = threading.Lock()
        self._client = _connect(url)
        self._renewed = float("-inf")
        self._clock: tuple[int, float] | None = None
        self._urls: dict[tuple[str, str], tuple[Any, float, str]] = {}

    def now(self) -> int:
        """Nanoseconds since 1970 by the server's clock, by its last answer; whatever this machine's is set to."""
        known = self._clock
        if known is None:
            return time.time_ns()
        return known[0] + int((elapsed() - known[1]) * NANOSECONDS)

    def close(self) -> None:
        """Close idle connections. It stays usable."""
        self._client.close()

    def ask(self, what: str, operation: str, /, tried: Attempts | None = None, **arguments: Any) -> Any:
        """The answer to a request, repeated as long as that can help.

        Args:
            what: begins messages.
            operation: boto3's method.
            tried: told what there was, even if it fails.
            arguments: of the method.

        Raises:
            ConflictError: 412. After an attempt that was lost, that one may be why.
            BeyondEnd: 416.
            NotFoundError, PermissionError_, NoSpaceError, UnsupportedError, UsageError, UnavailableError.
        """
        tried = tried or Attempts()
        begun = elapsed()
        pause = FIRST_PAUSE
        for left in reversed(range(ATTEMPTS)):
            client = self._client
            if hasattr(arguments.get("Body"), "seek"):
                arguments["Body"].seek(0)  # the attempt before has read it
            try:
                return self._once(client, what, operation, arguments)
            except _Again as again:
                tried.lost = tried.lost or again.lost
                renewed = again.expired and self._renew(client)
                if (again.expired and not renewed) or not left or elapsed() - begun > LONGEST:
                    raise again.error from again.__cause__
                if not renewed:
                    self._pause(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last attempt returns or raises")

    def get_quickly(self, bucket: str, key: str, headers: dict[str, str]) -> dict[str, Any] | None:
        """As ``get_object`` answers, with a tenth of the work; None where that isn't at once what was asked for.

        The URL is signed once, not each request (boto3 takes a millisecond of processor time for one). Whatever fails
        here is for :meth:`ask` to repeat, and to say what is wrong.
        """
        import botocore.awsrequest
        import botocore.exceptions
        import urllib3.exceptions

        client = self._client
        try:
            url = self._signed(client, bucket, key)
            request = botocore.awsrequest.AWSRequest("GET", url, headers, stream_output=True)
            got = client._endpoint.http_session.send(request.prepare())  # with the certificates and proxies of boto3
        except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError):
            return None
        head = {name.lower(): value for name, value in got.headers.items()}
        self._set_clock({"ResponseMetadata": {"HTTPHeaders": head}})
        answer: dict[str, Any] = {"Body": got.raw}
        try:
            if got.status_code == 206:
                answer["ContentRange"] = head["content-range"]
            answer["ContentLength"] = int(head["content-length"])
            answer["ETag"] = head["etag"]
            answer["LastModified"] = email.utils.parsedate_to_datetime(head["last-modified"])
        except (KeyError, ValueError, TypeError, OverflowError):
            answer.clear()
        if not answer or got.status_code not in (200, 206):
            self._urls.clear()
            got.raw.close()
            return None
        return answer

    def _signed(self, client: Any, bucket: str, key: str) -> str:
        found = self._urls.get((bucket, key))
        if found is None or found[0] is not client or found[1] < elapsed():
            named = {"Bucket": bucket, "Key": key}
            url = client.generate_presigned_url("get_object", named, ExpiresIn=2 * SIGNED_SECONDS)
            if len(self._urls) >= SIGNED_URLS:
                self._urls.clear()
            found = self._urls[bucket, key] = (client, elapsed() + SIGNED_SECONDS, url)
        return found[2]

    def _once(self, client: Any, what: str, operation: str, arguments: dict[str, Any]) -> Any:
        import botocore.exceptions as failures

        try:
            answer = getattr(client, operation)(**arguments)
        except failures.ClientError as error:
            self._set_clock(error.response)
            _raise_answer(error, what, bare=operation.startswith("head_"))
        except failures.CredentialRetrievalError as error:
            raise _Again(UnavailableError(f"{what}: {_one_line(error)}"), lost=False) from error
        except (failures.NoCredentialsError, failures.PartialCredentialsError) as error:
            raise PermissionError_(
                f"{what}: boto3 finds no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            ) from error
        except (failures.EndpointConnectionError, failures.ConnectTimeoutError, failures.ProxyConnectionError) as error:
            raise _Again(UnavailableError(f"{what}: {_one_line(error)}"), lost=False) from error
        except failures.SSLError as error:
            raise UnavailableError(f"{what}: {_one_line(error)}") from error
        except failures.ParamValidationError as error:
            raise UsageError(f"{what}: {_one_line(error)}") from error
        except RecursionError as error:
            raise UnavailableError(f"{what}: the server redirects in circles: check region and endpoint") from error
        except Exception as error:  # botocore's, urllib3's, and what its parsers make of an answer that is none
            raise _Again(Lost(f"{what}: {_one_line(error)}"), lost=True) from error
        self._set_clock(answer)
        return answer

    def _renew(self, expired: Any) -> bool:
        """Look for credentials anew, as what rotates them may have written others; whether to try again."""
        with self._lock:
            if self._client is not expired:
                return True  # another thread has
            if elapsed() - self._renewed < RENEWED_SECONDS:
                return False
            self._renewed = elapsed()
            self._client = _connect(self._url)
            return True

    def _set_clock(self, answer: Any) -> None:
        try:
            text = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
            stamp = email.utils.parsedate_to_datetime(text).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        at = elapsed()
        known = self._clock
        if known is not None:
            now = known[0] + int((at - known[1]) * NANOSECONDS)
            if 0 <= now - int(stamp * NANOSECONDS) <= 2 * NANOSECONDS:
                return  # dates are rounded down and late: the latest that one has told is nearest to the truth
        self._clock = int(stamp * NANOSECONDS), at


class _Again(Exception):
    """The request may be repeated."""

    def __init__(self, error: ImgtoolError, *, lost: bool, expired: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.lost = lost
        self.expired = expired


def _connect(url: S3Url) -> Any:
    client = _make_client(url, foreign=url.endpoint is not None)
    if url.endpoint is None and not _is_aws(client.meta.endpoint_url):
        return _make_client(url, foreign=True)  # its endpoint is in boto3's configuration
    return client


def _make_client(url: S3Url, *, foreign: bool) -> Any:
    import boto3  # half a second, which only those pay who use it
    import botocore.exceptions
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": 1},
        signature_version="s3v4",  # of signed URLs, too
        # Other servers refuse, or store as content, the checksum trailers that botocore sends since 1.36.
        request_checksum_calculation="when_required" if foreign else "when_supported",
        # Ranges have none, and everything that is read is verified by its own digest.
        response_checksum_validation="when_required",
        parameter_validation=False,
        s3={"addressing_style": "path"} if foreign else {},
    )
    try:
        # A session of its own, and so credentials of its own.
        session = boto3.session.Session(profile_name=url.profile)
        region = url.region or session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=url.endpoint, region_name=region, config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(f"{url}: {_one_line(error)}") from error


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _raise_answer(error: Any, what: str, *, bare: bool) -> None:
    """``bare``: the answer has no body."""
    response = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = f"{what}: {printable(code)[:100]} ({status})"
    message = f"{said}: {printable(str(response.get('Error', {}).get('Message', '')))[:200]}"
    if code in _EXPIRED:
        raise _Again(
            PermissionError_(f"{said}: the credentials have expired: renew them"), lost=False, expired=True
        ) from error
    if code == "NoSuchBucket":
        raise UnavailableError(f"{said}: there is no such bucket: create it, or check its name") from error
    if code in _MISSING or (bare and code in _MISSING_HEAD):
        raise NotFoundError(f"{what} doesn't exist") from error
    if status == 416:
        raise BeyondEnd(said) from error
    if status == 412:
        raise ConflictError(f"{said}: it is not what was expected") from error
    if code in _LATER or status in (409, 429):
        raise _Again(UnavailableError(message), lost=False) from error
    if code in _FULL or status == 507:
        raise NoSpaceError(f"{said}: the service has no space left for it") from error
    if code in _UNKNOWN or status == 501:
        raise UnsupportedError(f"{message}: the server doesn't do that") from error
    if status in (401, 403):
        raise PermissionError_(
            f"{said}: not permitted, or, without permission to list the bucket, perhaps missing: check the credentials"
        ) from error
    if status >= 500 or status < 400:
        raise _Again(Lost(message), lost=True) from error
    raise UnavailableError(message) from error


def _one_line(error: Exception) -> str:
    """As boto3 puts it, without what a URL asks for."""
    words = (word.partition("?")[0] + '"' if "?" in word else word for word in str(error).split())
    return printable(" ".join(words))[:300]

"""GET requests whose answers are believed only as far as they can be checked, each failure with its class.

=============================================================================  ======================
the server                                                                     error
=============================================================================  ======================
404, 410                                                                       ``NotFoundError``
401, 403, 407                                                                  ``PermissionError_``
another status that is no success; too many redirects, or to where none goes   ``UnavailableError``
no connection, no answer in time, a reset, a body that is cut short            ``UnavailableError``
a web page (text/html), as proxies and portals answer instead of the server    ``UnavailableError``
no length where one is needed, a range ignored where that costs too much       ``UnavailableError``
a Content-Encoding, another range or another total size than it has to be      ``CorruptError``
=============================================================================  ======================

What comes with the right length and type may still be other bytes: callers check digests. Messages name neither
credentials nor where a redirect led, which may be a signed URL.
"""

from __future__ import annotations

import http
import http.client
import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from urllib.parse import unquote_to_bytes, urljoin

from urllib3 import BaseHTTPResponse, PoolManager, Timeout
from urllib3 import exceptions as failures
from urllib3.util import Url, parse_url

from layerstore.errors import (
    CorruptError,
    ImgtoolError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UsageError,
    printable,
)
from layerstore.store.httpsocket import POOLS, Terms, TooLongError, terms
from layerstore.version import VERSION

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 10.0
SLOWEST = 128 << 10
"""Bytes a second below which an answer is given up, after the read timeout."""

CONNECTIONS = 32
"""Kept open to one server: more than a fetcher has threads."""

WHOLE_LIMIT = 8 << 20
"""Where a range is ignored and everything sent, so many bytes from the start are read; a later range is given up."""

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADER_BYTES = 256 << 10
_DISCARD = 16 << 10
"""A rest of this size is read and thrown away to keep the connection; of a longer one it is closed."""

_STEP = 16 << 20
"""Bytes that are asked for at a time: memory is taken for them before they come."""

_LENGTH = re.compile("[0-9]{1,19}")
_CONTENT_RANGE = re.compile("bytes (?:([0-9]{1,19})-([0-9]{1,19})|[*])/([0-9]{1,19})")
_PAGES = frozenset({"text/html", "application/xhtml+xml"})
_RECONNECT_PAUSES = (0.0, 0.2)
"""Seconds before a lost connection is made again, for documents; for all else once and at once."""


class WebPageError(UnavailableError):
    """A web page came instead of what was asked for."""


class _LostError(UnavailableError):
    """The connection was refused, or ended before an answer began: a new one may do."""


class WebServer:
    """What is below one URL. For any number of threads; :meth:`close` closes idle connections.

    Attributes:
        location: the URL without credentials and final slash.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = CONNECT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: ``http://`` or ``https://``, with ``user:password@`` before the host for basic authentication.
            connect_timeout: seconds until a connection stands; for each address of the host.
            read_timeout: seconds until a whole answer is there, and a second more for each ``SLOWEST`` bytes.

        Raises:
            UsageError: no such URL, or one with a query or fragment. The message doesn't repeat it.
        """
        parsed = _parse(url)
        if parsed is None or parsed.query is not None or parsed.fragment is not None:
            raise UsageError("not the URL of a store: it is http:// or https://, a host, and a path without ? and #")
        self._base = Url(parsed.scheme, None, parsed.host, parsed.port, (parsed.path or "").rstrip("/")).url
        self._origin = _origin(parsed)
        self.location = printable(self._base)
        self._headers = {"User-Agent": f"imgtool/{VERSION}", "Accept-Encoding": "identity"}
        self._own_headers = {**self._headers, **_authorization(parsed.auth)}
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._pools = PoolManager(num_pools=4, maxsize=CONNECTIONS)
        self._pools.pool_classes_by_scheme = POOLS

    def close(self) -> None:
        """Close idle connections; later requests make new ones."""
        for key in self._pools.pools.keys():  # noqa: SIM118 - it can't be iterated: threads use it
            pool = self._pools.pools.get(key)
            if pool is not None:
                pool.close()
        self._pools.clear()

    def read_document(self, path: str, what: str, *, limit: int, headers: Mapping[str, str]) -> bytes:
        """All of something small, at most ``limit`` bytes. Lost connections are made again, twice."""
        with self._get(path, what, headers, limit, pauses=_RECONNECT_PAUSES) as answer:
            if answer.status != 200:
                raise answer.unexpected()
            data = answer.read_all(limit)
        if len(data) > limit:
            raise CorruptError(f"{what} has more than {limit} bytes")
        return data

    def read_start(self, path: str, what: str, length: int) -> tuple[int, bytes]:
        """The size of something, and its first bytes: ``length``, or fewer if it is shorter."""
        with self._get(path, what, {"Range": f"bytes=0-{length - 1}"}, length) as answer:
            if answer.status == 206:
                first, last, total = answer.content_range()
                if first != 0 or last != min(length, total) - 1:
                    raise answer.another_range(f"bytes 0-{min(length, total) - 1}")
                return total, answer.read_whole(last + 1)
            if answer.status == 416:
                if answer.content_range() != (None, None, 0):
                    raise answer.unexpected()
                return 0, b""
            size = answer.whole_length()
            return size, answer.read(min(length, size))

    def read_range(self, path: str, what: str, offset: int, length: int, size: int) -> bytes:
        """``length`` bytes from ``offset`` of something of ``size`` bytes, by one request."""
        last = offset + length - 1
        with self._get(path, what, {"Range": f"bytes={offset}-{last}"}, length) as answer:
            if answer.status == 206:
                found = answer.content_range()
                if found[2] != size:
                    raise CorruptError(f"{what} has another size now", expected=str(size), actual=str(found[2]))
                if found != (offset, last, size):
                    raise answer.another_range(f"bytes {offset}-{last}")
                return answer.read_whole(length)
            if answer.status == 416:
                raise CorruptError(f"{what} has no bytes {offset}-{last} any more, of {size}: publish it again")
            if answer.whole_length() != size:
                raise CorruptError(f"{what} has another size now", expected=str(size), actual=str(answer.length))
            if last >= WHOLE_LIMIT:
                raise UnavailableError(
                    f"{what}: the server ignores ranges, and bytes {offset}-{last} are too far into it: serve the "
                    "store by one that answers Range requests"
                )
            answer.skip(offset)
            return answer.read(length)

    @contextmanager
    def _get(
        self, path: str, what: str, headers: Mapping[str, str], expected: int, *, pauses: tuple[float, ...] = (0.0,)
    ) -> Iterator[_Answer]:
        """The answer to one GET, redirects followed: one of 200, 206 and 416. ``expected`` is the bytes of its body."""
        until = time.monotonic() + self._read_timeout + expected / SLOWEST
        agreed = Terms(until, _HEADER_BYTES + max(2 * expected, WHOLE_LIMIT))
        url, common = f"{self._base}/{path}", self._own_headers
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._ask(url, {**common, **headers}, what, agreed, pauses)
            with _Answer(response, what) as answer:
                if answer.status not in _REDIRECTS:
                    answer.check()
                    yield answer
                    return
                target = _redirected(url, response.headers.get("Location"), what)
            url, common = target.url, self._own_headers if _origin(target) == self._origin else self._headers
        raise UnavailableError(f"{what}: the server redirects more than {_MAX_REDIRECTS} times")

    def _ask(
        self, url: str, headers: Mapping[str, str], what: str, agreed: Terms, pauses: tuple[float, ...]
    ) -> BaseHTTPResponse:
        for pause in pauses:
            try:
                return self._ask_once(url, headers, what, agreed)
            except _LostError:
                time.sleep(pause)
        return self._ask_once(url, headers, what, agreed)

    def _ask_once(self, url: str, headers: Mapping[str, str], what: str, agreed: Terms) -> BaseHTTPResponse:
        seconds = max(0.001, agreed.until - time.monotonic())
        timeout = Timeout(connect=min(self._connect_timeout, seconds), read=seconds)
        with terms(agreed), _failures(what, lost=True):
            return self._pools.urlopen(
                "GET",
                url,
                headers=headers,
                redirect=False,
                retries=False,
                timeout=timeout,
                preload_content=False,
                decode_content=False,
            )


class _Answer:
    """One answer, its body unread. At its end the connection is kept if that is cheap, else closed."""

    def __init__(self, response: BaseHTTPResponse, what: str) -> None:
        self._response = response
        self._what = what
        self.status = response.status
        self.length: int | None = None

    def check(self) -> None:
        """Refuse what is neither 200, 206 nor 416, and bodies in a form that can't be used."""
        if self.status not in (200, 206, 416):
            raise self.unexpected()
        headers = self._response.headers
        if self.status != 416:
            media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type in _PAGES:
                raise WebPageError(
                    f"{self._what}: the answer is a web page ({media_type}): is a proxy or a login page in between?"
                )
            encoding = headers.get("Content-Encoding", "").strip().lower()
            if encoding not in ("", "identity"):
                raise CorruptError(
                    f"{self._what} was sent with Content-Encoding {printable(encoding[:40])!r}, though only identity "
                    "was asked for: switch that off in the server or proxy"
                )
        transfer, length = headers.get("Transfer-Encoding"), headers.get("Content-Length")
        if transfer is not None and (transfer.lower() != "chunked" or length is not None):
            raise UnavailableError(f"{self._what}: the answer has no clear end: Transfer-Encoding with other framing")
        if length is not None:
            if not _LENGTH.fullmatch(length):
                raise UnavailableError(f"{self._what}: the answer has a bad Content-Length")
            self.length = int(length)

    def content_range(self) -> tuple[int | None, int | None, int]:
        """First and last byte (both None in an answer that none could be sent), and the whole size."""
        text = self._response.headers.get("Content-Range")
        if text is None:
            raise UnavailableError(f"{self._what}: the answer doesn't say which range it is: try again")
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None:
            raise self.another_range("a Content-Range")
        first, last, total = (None if group is None else int(group) for group in match.groups())
        assert total is not None
        return first, last, total

    def whole_length(self) -> int:
        """Bytes of an answer that has to say it."""
        if self.length is None:
            raise UnavailableError(f"{self._what}: the server doesn't say its length: serve it as a static file")
        return self.length

    def read(self, length: int) -> bytes:
        """Exactly ``length`` bytes."""
        parts = []
        while length:
            with _failures(self._what):
                part = self._response.read(min(length, _STEP))
            if not part:
                raise self._cut_short()
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_whole(self, length: int) -> bytes:
        """Exactly ``length`` bytes, which have to be all."""
        if self.length not in (None, length):
            raise CorruptError(self._what, expected=f"an answer of {length} bytes", actual=f"{self.length}")
        data = self.read(length)
        with _failures(self._what):
            more = self._response.read(1)
        if more:
            raise CorruptError(self._what, expected=f"an answer of {length} bytes", actual="more")
        return data

    def read_all(self, limit: int) -> bytes:
        """All there is; if that is more than ``limit``, one byte more than it."""
        parts = []
        left = limit + 1
        while left:
            with _failures(self._what):
                part = self._response.read(left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
        if self.length is not None and len(data) != min(self.length, limit + 1):
            raise self._cut_short()
        return data

    def skip(self, length: int) -> None:
        while length:
            length -= len(self.read(min(length, _DISCARD)))

    def unexpected(self) -> ImgtoolError:
        """The error that this status stands for."""
        known = {status.value: f" {status.phrase}" for status in http.HTTPStatus}
        text = f"{self._what}: the server answered {self.status}{known.get(self.status, '')}"
        if self.status in (404, 410):
            return NotFoundError(text)
        if self.status in (401, 403, 407):
            return PermissionError_(f"{text}: check the credentials, and that it is there and may be read")
        return UnavailableError(f"{text}: try again, or look into the server's log")

    def another_range(self, wanted: str) -> CorruptError:
        actual = self._response.headers.get("Content-Range", "none")
        return CorruptError(
            f"{self._what}: the server sent another range", expected=wanted, actual=printable(actual[:80])
        )

    def _cut_short(self) -> UnavailableError:
        return UnavailableError(f"{self._what}: the answer was cut short: try again")

    def __enter__(self) -> _Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            length = self._response.headers.get("Content-Length", "")
            if not self._response.closed and _LENGTH.fullmatch(length) and int(length) <= _DISCARD:
                with _failures(self._what):
                    self._response.read(_DISCARD)
        except ImgtoolError:
            pass  # what counts of this answer has been read or refused
        finally:
            self._response.close()


@contextmanager
def _failures(what: str, *, lost: bool = False) -> Iterator[None]:
    """Map the errors of urllib3 and what is below it; ``lost`` tells connections apart that may be made again.

    Raises:
        UnavailableError: in all cases.
    """
    try:
        yield
    except (failures.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
        unanswered = isinstance(error, failures.ProtocolError | failures.NewConnectionError)
        kind = _LostError if lost and unanswered else UnavailableError
        raise kind(f"{what}: {reason(error)}: try again, or check the server") from error


def reason(error: Exception) -> str:
    """Why, in words of ours: the libraries' own contain URLs, with what is secret in them."""
    causes: list[BaseException] = [error]
    for cause in causes:
        if len(causes) < 16:
            causes += [each for each in (*cause.args, cause.__cause__) if isinstance(each, BaseException)]
    kinds = tuple(causes)
    if any(isinstance(each, failures.NameResolutionError) for each in kinds):
        return "the name of the host isn't known"
    if any(isinstance(each, TooLongError) for each in kinds):
        return "the answer is longer than what was asked for"
    if any(isinstance(each, failures.SSLError) for each in kinds):
        return f"no secure connection, {_tls_reason(kinds)}"
    for each in kinds:
        if isinstance(each, OSError) and not isinstance(each, TimeoutError) and each.strerror:
            return each.strerror.lower()
    if any(isinstance(each, failures.TimeoutError | TimeoutError) for each in kinds):
        return "no answer in time"
    if any(isinstance(each, http.client.IncompleteRead) for each in kinds):
        return "the answer was cut short"
    if any(isinstance(each, http.client.RemoteDisconnected) for each in kinds):
        return "the server closed the connection without an answer"
    if isinstance(error, failures.ProtocolError | http.client.HTTPException):
        return "the answer is not HTTP"
    return "the address can't be used"


def _tls_reason(causes: tuple[BaseException, ...]) -> str:
    for cause in causes:
        text = getattr(cause, "verify_message", None) or getattr(cause, "reason", None)
        if isinstance(text, str):
            return printable(text[:100]).lower()
    return "TLS failed"


def _parse(url: str) -> Url | None:
    """A URL that can be asked, else None."""
    try:
        parsed = parse_url(url)
    except (failures.HTTPError, ValueError):
        return None
    return parsed if parsed.scheme in ("http", "https") and parsed.host else None


def _origin(url: Url) -> tuple[str | None, str | None, int | None]:
    """Credentials are for this alone."""
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme or "")


def _redirected(url: str, location: str | None, what: str) -> Url:
    """Where a redirect leads."""
    try:
        parsed = _parse(urljoin(url, location or ""))
    except ValueError:
        parsed = None
    if not location or parsed is None:
        raise UnavailableError(f"{what}: the server redirects to what is no address of http or https")
    if url.startswith("https:") and parsed.scheme != "https":
        raise UnavailableError(f"{what}: the server redirects from https to http, which could be anybody's")
    return Url(parsed.scheme, None, parsed.host, parsed.port, parsed.path, parsed.query)


def _authorization(credentials: str | None) -> dict[str, str]:
    if credentials is None:
        return {}
    return {"Authorization": "Basic " + b64encode(unquote_to_bytes(credentials)).decode("ascii")}

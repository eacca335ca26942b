"""One request and its answer, over connections that stay open: the adapter of requests, with our own bounds.

What requests would do besides is not wanted here: it follows redirects by rules of its own, reads ``.netrc`` and
cookies. Redirects are followed by this module: at most five, from https never to http, and what is private
(credentials) goes to the origin it is for and nowhere else: another scheme, host or port is another origin.

=============================================================================  ======================
what goes wrong                                                                error
=============================================================================  ======================
the connection was refused or lost before an answer began                      ``LostError``
a body that is cut short or stands still                                       ``CutError``
no answer in time                                                              ``UnavailableError``
too many redirects, or to where none goes                                      ``UnavailableError``
a web page (text/html) with a status of success                                ``UnavailableError``
a Content-Encoding, a Content-Range or length that can't be                    ``CorruptError``
=============================================================================  ======================

Messages name neither credentials nor where a redirect led, which may be a signed URL.
"""

from __future__ import annotations

import http.client
import io
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import get_environ_proxies
from urllib3 import BaseHTTPResponse, Retry
from urllib3 import exceptions as failures
from urllib3.util import Url, parse_url

from layerstore.errors import CorruptError, LimitError, UnavailableError, printable
from layerstore.store.httpget import reason
from layerstore.store.httpsocket import POOLS, Terms, terms
from layerstore.version import VERSION

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 20.0
"""Seconds without a byte; for an answer to begin, too, unless it is known to take long."""
SLOWEST = 128 << 10
"""Bytes a second below which a whole answer is given up, after the read timeout."""
CONNECTIONS = 32
"""Kept open to one host: more than a fetcher has threads."""
MAX_REDIRECTS = 5

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SAME_METHOD = frozenset({307, 308})
_HEADER_BYTES = 256 << 10
_SLACK = 8 << 20
"""Bytes of an answer beyond what was asked for that are taken: a server may ignore a range."""
_SEND_BLOCK = 256 << 10
_DISCARD = 16 << 10
"""A rest of this size is read and thrown away to keep the connection; of a longer one it is closed."""
_LENGTH = re.compile("[0-9]{1,19}")
_CONTENT_RANGE = re.compile("bytes (?:([0-9]{1,19})-([0-9]{1,19})|[*])/([0-9]{1,19})")
_PAGES = frozenset({"text/html", "application/xhtml+xml"})


class LostError(UnavailableError):
    """The connection was refused, or ended before an answer began: a new one may do."""


class CutError(UnavailableError):
    """A body broke off: the rest may be had by another request."""


def origin(url: str) -> tuple[str, str, int]:
    """What credentials are for: scheme, host and port of a URL that has passed :func:`resolve`."""
    parsed = parse_url(url)
    scheme = parsed.scheme or ""
    return scheme, (parsed.host or "").lower(), parsed.port or (443 if scheme == "https" else 80)


def resolve(base: str, location: str | None, what: str) -> str:
    """Where a Location leads: relative to ``base`` or whole; without credentials and fragment.

    Raises:
        UnavailableError: nowhere, or from https to http.
    """
    try:
        parsed = parse_url(urljoin(base, location or ""))
    except (failures.HTTPError, ValueError):
        parsed = Url()
    if not location or parsed.scheme not in ("http", "https") or not parsed.host:
        raise UnavailableError(f"{what}: the server points to what is no address of http or https")
    if base.startswith("https:") and parsed.scheme != "https":
        raise UnavailableError(
            f"{what}: the server points from https to http, which could be anybody's: a registry behind a proxy has to "
            "be told that it is reached by https"
        )
    return Url(parsed.scheme, None, parsed.host, parsed.port, parsed.path, parsed.query).url


class Wire:
    """Connections to any hosts, for any number of threads; :meth:`close` closes idle ones.

    Attributes:
        direct: no proxy that the environment names is asked, as for hosts of this machine.
    """

    def __init__(
        self, *, direct: bool, connect_timeout: float = CONNECT_TIMEOUT, read_timeout: float = READ_TIMEOUT
    ) -> None:
        self.direct = direct
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self._adapters: dict[str, _Adapter] = {}
        self._proxies: dict[str, dict[str, str]] = {}

    def close(self) -> None:
        with self._lock:
            adapters = list(self._adapters.values())
            self._adapters.clear()
        for adapter in adapters:
            adapter.close()

    @contextmanager
    def exchange(
        self,
        method: str,
        url: str,
        what: str,
        *,
        headers: Mapping[str, str],
        private: Mapping[str, str],
        private_to: str,
        body: bytes | None = None,
        expected: int = 0,
        seconds: float = 0.0,
    ) -> Iterator[Answer]:
        """The answer to a request, redirects followed.

        Args:
            method: of HTTP.
            url: whole.
            what: names the thing in messages.
            headers: for everybody.
            private: for the origin of the URL ``private_to`` alone.
            private_to: see there.
            body: sent again to where a redirect with the same method leads.
            expected: bytes of the answer's body.
            seconds: how much longer than usual it may take until the answer begins.

        Raises:
            LostError, CutError, UnavailableError, CorruptError: see the module.
        """
        own = origin(private_to)
        for _ in range(MAX_REDIRECTS + 1):
            sent = {**headers, **private} if origin(url) == own else headers
            answer = self._ask(method, url, what, sent, body, expected, seconds)
            with answer:
                redirected = answer.status in REDIRECTS and "Location" in answer.headers
                if not redirected:
                    answer.check()
                    yield answer
                    return
                if method not in ("GET", "HEAD") and answer.status not in _SAME_METHOD:
                    raise UnavailableError(f"{what}: the server redirects a {method} (status {answer.status})")
                url = resolve(url, answer.headers.get("Location"), what)
        raise UnavailableError(f"{what}: the server redirects more than {MAX_REDIRECTS} times")

    def _ask(
        self,
        method: str,
        url: str,
        what: str,
        headers: Mapping[str, str],
        body: bytes | None,
        expected: int,
        more: float,
    ) -> Answer:
        idle = self._read_timeout + more
        moved = expected + len(body or b"")
        agreed = Terms(time.monotonic() + idle + moved / SLOWEST, _HEADER_BYTES + 2 * expected + _SLACK, idle)
        request = requests.PreparedRequest()  # not by prepare(), which takes longer, and may change a signed URL
        request.method, request.url = method, url
        request.headers = CaseInsensitiveDict(_COMMON | dict(headers))
        if body is not None:
            request.headers["Content-Length"] = str(len(body))
            # A stream is sent block by block, each with the timeout; bytes would be one block.
            request.body = io.BytesIO(body) if body else body
        with terms(agreed), mapped(what, LostError):
            response = self._adapter(url).send(
                request,
                stream=True,
                timeout=(self._connect_timeout, idle),
                verify=True,
                proxies=self._proxies_for(url),
            )
        return Answer(response.raw, url, what)

    def _adapter(self, url: str) -> _Adapter:
        scheme = url.partition(":")[0]
        with self._lock:
            adapter = self._adapters.get(scheme)
            if adapter is None:
                adapter = self._adapters[scheme] = _Adapter(secure=scheme == "https")
            return adapter

    def _proxies_for(self, url: str) -> dict[str, str]:
        if self.direct:
            return {}
        key = url.partition("/v2/")[0] if "?" not in url else url.partition("?")[0]
        with self._lock:
            if key not in self._proxies:
                if len(self._proxies) > 256:
                    self._proxies.clear()
                self._proxies[key] = get_environ_proxies(url)
            return self._proxies[key]


_COMMON = {"User-Agent": f"imgtool/{VERSION}", "Accept-Encoding": "identity", "Accept": "*/*"}


class _Adapter(HTTPAdapter):
    """Connections whose answers end (``httpsocket``), and that trust what the system trusts besides certifi's list."""

    def __init__(self, *, secure: bool) -> None:
        self._context = ssl.create_default_context() if secure else None
        super().__init__(pool_connections=8, pool_maxsize=CONNECTIONS, max_retries=Retry(total=False, redirect=False))

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **arguments: Any) -> None:
        super().init_poolmanager(connections, maxsize, block, blocksize=_SEND_BLOCK, **arguments)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, proxy: str, **arguments: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **arguments)
        manager.pool_classes_by_scheme = POOLS
        return manager

    def build_connection_pool_key_attributes(
        self, *arguments: Any, **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        host, pool = super().build_connection_pool_key_attributes(*arguments, **more)
        return host, {**pool, "ssl_context": self._context} if self._context is not None else pool

    def close(self) -> None:
        for manager in (self.poolmanager, *self.proxy_manager.values()):
            for key in manager.pools.keys():  # noqa: SIM118 - it can't be iterated: threads use it
                pool = manager.pools.get(key)
                if pool is not None:
                    pool.close()
        super().close()


class Answer:
    """One answer; a context manager. At its end the connection is kept if that is cheap, else closed.

    Attributes:
        status: of HTTP.
        headers: names in any case.
        url: where it came from, after redirects.
        length: of the body, if the server says it.
    """

    def __init__(self, response: BaseHTTPResponse, url: str, what: str) -> None:
        self._response = response
        self._what = what
        self.status = response.status
        self.headers = response.headers
        self.url = url
        self.length: int | None = None

    @property
    def media_type(self) -> str:
        return str(self.headers.get("Content-Type", "")).partition(";")[0].strip().lower()

    def check(self) -> None:
        """Refuse what can't be the answer of a registry."""
        if self.status < 300:
            if self.media_type in _PAGES:
                raise UnavailableError(
                    f"{self._what}: the answer is a web page ({self.media_type}): is a proxy or login page in between?"
                )
            encoding = self.headers.get("Content-Encoding", "").strip().lower()
            if encoding not in ("", "identity"):
                raise CorruptError(
                    f"{self._what} was sent with Content-Encoding {printable(encoding[:40])!r}, though only identity "
                    "was asked for: switch that off in the server or proxy"
                )
        transfer, length = self.headers.get("Transfer-Encoding"), self.headers.get("Content-Length")
        if transfer is not None and (transfer.lower() != "chunked" or length is not None):
            raise UnavailableError(f"{self._what}: the answer has no clear end: Transfer-Encoding with other framing")
        if length is not None:
            if not _LENGTH.fullmatch(length):
                raise UnavailableError(f"{self._what}: the answer has a bad Content-Length")
            self.length = int(length)

    def content_range(self) -> tuple[int | None, int | None, int]:
        """First and last byte (both None where none could be sent), and the whole size."""
        text = self.headers.get("Content-Range")
        if text is None:
            raise UnavailableError(f"{self._what}: the answer doesn't say which range it is: try again")
        match = _CONTENT_RANGE.fullmatch(text)
        if match is None:
            raise self.another_range("a Content-Range")
        first, last, total = (None if group is None else int(group) for group in match.groups())
        assert total is not None
        return first, last, total

    def another_range(self, wanted: str) -> CorruptError:
        actual = self.headers.get("Content-Range", "none")
        return CorruptError(
            f"{self._what}: the server sent another range", expected=wanted, actual=printable(actual[:80])
        )

    def some(self, length: int) -> bytes:
        """At most so many bytes; none at the end, which may come early."""
        with mapped(self._what, CutError):
            return self._response.read(length)

    def whole(self, limit: int) -> bytes:
        """All of something small.

        Raises:
            LimitError: more than ``limit`` bytes.
            UnavailableError: cut short.
        """
        if self.length is not None and self.length > limit:
            raise LimitError(f"{self._what} has {self.length} bytes, more than the limit of {limit}")
        parts = []
        got = 0
        while part := self.some(min(limit + 1 - got, 1 << 20)):
            parts.append(part)
            got += len(part)
            if got > limit:
                raise LimitError(f"{self._what} has more than the limit of {limit} bytes")
        if self.length is not None and got != self.length:
            raise CutError(f"{self._what}: the answer was cut short: try again")
        return b"".join(parts)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            length = self.headers.get("Content-Length", "")
            if not self._response.closed and _LENGTH.fullmatch(length) and int(length) <= _DISCARD:
                with mapped(self._what):
                    self._response.read(_DISCARD)
        except UnavailableError:
            pass  # what counts of this answer has been read or refused
        finally:
            self._response.close()


@contextmanager
def mapped(what: str, kind: type[UnavailableError] = UnavailableError) -> Iterator[None]:
    """Map the errors of requests and what is below it to ``kind``; to LostError only where a new connection may do.

    Raises:
        UnavailableError: in all cases.
    """
    try:
        yield
    except (requests.RequestException, failures.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
        if kind is LostError and not _is_lost(error):
            kind = UnavailableError
        raise kind(f"{what}: {reason(error)}: try again, or check the server") from error


def _is_lost(error: Exception) -> bool:
    if isinstance(error, requests.exceptions.SSLError | requests.exceptions.Timeout):
        return False
    return isinstance(error, requests.ConnectionError | failures.ProtocolError | failures.NewConnectionError)

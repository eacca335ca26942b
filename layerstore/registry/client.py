"""Requests to one registry: authorized, redirected, repeated, and their failures as our errors.

=====================================================  ===================================================
the registry                                           error
=====================================================  ===================================================
404 or 410                                             ``NotFoundError``; ``UnavailableError`` where nothing
                                                       says that a registry has answered; of what a manifest
                                                       names when it is written, ``RefusedError``
401 after a new token, 403                             ``PermissionError_``
412                                                    ``ConflictError``
413                                                    ``LimitError``
405, 501, UNSUPPORTED                                  ``UnsupportedError``
507                                                    ``NoSpaceError``
408, 429, 5xx, no connection, after all attempts       ``UnavailableError``
another 4xx                                            ``RefusedError``, which has the registry's codes
=====================================================  ===================================================

What may be repeated is repeated, with pauses that grow, or as long as ``Retry-After`` says: if that is longer than
anybody waits, it is an error at once.
"""

from __future__ import annotations

import email.utils
import http
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    LimitError,
    NoSpaceError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UnsupportedError,
    printable,
)
from layerstore.oci.document import parse
from layerstore.registry.address import RegistryAddress
from layerstore.registry.credentials import DockerConfig
from layerstore.registry.tokens import DeniedError, Scopes, Token, Tokens, pull
from layerstore.registry.wire import CONNECT_TIMEOUT, READ_TIMEOUT, Answer, LostError, Wire, origin

ERROR_BYTES = 64 << 10
RENEWALS = 3
"""Times that one request is sent with a new token: with many threads, one may expire before it is used."""
PROOF_SECONDS = 10.0
"""For which an answer of a registry proves that what answers there is one."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_NOT_DONE = frozenset({429, 503})
"""Answers to a request that has not been looked at: it may be repeated whatever it is."""
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_OK = frozenset({200, 201, 202, 204, 206})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is repeated.

    Attributes:
        attempts: of one request.
        pause: seconds before the second; doubled each time, and spread by chance.
        total: seconds that all pauses of a request may come to.
        sleep: how to wait.
    """

    attempts: int = 5
    pause: float = 0.2
    total: float = 30.0
    sleep: Callable[[float], None] = time.sleep


class RefusedError(UnavailableError):
    """A request that the registry refuses, for reasons of its own.

    Attributes:
        status: of HTTP.
        codes: of the distribution specification, such as ``MANIFEST_BLOB_UNKNOWN``.
        details: what they come with.
    """

    def __init__(self, message: str, status: int, codes: tuple[str, ...], details: tuple[object, ...]) -> None:
        super().__init__(message)
        self.status = status
        self.codes = codes
        self.details = details


class RegistryClient:
    """One repository of a registry. Any thread may call; :meth:`close` closes idle connections.

    Attributes:
        address: of the repository.
        patience: with which it asks.
    """

    def __init__(
        self,
        address: RegistryAddress,
        *,
        docker_config: str | None = None,
        patience: Patience | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        """Asks nothing yet.

        Args:
            address: of the repository.
            docker_config: path of docker's ``config.json``; None for where docker has it.
            patience: see there.
            connect_timeout: seconds until a connection stands.
            read_timeout: seconds without a byte.
        """
        self.address = address
        self.patience = patience or Patience()
        direct = address.origin.startswith("http:")
        self._wire = Wire(direct=direct, connect_timeout=connect_timeout, read_timeout=read_timeout)
        self._tokens = Tokens(address, self._ask_realm, DockerConfig(docker_config))
        self._proven = -PROOF_SECONDS
        """When what answers there was last known to be a registry."""

    def close(self) -> None:
        self._wire.close()

    @contextmanager
    def ask(
        self,
        method: str,
        path: str,
        what: str,
        *,
        scopes: Scopes | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        expected: int = 0,
        seconds: float = 0.0,
        also: Collection[int] = (),
        repeat: bool | None = None,
    ) -> Iterator[Answer]:
        """The answer to a request: one of success, or with a status that is expected.

        Args:
            method: of HTTP.
            path: below the repository, such as ``blobs/…``, or a whole URL that the registry has given.
            what: names the thing in messages.
            scopes: what has to be permitted; by default to pull.
            headers: besides the usual.
            body: to be sent.
            expected: bytes of the answer's body.
            seconds: how much longer than usual the answer may take to begin.
            also: statuses that aren't errors.
            repeat: whether it may be sent again when nobody knows what became of it; by default GET and HEAD may.

        Raises:
            ImgtoolError: see the module.
        """
        url = path if "://" in path else self.address.url(path)
        scopes = scopes or pull(self.address.repository)
        repeatable = method in ("GET", "HEAD") if repeat is None else repeat
        course = _Course(self.patience)
        while True:
            token = self._tokens.current(scopes)
            try:
                with self._wire.exchange(
                    method,
                    url,
                    what,
                    headers=headers or {},
                    private={"Authorization": token.header} if token else {},
                    private_to=self.address.origin,
                    body=body,
                    expected=expected,
                    seconds=seconds,
                ) as answer:
                    if answer.status == 401 and self._is_own(answer):
                        self._authorize(answer, scopes, token, course, what)
                        continue
                    if token is not None and answer.status != 401:
                        token.accepted = True
                    if answer.status in _OK or answer.status in also:
                        self._proven = time.monotonic()
                        course.yielded = True
                        yield answer
                        return
                    error = self._error(method, answer, what)
                    again = answer.status in _NOT_DONE or (repeatable and answer.status in _AGAIN)
                    pause = _retry_after(answer)
            except LostError as lost:
                if course.yielded or not repeatable:
                    raise
                error, again, pause = lost, True, None
            if not again:
                raise error
            course.wait(error, pause)

    def _is_own(self, answer: Answer) -> bool:
        """Whether it is the registry that answers, and not where it has sent us."""
        return origin(answer.url) == origin(self.address.origin)

    def _authorize(self, answer: Answer, scopes: Scopes, token: Token | None, course: _Course, what: str) -> None:
        course.renewals += 1
        if course.renewals > RENEWALS:
            raise DeniedError(f"{what}: the registry refuses every token: check its clock and what you may do")
        try:
            self._tokens.refused(answer.headers.get("WWW-Authenticate", ""), scopes, token)
        except DeniedError as error:
            raise DeniedError(f"{what}: {error}") from error

    def _ask_realm(self, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None) -> tuple[int, bytes]:
        what = f"token server of registry {printable(self.address.host)}"
        body = urlencode(form).encode() if form is not None else None
        common = {} if form is None else {"Content-Type": "application/x-www-form-urlencoded"}
        course = _Course(self.patience)
        while True:
            try:
                with self._wire.exchange(
                    "GET" if form is None else "POST",
                    url,
                    what,
                    headers=common,
                    private=headers,
                    private_to=url,
                    body=body,
                    expected=ERROR_BYTES,
                ) as answer:
                    if answer.status not in _AGAIN:
                        return answer.status, answer.whole(1 << 20)
                    error: ImgtoolError = UnavailableError(f"{what} answered {answer.status}: try again")
                    pause = _retry_after(answer)
            except LostError as lost:
                error, pause = lost, None
            course.wait(error, pause)

    def _error(self, method: str, answer: Answer, what: str) -> ImgtoolError:
        """The error that an answer stands for."""
        codes, details, said = _errors(answer)
        status = answer.status
        known = {each.value: f" {each.phrase}" for each in http.HTTPStatus}
        text = f"{what}: the registry answered {status}{known.get(status, '')}{said}"
        if status == 404 and method == "PUT" and codes:  # what it names is missing, not itself
            return RefusedError(text, status, codes, details)
        if status in (404, 410):
            self._require_registry(answer, bool(codes), text)
            return NotFoundError(text)
        if status in (401, 403, 407):
            return PermissionError_(f"{text}: check what you may do there (docker login)")
        if status in (405, 501) or "UNSUPPORTED" in codes:
            return UnsupportedError(text)
        if status == 412:
            return ConflictError(f"{text}: look again")
        if status == 413:
            return LimitError(text)
        if status == 507:
            return NoSpaceError(f"{text}: free space in the registry")
        if 400 <= status < 500 and status not in _AGAIN:
            return RefusedError(text, status, codes, details)
        return UnavailableError(f"{text}: try again, or look into the registry's log")

    def _require_registry(self, answer: Answer, explained: bool, text: str) -> None:
        """That something is missing is believed of a registry alone, not of whatever web server answers instead.

        Raises:
            UnavailableError: no registry.
        """
        says_so = "Docker-Distribution-Api-Version" in answer.headers or answer.media_type.endswith("json")
        if explained or says_so or time.monotonic() - self._proven < PROOF_SECONDS:
            return
        url = f"{self.address.origin}/v2/"
        try:
            with self._wire.exchange("GET", url, text, headers={}, private={}, private_to=url) as root:
                if root.status in (200, 401) and root.media_type != "text/html":
                    self._proven = time.monotonic()
                    return
        except LostError:
            pass
        raise UnavailableError(f"{text}, as no registry does: is {self.address.origin} one?")


class _Course:
    """What has been tried for one request."""

    def __init__(self, patience: Patience) -> None:
        self.renewals = 0
        self.yielded = False
        self._patience = patience
        self._attempts = 1
        self._pause = patience.pause
        self._left = patience.total

    def wait(self, error: ImgtoolError, asked: float | None) -> None:
        """Until the next attempt. Raises ``error`` if there is none."""
        if self._attempts >= self._patience.attempts:
            raise error
        self._attempts += 1
        pause = asked if asked is not None else self._pause * random.uniform(0.5, 1.0)
        if pause > self._left:
            raise error
        self._pause *= 2
        self._left -= pause
        self._patience.sleep(pause)


def _retry_after(answer: Answer) -> float | None:
    """Seconds that the server asks to wait; a date is meant by its own clock."""
    text = answer.headers.get("Retry-After", "").strip()
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        then = email.utils.parsedate_to_datetime(text)
        now = email.utils.parsedate_to_datetime(answer.headers.get("Date", ""))
        return max(0.0, (then - now).total_seconds())
    except (TypeError, ValueError):
        return None


def _errors(answer: Answer) -> tuple[tuple[str, ...], tuple[object, ...], str]:
    """Codes and details of the registry's own errors, and what they say for a message; nothing if it gave none."""
    try:
        document = parse(answer.whole(ERROR_BYTES), "error", limit=ERROR_BYTES)
    except ImgtoolError:
        return (), (), ""
    found = document.get("errors")
    codes, details, said = [], [], []
    for each in found if isinstance(found, list) else []:
        code = each.get("code") if isinstance(each, dict) else None
        if isinstance(code, str) and _CODE.fullmatch(code):
            codes.append(code)
            details.append(each.get("detail"))
            said.append(code)
    return tuple(codes), tuple(details), f" ({', '.join(said[:3])})" if said else ""

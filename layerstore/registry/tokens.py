"""Tokens, one for each scope: asked for once however many threads want it, renewed before and when they expire.

A registry answers 401 with a challenge: ``Basic``, or ``Bearer`` with the address where tokens are had (the *realm*).
From then on it is known, and tokens are asked for without being refused first. A token is renewed shortly before it
expires; and when it is refused, once for all who were refused with it. A token that was refused before anybody was
let in with it won't be better when renewed: then permission is lacking.

The realm gets the credentials, so it has to be https where the registry is.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlencode

from oras.auth.utils import authHeader

from layerstore.errors import ImgtoolError, MalformedError, PermissionError_, UnavailableError, printable
from layerstore.oci.document import parse
from layerstore.registry.address import RegistryAddress
from layerstore.registry.credentials import DockerConfig, Login

TOKEN_BYTES = 1 << 20
DEFAULT_SECONDS = 60
"""How long a token is good whose answer doesn't say (distribution's token specification)."""
MARGIN = 10.0
"""Seconds before its end that a token is renewed, of a short-lived one a fifth of its life."""
CLIENT_ID = "imgtool"

_SCHEME = re.compile(r"(?:^|,)\s*(bearer|basic)(?=\s|$|,)", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """What is to be done with a repository."""

    repository: str
    actions: tuple[str, ...] = ("pull",)

    def __str__(self) -> str:
        return f"repository:{self.repository}:{','.join(self.actions)}"

    def covers(self, other: Scope) -> bool:
        return self.repository == other.repository and set(self.actions) >= set(other.actions)


Scopes = tuple[Scope, ...]


def pull(repository: str) -> Scopes:
    return (Scope(repository),)


def push(repository: str, *, mounting: str | None = None) -> Scopes:
    """To write to a repository, and to take blobs from another one for it."""
    own = Scope(repository, ("pull", "push"))
    return (own,) if mounting is None else (own, Scope(mounting))


def delete(repository: str) -> Scopes:
    return (Scope(repository, ("delete", "pull")),)


class DeniedError(PermissionError_):
    """The registry lets nobody in with what we have: another way of asking makes no difference."""


class AskRealm(Protocol):
    """Asks a token server, with retries; its status and its answer."""

    def __call__(self, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None) -> tuple[int, bytes]: ...


@dataclass(slots=True, repr=False)
class Token:
    """What a request was sent with. ``accepted``: somebody was let in with it."""

    header: str
    until: float = float("inf")
    accepted: bool = False


@dataclass(slots=True)
class _Slot:
    """The token of one scope."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    token: Token | None = None
    challenged: str | None = None
    """The scope in the registry's own words."""


class Tokens:
    """The authorization for one registry; any thread may call."""

    def __init__(
        self,
        address: RegistryAddress,
        ask: AskRealm,
        config: DockerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._ask = ask
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._challenge: authHeader | None = None
        self._basic: Token | None = None
        self._login: Login | None = None
        self._slots: dict[Scopes, _Slot] = {}

    def current(self, scopes: Scopes) -> Token | None:
        """What to send a request with; None as long as the registry hasn't asked for anything.

        Raises:
            PermissionError_: the credentials are refused.
            UnavailableError: the token server fails.
        """
        if self._basic is not None:
            return self._basic
        challenge = self._challenge
        if challenge is None:
            return None
        slot = self._slot(scopes)
        token = slot.token
        if token is not None and self._clock() < token.until:
            return token
        return self._renewed(slot, scopes, challenge, token)

    def refused(self, header: str, scopes: Scopes, sent: Token | None) -> Token:
        """What to repeat a request with that was refused (401) with the challenge ``header``.

        Raises:
            PermissionError_: nothing better can be had.
            UnavailableError: the token server fails.
        """
        scheme, challenge = _challenge(header, self._address)
        if scheme == "basic":
            return self._basic_token(sent)
        with self._lock:
            self._challenge, self._basic = challenge, None
        slot = self._slot(scopes)
        slot.challenged = challenge.scope or slot.challenged
        if sent is not None and sent is slot.token and not sent.accepted:
            raise self._denied("a new token was refused")
        return self._renewed(slot, scopes, challenge, sent)

    def _basic_token(self, sent: Token | None) -> Token:
        with self._lock:
            if self._basic is not None and sent is not self._basic:
                return self._basic
            login = self._look_up()  # anew: what a helper gives may have changed since
            if login.basic is None:
                raise self._denied("it wants a user and a password")
            header = f"Basic {login.basic}"
            if sent is not None and sent.header == header:
                raise self._denied("user or password is wrong")
            self._basic = Token(header)
            return self._basic

    def _slot(self, scopes: Scopes) -> _Slot:
        with self._lock:
            slot = self._slots.get(scopes)
            if slot is None:
                for known, other in self._slots.items():
                    if other.token is not None and all(any(each.covers(want) for each in known) for want in scopes):
                        return other
                slot = self._slots[scopes] = _Slot()
            return slot

    def _renewed(self, slot: _Slot, scopes: Scopes, challenge: authHeader, old: Token | None) -> Token:
        """The slot's token, renewed unless somebody else has done so since it was ``old``."""
        with slot.lock:
            token = slot.token
            if token is not None and token is not old and self._clock() < token.until:
                return token
            slot.token = self._request(challenge, scopes, slot.challenged)
            return slot.token

    def _request(self, challenge: authHeader, scopes: Scopes, challenged: str | None) -> Token:
        with self._lock:
            login = self._login or self._look_up()
        status, data = self._exchange(challenge, scopes, challenged, login)
        if status in (400, 401, 403):
            with self._lock:
                again = self._look_up()
            if again != login:
                login = again
                status, data = self._exchange(challenge, scopes, challenged, login)
        if status in (400, 401, 403):
            known = login.basic or login.identity_token
            raise self._denied("its token server refuses " + ("the credentials" if known else "who has no credentials"))
        if status != 200:
            raise UnavailableError(f"{self._what}: its token server answered {status}: try again")
        return self._parsed(data)

    def _exchange(
        self, challenge: authHeader, scopes: Scopes, challenged: str | None, login: Login
    ) -> tuple[int, bytes]:
        wanted = _merged(scopes, challenged)
        fields = {"service": challenge.service} if challenge.service else {}
        if login.identity_token is not None:
            form = {
                **fields,
                "grant_type": "refresh_token",
                "client_id": CLIENT_ID,
                "refresh_token": login.identity_token,
                "scope": " ".join(wanted),
            }
            return self._ask(challenge.realm, {}, form)
        query = urlencode([*fields.items(), *(("scope", each) for each in wanted)])
        headers = {} if login.basic is None else {"Authorization": f"Basic {login.basic}"}
        return self._ask(f"{challenge.realm}{'&' if '?' in challenge.realm else '?'}{query}", headers, None)

    def _parsed(self, data: bytes) -> Token:
        try:
            document = parse(data, f"{self._what}: answer of its token server", limit=TOKEN_BYTES)
        except MalformedError as error:
            raise UnavailableError(f"{error}: try again") from error
        token = document.get("token") or document.get("access_token")
        seconds = document.get("expires_in")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise UnavailableError(f"{self._what}: its token server gave no token")
        if not isinstance(seconds, (int, float)) or seconds <= 0:
            seconds = DEFAULT_SECONDS
        return Token(f"Bearer {token}", self._clock() + seconds - min(MARGIN, seconds / 5))

    def _look_up(self) -> Login:
        try:
            self._login = self._config.login(self._address.login_names)
        except ImgtoolError:
            self._login = None
            raise
        return self._login

    @property
    def _what(self) -> str:
        return f"registry {printable(self._address.host)}"

    def _denied(self, why: str) -> DeniedError:
        return DeniedError(
            f"{self._what} doesn't permit this in {self._address.repository}: {why}; docker login "
            f"{printable(self._address.host)}, and check that it is there and what you may do"
        )


def _challenge(header: str, address: RegistryAddress) -> tuple[str, authHeader]:
    """The scheme to use, ``bearer`` before ``basic``, and what it says."""
    schemes: dict[str, authHeader] = {}
    found = list(_SCHEME.finditer(header))
    for number, match in enumerate(found):
        text = header[match.end() : found[number + 1].start() if number + 1 < len(found) else len(header)]
        values = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(text)}
        schemes.setdefault(match[1].lower(), authHeader(values))
    what = f"registry {printable(address.host)}"
    if "bearer" in schemes:
        realm = schemes["bearer"].realm or ""
        if not re.fullmatch(r"https?://[^\s/@?#]+(?:[/?][^\s#]*)?", realm):
            raise DeniedError(f"{what} wants a token and names no address where to have one")
        if not address.plain and not realm.startswith("https:"):
            raise DeniedError(f"{what} wants the credentials to be sent to a token server without TLS: refused")
        return "bearer", schemes["bearer"]
    if "basic" in schemes:
        return "basic", schemes["basic"]
    raise DeniedError(f"{what} refuses without saying what it wants: docker login {printable(address.host)}")


def _merged(scopes: Scopes, challenged: str | None) -> list[str]:
    """Ours, and what the registry asked for besides."""
    wanted = list(scopes)
    others = []
    for text in (challenged or "").split():
        kind, _, rest = text.partition(":")
        name, _, actions = rest.rpartition(":")
        same = next((each for each in wanted if kind == "repository" and each.repository == name), None)
        if same is None:
            others.append(text)
        else:
            wanted[wanted.index(same)] = Scope(name, tuple(sorted({*same.actions, *filter(None, actions.split(","))})))
    return [*map(str, wanted), *others]

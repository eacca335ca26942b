"""Who we are to a registry: docker's configuration and credential helpers, by oras.

oras looks the host up (``auths``, then ``credHelpers``, then ``credsStore``). Here is what it lacks: the file is parsed
as what comes from outside, hosts are found in the forms in which ``docker login`` has written them, a helper that fails
says so and is given up after a while, and identity tokens are understood.
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from dataclasses import dataclass

import oras.auth.utils as auth_utils
from oras.auth.token import TokenAuth

from layerstore.errors import MalformedError, NotFoundError, UnavailableError, os_errors, printable
from layerstore.oci.document import parse

CONFIG_BYTES = 1 << 20
HELPER_SECONDS = 30.0
"""Some ask a cloud's service."""
_NOT_FOUND = "credentials not found"
"""What helpers print, by their protocol, when they have none."""
_TOKEN_USER = "<token>"
"""The user name with which a helper says that the secret is an identity token."""


def default_config() -> str:
    """Where docker has its configuration: ``DOCKER_CONFIG`` names another directory, for docker and its like."""
    return os.path.join(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json")


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """Credentials for one registry, or (neither set) none.

    Attributes:
        basic: for ``Authorization: Basic``.
        identity_token: to be exchanged for tokens.
    """

    basic: str | None = None
    identity_token: str | None = None


class DockerConfig(TokenAuth):  # type: ignore[misc]  # oras has no types
    """Credentials from docker's configuration, looked up anew at each :meth:`login`."""

    def __init__(self, path: str | None = None) -> None:
        """Reads nothing yet.

        Args:
            path: of ``config.json``; None for the place where docker has it. No file: no credentials.
        """
        super().__init__()
        self._path = default_config() if path is None else path
        self._basic_auth: str | None = None
        self._identity_token: str | None = None

    def login(self, names: tuple[str, ...]) -> Login:
        """The credentials for a host that has these names; the first is what a helper is asked for.

        Raises:
            MalformedError: the configuration can't be parsed.
            UnavailableError: a helper fails, or takes too long.
            PermissionError_: the file can't be read.
        """
        self._basic_auth = self._identity_token = None
        self._auth_config = self._read()
        for name in dict.fromkeys((*names, *map(_bare, names))):
            token = self._tokens.get(_bare(name))
            if token is not None:
                return Login(identity_token=token)
            if self._load_auth(name):
                return Login(self._basic_auth, self._identity_token)
            if self._identity_token is not None:
                return Login(identity_token=self._identity_token)
        return Login()

    def _read(self) -> dict[str, object]:
        """The file in the form that oras looks into; :attr:`_tokens` has the identity tokens."""
        self._tokens: dict[str, str] = {}
        what = f"docker's configuration {printable(self._path)}"
        try:
            with os_errors(f"read {what}"), open(self._path, "rb") as file:
                data = file.read(CONFIG_BYTES + 1)
        except NotFoundError:
            return {}
        document = parse(data, what, limit=CONFIG_BYTES, duplicate=lambda name: None)
        auths: dict[str, dict[str, str]] = {}
        for host, entry in _objects(document.get("auths"), what).items():
            fields = _objects(entry, what)
            auth, user, secret = (fields.get(name) for name in ("auth", "username", "password"))
            if isinstance(user, str) and isinstance(secret, str) and user and not auth:
                auth = auth_utils.get_basic_auth(user, secret)
            entry = {"auth": _checked(auth, what)} if isinstance(auth, str) and auth else {}
            auths[host] = auths[_bare(host)] = entry
            token = fields.get("identitytoken")
            if isinstance(token, str) and token:
                self._tokens[_bare(host)] = token
        helpers = {name: suffix for name, suffix in _objects(document.get("credHelpers"), what).items() if suffix}
        helpers |= {_bare(name): suffix for name, suffix in helpers.items()}
        return {"auths": auths, "credHelpers": helpers, "credsStore": document.get("credsStore") or None}

    def _get_auth_from_creds_store(self, suffix: str, hostname: str) -> str | None:
        """Ask a helper; overrides what fails silently, and without end."""
        program = f"docker-credential-{suffix}"
        what = f"credential helper {printable(program)}"
        if not isinstance(suffix, str) or "/" in suffix:
            raise MalformedError(f"{what}: docker's configuration names no program")
        try:
            ran = subprocess.run(
                [program, "get"], input=hostname.encode(), capture_output=True, timeout=HELPER_SECONDS, check=False
            )
        except FileNotFoundError as error:
            raise UnavailableError(f"{what}, which docker's configuration names, is not in PATH: install it") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{what} can't be run, or gave no answer in {HELPER_SECONDS:.0f} s") from error
        if ran.returncode:
            said = (ran.stdout + ran.stderr).decode("utf-8", "replace")
            if _NOT_FOUND in said:
                return None
            raise UnavailableError(f"{what} failed with status {ran.returncode}: {printable(said.strip()[:200])}")
        answer = parse(ran.stdout, f"answer of {what}", limit=CONFIG_BYTES)
        user, secret = answer.get("Username"), answer.get("Secret")
        if not isinstance(user, str) or not isinstance(secret, str):
            raise MalformedError(f"answer of {what} has no user name and secret")
        if user == _TOKEN_USER:
            self._identity_token = secret
            return None
        return str(auth_utils.get_basic_auth(user, secret))


def _bare(host: str) -> str:
    """``https://host/v1/`` and its like, as the host alone."""
    return host.partition("://")[2].partition("/")[0] if "://" in host else host.partition("/")[0]


def _objects(value: object, what: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError(f"{what} has another value where an object belongs: log in again")
    return value


def _checked(auth: str, what: str) -> str:
    """The base64 of ``user:password``."""
    try:
        plain = base64.b64decode(auth, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedError(f"{what} has credentials that are not base64: log in again") from error
    if b":" not in plain:
        raise MalformedError(f"{what} has credentials without a user name: log in again")
    return base64.b64encode(plain.rstrip(b"\0")).decode("ascii")

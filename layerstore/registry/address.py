"""Where a repository is: ``oci://HOST[:PORT]/REPOSITORY``, or the name of an image without its tag.

Registries speak HTTPS. Plain HTTP is spoken to loopback hosts, where nobody listens in, and to what is written
``oci+http://``. ``docker.io`` is the name of a registry that answers elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from layerstore.errors import ImgtoolError, UsageError
from layerstore.oci.document import shown
from layerstore.oci.reference import DEFAULT_HOST, DockerReference

SCHEME, PLAIN_SCHEME = "oci", "oci+http"
_HUB = "registry-1.docker.io"
"""What answers for ``docker.io``."""
_HUB_NAMES = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", _HUB)
"""What ``docker.io`` is called in docker's configuration; the first is what ``docker login`` writes."""

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]+\])(?::[0-9]{{1,5}})?")
_URL = re.compile(r"(oci|oci\+http)://([^/]*)/(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """A repository of a registry.

    Attributes:
        host: with its port, as users write it.
        repository: without host.
        plain: HTTP without TLS.
    """

    host: str
    repository: str
    plain: bool = False

    @classmethod
    def parse(cls, url: str) -> RegistryAddress:
        """The repository of a store.

        Raises:
            UsageError: not such a URL, or one with a tag, a digest or credentials. The message doesn't repeat those.
        """
        match = _URL.fullmatch(url)
        if match is None:
            raise UsageError("not the URL of a store in a registry: it is oci://HOST[:PORT]/REPOSITORY")
        scheme, host, path = match.groups()
        if "@" in host:
            raise UsageError("credentials don't belong in the URL of a registry: docker login, or a credential helper")
        if not _HOST.fullmatch(host):
            raise UsageError(f"not a registry host: {shown(host)}")
        if ":" in path or "@" in path:
            raise UsageError(f"a store is a repository, without tag and digest: {shown(path)}")
        try:
            reference = DockerReference.parse(f"{host if host.endswith(DEFAULT_HOST) else 'localhost'}/{path}")
        except ImgtoolError as error:
            raise UsageError(f"not a repository: {shown(path)}") from error
        return cls(
            DEFAULT_HOST if host == f"index.{DEFAULT_HOST}" else host,
            reference.path,
            scheme == PLAIN_SCHEME or is_loopback(host),
        )

    @classmethod
    def of(cls, reference: DockerReference) -> RegistryAddress:
        """The repository of an image."""
        return cls(reference.host, reference.path, is_loopback(reference.host))

    @property
    def origin(self) -> str:
        """Scheme and host that are asked."""
        return f"http{'' if self.plain else 's'}://{_HUB if self.host == DEFAULT_HOST else self.host}"

    @property
    def login_names(self) -> tuple[str, ...]:
        """What the host may be called in docker's configuration; the first is for credential helpers."""
        return _HUB_NAMES if self.host == DEFAULT_HOST else (self.host,)

    def url(self, path: str) -> str:
        """Of something of the repository, such as ``blobs/sha256:…``."""
        return f"{self.origin}/v2/{self.repository}/{path}"

    def __str__(self) -> str:
        scheme = PLAIN_SCHEME if self.plain and not is_loopback(self.host) else SCHEME
        return f"{scheme}://{self.host}/{self.repository}"


def is_loopback(host: str) -> bool:
    """Whether a host, with or without port, is this machine by its own word: no name is looked up."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

"""What an image config says about the process to start: arguments, environment, directory, and as whom.

Users and groups given by name are looked up in the image's own /etc/passwd and /etc/group, never in the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layerstore.errors import MalformedError, NotFoundError, UsageError, printable
from layerstore.oci.config import RunConfig
from overlay.inroot import read_in_root

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ID_MAX = (1 << 32) - 2
"""The largest uid and gid; -1 means "leave it" to the kernel."""


@dataclass(frozen=True, slots=True)
class User:
    """Numeric ids as the kernel takes them, and the home directory that passwd names."""

    uid: int = 0
    gid: int = 0
    additional_gids: tuple[int, ...] = ()
    home: str = "/"


@dataclass(frozen=True, slots=True)
class Process:
    """A process to start inside a root filesystem. ``env`` is NAME=value in the image's order."""

    args: tuple[str, ...]
    env: tuple[str, ...]
    cwd: str
    user: User


def process_of(config: RunConfig, rootfs: str, args: Sequence[str] | None = None) -> Process:
    """The process that the image wants, or ``args``, which then are the whole command line: no entrypoint before them.

    Raises:
        UsageError: there is nothing to run.
        MalformedError: a value that no process can have.
        NotFoundError: the image doesn't know the user or group.
    """
    command = tuple(args) if args else (*(config.entrypoint or ()), *(config.cmd or ()))
    if not command:
        raise UsageError("the image names no command; give one")
    env = list(config.env)
    for item in env:
        if not item.partition("=")[0] or "=" not in item:
            raise MalformedError(f"image config: Env holds {printable(item)!r}, which is not NAME=value")
    user = resolve_user(config.user, rootfs)
    names = {item.partition("=")[0] for item in env}
    if "PATH" not in names:
        env.append(f"PATH={DEFAULT_PATH}")
    if "HOME" not in names:
        env.append(f"HOME={user.home}")
    for value in (*command, *env, config.working_dir):
        _check_value(value)
    return Process(command, tuple(env), "/" + config.working_dir.lstrip("/"), user)


def run_document(config: RunConfig) -> dict[str, object]:
    """What :func:`run_config` takes: an image's run settings as JSON, for another process to run it."""
    return {name: _plain(getattr(config, name)) for name in RunConfig.__dataclass_fields__}


def run_config(document: object) -> RunConfig:
    """The settings that :func:`run_document` wrote.

    Raises:
        MalformedError: something else.
    """
    if not isinstance(document, dict) or set(document) != set(RunConfig.__dataclass_fields__):
        raise MalformedError("run settings of an image: not an object with the fields of one")
    texts = {name: _texts(document, name) for name in ("env", "volumes", "exposed_ports", "entrypoint", "cmd")}
    labels = document["labels"]
    if not isinstance(labels, list) or not all(
        isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item) for item in labels
    ):
        raise MalformedError("run settings of an image: labels are not pairs of strings")
    for name in ("user", "working_dir", "stop_signal"):
        if not isinstance(document[name], str):
            raise MalformedError(f"run settings of an image: {name} is not a string")
    return RunConfig(
        env=texts["env"] or (),
        entrypoint=texts["entrypoint"],
        cmd=texts["cmd"],
        user=document["user"],
        working_dir=document["working_dir"],
        labels=tuple((name, value) for name, value in labels),
        volumes=texts["volumes"] or (),
        exposed_ports=texts["exposed_ports"] or (),
        stop_signal=document["stop_signal"],
    )


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _texts(document: Mapping[str, object], name: str) -> tuple[str, ...] | None:
    """A list of strings; None, which only entrypoint and cmd may be, says that the image doesn't have it."""
    value = document[name]
    if value is None and name in ("entrypoint", "cmd"):
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MalformedError(f"run settings of an image: {name} is not a list of strings")
    return tuple(value)


def resolve_user(spec: str, rootfs: str) -> User:
    """``user``, ``uid``, ``user:group``, ``uid:gid`` and mixtures; empty is root.

    A numeric user that passwd lists takes its group and home from there; one that it doesn't is in group 0. A group
    that is given replaces the user's groups; otherwise those in /etc/group that list the user's name are added.

    Raises:
        NotFoundError: a name that the image doesn't list.
        MalformedError: an id that the kernel can't have.
    """
    _check_value(spec)
    wanted, colon, group = spec.partition(":")
    wanted = wanted or "0"
    entry = next((fields for fields in _records(rootfs, _PASSWD) if _names(fields, wanted)), None)
    if entry is not None:
        uid, gid, home = _id(entry[2]), _id(entry[3]), entry[5] or "/"
    elif _is_number(wanted):
        uid, gid, home = _id(wanted), 0, "/"
    else:
        raise NotFoundError(f"the image's /etc/passwd has no user {printable(wanted)!r}")
    if colon and group:
        return User(uid, _find_group(group, rootfs), (), home)
    additional = set()
    if entry is not None:
        for fields in _records(rootfs, _GROUP):
            if entry[0] in fields[3].split(","):
                additional.add(_id(fields[2]))
    return User(uid, gid, tuple(sorted(additional - {gid})), home)


def _find_group(wanted: str, rootfs: str) -> int:
    for fields in _records(rootfs, _GROUP):
        if _names(fields, wanted):
            return _id(fields[2])
    if _is_number(wanted):
        return _id(wanted)
    raise NotFoundError(f"the image's /etc/group has no group {printable(wanted)!r}")


def _names(fields: Sequence[str], wanted: str) -> bool:
    """Whether a line is that of ``wanted``, a name or a number; the third field is the id in both files."""
    return fields[0] == wanted or (_is_number(wanted) and int(fields[2]) == int(wanted))


@dataclass(frozen=True, slots=True)
class _Table:
    """One of the two files: which fields are numbers, how many there should be, how many there must be."""

    path: str
    numbers: tuple[int, ...]
    fields: int
    required: int


_PASSWD = _Table("/etc/passwd", numbers=(2, 3), fields=7, required=4)
_GROUP = _Table("/etc/group", numbers=(2,), fields=4, required=3)


def _records(rootfs: str, table: _Table) -> Iterator[list[str]]:
    """Its well-formed lines; comments, NIS lines and broken ones are passed over, as the C library does."""
    for line in (read_in_root(rootfs, table.path) or b"").split(b"\n"):
        fields = line.decode("utf-8", "surrogateescape").strip().split(":")
        if len(fields) < table.required or not fields[0] or fields[0].startswith("#"):
            continue
        if all(_is_number(fields[i]) for i in table.numbers):
            yield fields + [""] * (table.fields - len(fields))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _id(text: str) -> int:
    value = int(text)
    if value > ID_MAX:
        raise MalformedError(f"{text} is no uid or gid; the largest is {ID_MAX}")
    return value


def _check_value(text: str) -> None:
    """What execve and chdir can take: no NUL, and bytes behind every character."""
    if "\0" in text:
        raise MalformedError(f"image config: {printable(text)[:80]!r} holds a NUL")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedError("image config: a string holds a lone surrogate") from None

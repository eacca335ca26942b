"""What a recorder is told, in a file of the run directory, where a later worker finds it as well."""

from __future__ import annotations

import errno
import json
import os
from typing import NamedTuple

from layerstore.errors import MalformedError
from overlay.mountapi import MNT_DETACH, MNT_FORCE, umount

VERSION = 1
RECORDINGS = "recordings"
"""Below the run directory."""
SPEC, SOCKET, FILES, LOG = "spec.json", "socket", "files", "log"
"""In the directory of a recording."""


def device_file(layer: int, device: int) -> str:
    """The name of a device's file in FILES; layers count from 0, devices from 1."""
    return f"{layer}-{device}"


class RecordedLayer(NamedTuple):
    """A layer that is about to be mounted: its metadata image, and its packs as they would be mounted, in order."""

    image: str
    devices: tuple[str, ...]


class RecordingSpec(NamedTuple):
    """A recording.

    Attributes:
        id: of the sandbox.
        name: of the trace.
        traces: the directory that the trace goes to.
        sandbox: a directory that exists as long as the sandbox does.
        way: the only one to be tried; None: the first that works.
        layers: bottom first.
    """

    id: str
    name: str
    traces: str
    sandbox: str
    way: str | None
    layers: tuple[RecordedLayer, ...]

    @property
    def part(self) -> str:
        """The trace while it grows."""
        return f"{self.target}.part"

    @property
    def target(self) -> str:
        """The complete trace."""
        return f"{self.traces}/{self.name}.jsonl"

    def to_bytes(self) -> bytes:
        return json.dumps({"version": VERSION, **self._asdict()}).encode()

    @classmethod
    def parse(cls, data: bytes) -> RecordingSpec:
        """Raises MalformedError: what another release, or a writer that was killed, has left."""
        try:
            fields = json.loads(data)
            if fields.pop("version") != VERSION:
                raise ValueError("it is of another version")
            layers = tuple(RecordedLayer(image, tuple(devices)) for image, devices in fields.pop("layers"))
            return cls(**fields, layers=layers)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MalformedError(f"record of a recording: {error}") from error


def load_spec(directory: str) -> RecordingSpec:
    """Raises MalformedError; OSError where there is none."""
    with open(f"{directory}/{SPEC}", "rb") as stream:
        return RecordingSpec.parse(stream.read())


def clear(directory: str) -> None:
    """Remove a recording's directory and the mount in it, also one whose server is dead. Repeating it is harmless."""
    files = f"{directory}/{FILES}"
    try:
        umount(files, MNT_FORCE | MNT_DETACH)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
            raise
    for remove, path in (
        (os.rmdir, files),
        (os.unlink, f"{directory}/{SOCKET}"),
        (os.unlink, f"{directory}/{LOG}"),
        (os.unlink, f"{directory}/{SPEC}"),
        (os.rmdir, directory),
    ):
        try:
            remove(path)
        except FileNotFoundError:
            pass
    try:
        os.rmdir(os.path.dirname(directory))
    except OSError:
        pass  # another recording has its directory there

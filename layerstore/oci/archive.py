"""The tar around an image: its members are found by one pass over the headers and read where they lie.

A compressed archive is decompressed to scratch space first, for its members have to be read in another order than
theirs. Of two members with one name the last counts, as if the archive were unpacked.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import ExitStack

from layerstore.errors import ImgtoolError, MalformedError, UnsupportedError, os_errors, printable
from layerstore.limits import Limits
from layerstore.oci import mediatype
from layerstore.oci.files import FileRange
from layerstore.oci.source import Warn
from layerstore.tar.member import Member
from layerstore.tar.reader import MemberReader

LINKS = 32
"""Most links followed for one name; the kernel stops at 40."""


class ArchiveFiles:
    """The members of a tar, by normalised name; links are followed inside the archive and never out of it."""

    def __init__(self, path: str, *, scratch: str, limits: Limits, warn: Warn) -> None:
        raise NotImplementedError

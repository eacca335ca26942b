"""Receipts of sandboxes that have ended: ``<root>/receipts/<id>.json``, the newest of each id.

Kept for a while, so that ``node receipt`` has an answer: at most KEPT of them, for KEPT_SECONDS. They appear whole or
not at all, but are not synced: who must not lose one names a directory of their own (``receipts`` of a description),
to which they are written durably.
"""

from __future__ import annotations

import os
import secrets
import threading
import time

from layerstore.errors import MalformedError, NotFoundError, os_errors
from layerstore.staging import PREFIX, read_file
from overlay.service.receipt import MAX_SIZE, Receipt
from overlay.service.request import check_id

KEPT = 10_000
KEPT_SECONDS = 7 * 86_400
_PRUNE_EVERY = 500
"""Receipts between two looks through the directory: so much more than KEPT may lie there."""
_DEAD = 3600
"""Seconds after which an unfinished file has no writer any more."""

_SUFFIX = ".json"


class Receipts:
    """The receipts of one node root; for one process and any number of its threads."""

    def __init__(self, root: str) -> None:
        self._directory = os.path.join(root, "receipts")
        self._lock = threading.Lock()
        self._until_prune = 0

    def keep(self, receipt: Receipt) -> None:
        """Keep it; from time to time, remove what is too old or too much.

        Raises:
            UsageError: its id can't be one.
            NoSpaceError, PermissionError_, UnavailableError: it can't be written; nothing is left of it.
        """
        path = f"{self._directory}/{check_id(receipt.id)}{_SUFFIX}"
        new = f"{self._directory}/{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        with os_errors(f"keep the receipt of sandbox {receipt.id}"):
            os.makedirs(self._directory, 0o700, exist_ok=True)
            try:
                with open(new, "xb") as stream:
                    stream.write(receipt.to_bytes())
                os.rename(new, path)
            except BaseException:
                if os.path.lexists(new):
                    os.unlink(new)
                raise
        with self._lock:
            self._until_prune -= 1
            due = self._until_prune < 0
            if due:
                self._until_prune = _PRUNE_EVERY
        if due:
            self.prune()

    def get(self, id: str) -> Receipt:
        """The receipt of the last sandbox with this id that has ended.

        Raises:
            UsageError: it can't be an id.
            NotFoundError: there is none, or not any more, or the machine stopped before it was on the disk.
        """
        missing = f"no receipt of a sandbox {check_id(id)}: they are kept for {KEPT_SECONDS // 86_400} days"
        try:
            with os_errors(f"read the receipt of sandbox {id}"):
                data = read_file(f"{self._directory}/{id}{_SUFFIX}", MAX_SIZE)
        except NotFoundError:
            raise NotFoundError(missing) from None
        try:
            return Receipt.from_bytes(data, f"receipt of sandbox {id}")
        except MalformedError:
            raise NotFoundError(missing) from None

    def prune(self, *, now: float | None = None) -> int:
        """Remove the oldest beyond KEPT, those older than KEPT_SECONDS, and unfinished ones; returns how many."""
        now = time.time() if now is None else now
        found: list[tuple[float, str]] = []
        with os_errors("look through receipts"):
            try:
                with os.scandir(self._directory) as entries:
                    for entry in entries:
                        try:
                            found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
                        except FileNotFoundError:
                            continue
            except FileNotFoundError:
                return 0
            whole = sorted(((at, name) for at, name in found if name.endswith(_SUFFIX)), reverse=True)
            doomed = whole[KEPT:] + [item for item in whole[:KEPT] if item[0] < now - KEPT_SECONDS]
            doomed += [(at, name) for at, name in found if name.startswith(PREFIX) and at < now - _DEAD]
            for _, name in doomed:
                try:
                    os.unlink(f"{self._directory}/{name}")
                except FileNotFoundError:
                    pass
        return len(doomed)

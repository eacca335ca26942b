"""Who may mount."""

from __future__ import annotations

import os

from layerstore.errors import PermissionError_


def require_root() -> None:
    """Raise PermissionError_ unless this process can be expected to mount.

    EROFS mounts only with CAP_SYS_ADMIN of the first user namespace, so user namespaces are no way around.
    """
    if os.geteuid() != 0:
        raise PermissionError_("mounting layers needs root: run this as root or with sudo")

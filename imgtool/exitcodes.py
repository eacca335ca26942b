"""The exit codes: one table, from which the manual's is made."""

from __future__ import annotations

from enum import IntEnum

from layerstore import errors


class ExitCode(IntEnum):
    """What a command's exit status means; scripts may rely on it."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    MALFORMED = 4
    CORRUPT = 5
    UNSUPPORTED = 6
    CONFLICT = 7
    UNAVAILABLE = 8
    LIMIT = 9
    NO_SPACE = 10
    PERMISSION = 11
    FINDINGS = 12
    RUN_FAILED = 125
    INTERRUPTED = 130
    TERMINATED = 143


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.INTERNAL: "a fault of imgtool itself; the traceback is printed with --debug",
    ExitCode.USAGE: "the command line, a name or an option is wrong",
    ExitCode.NOT_FOUND: "no such image, reference, path, sandbox or store, or no node service runs",
    ExitCode.MALFORMED: "the input breaks its format (tar, OCI document, EROFS); nothing was published",
    ExitCode.CORRUPT: "bytes differ from their digest or size; the blob is named",
    ExitCode.UNSUPPORTED: "valid, but not handled by this release or this kernel",
    ExitCode.CONFLICT: "parts don't fit together, or somebody changed a reference meanwhile",
    ExitCode.UNAVAILABLE: "a passing failure (lock held, I/O error): try again",
    ExitCode.LIMIT: "the input exceeds a limit that an option raises",
    ExitCode.NO_SPACE: "the disk or quota is full; nothing was published",
    ExitCode.PERMISSION: "needs root, or a permission on a file",
    ExitCode.FINDINGS: "the command worked and found something: verify damage, diff a difference, doctor a lack",
    ExitCode.RUN_FAILED: "imgtool run could not start the command; otherwise it returns the command's own code",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C (SIGINT); everything was cleaned up",
    ExitCode.TERMINATED: "stopped by SIGTERM; everything was cleaned up",
}

_OF_ERROR: dict[type[errors.ImgtoolError], ExitCode] = {
    errors.UsageError: ExitCode.USAGE,
    errors.NotFoundError: ExitCode.NOT_FOUND,
    errors.MalformedError: ExitCode.MALFORMED,
    errors.CorruptError: ExitCode.CORRUPT,
    errors.UnsupportedError: ExitCode.UNSUPPORTED,
    errors.ConflictError: ExitCode.CONFLICT,
    errors.UnavailableError: ExitCode.UNAVAILABLE,
    errors.LimitError: ExitCode.LIMIT,
    errors.NoSpaceError: ExitCode.NO_SPACE,
    errors.PermissionError_: ExitCode.PERMISSION,
}


def of_error(error: errors.ImgtoolError) -> ExitCode:
    """The exit code of an error: its own class's, or its nearest ancestor's."""
    for cls in type(error).__mro__:
        code = _OF_ERROR.get(cls)
        if code is not None:
            return code
    return ExitCode.INTERNAL

"""``imgtool doctor``."""

from __future__ import annotations

import click

from imgtool import render
from imgtool.exitcodes import ExitCode
from imgtool.options import examples, json_option, root_option, root_path
from overlay.probe import probe


@click.command(
    "doctor",
    short_help="Say what this machine can do, and what to do about what it can't.",
    epilog=examples("imgtool doctor", "imgtool doctor --root /mnt/fast/imgtool --json"),
)
@root_option
@json_option
def command(root: str | None, as_json: bool) -> int:
    """Try out what sandboxes need of this machine and kernel; leaves nothing behind.

    The exit code is 0 where sandboxes can be made here and 12 where something they need is missing.
    """
    findings = probe(root_path(root))
    lacking = [finding for finding in findings if finding.required and finding.status == "missing"]
    if as_json:
        render.print_json(
            {
                "can_run_sandboxes": not lacking,
                "findings": [
                    {
                        "name": finding.name,
                        "status": finding.status,
                        "required": finding.required,
                        "detail": finding.detail,
                        "advice": finding.advice,
                    }
                    for finding in findings
                ],
            }
        )
    else:
        render.print_table(
            ("CHECK", "STATUS", "DETAIL"),
            [(finding.name, finding.status, finding.detail) for finding in findings],
        )
        for finding in findings:
            if finding.advice:
                render.print_line(f"{finding.name}: {finding.advice}")
        names = ", ".join(finding.name for finding in lacking)
        render.print_line(f"sandboxes can't be made here: {names}" if lacking else "sandboxes can be made here")
    return ExitCode.FINDINGS if lacking else ExitCode.OK

"""``imgtool verify``."""

from __future__ import annotations

import click

from imgtool import progress, render
from imgtool.exitcodes import ExitCode
from imgtool.options import examples, json_option, store_option, whole_store
from layerstore.audit import ContentCheck
from layerstore.store.verification import verify
from prefetch.plans.format import PLAN_MEDIA_TYPE
from prefetch.plans.published import check_published


@click.command(
    "verify",
    short_help="Check every byte of a store.",
    epilog=examples("imgtool verify", "imgtool verify --quarantine --json"),
)
@click.option("--quarantine", is_flag=True, help="Move corrupt blobs aside, so that publishing again replaces them.")
@store_option
@json_option
def command(quarantine: bool, store: str | None, root: str | None, as_json: bool) -> int:
    """Compare every blob with its name, every name with what it reaches, every pack and metadata image with itself.

    Plans are read too.

    The exit code is 0 where all is well and 12 where something was found; each finding is one line.
    """
    target = whole_store(store, root)
    with progress.shown() as drawn:
        check = ContentCheck(drawn, {PLAN_MEDIA_TYPE: check_published})
        findings = list(verify(target, quarantine=quarantine, check=check, progress=drawn))
    if as_json:
        render.print_json(
            [
                {
                    "fault": str(finding.fault),
                    "message": finding.message,
                    "blob": str(finding.digest) if finding.digest else None,
                    "tag": finding.reference,
                    "quarantined": finding.quarantined,
                    "raw": finding.raw,
                }
                for finding in findings
            ]
        )
    else:
        for finding in findings:
            where = f" [moved to {finding.quarantined}]" if finding.quarantined else ""
            render.print_line(f"{finding.fault}: {finding.message}{where}")
        render.print_line(f"{len(findings)} finding(s)" if findings else "everything is as it should be")
    return ExitCode.FINDINGS if findings else ExitCode.OK

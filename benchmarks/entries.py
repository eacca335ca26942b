"""Peak memory of a conversion by number of entries: an archive of empty and small files, made on the fly."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import fresh, parser, save, table

MAKER = """
import sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT)
for number in range(int(sys.argv[1])):
    member = tarfile.TarInfo(f"d{number // 1000:05}/file-{number:08}")
    member.mtime = 1_700_000_000 + number % 1000
    out.addfile(member)
out.close()
"""
CONVERTER = """
import resource, sys
from imgtool.cli import run
code = run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    arguments = parser(__doc__ or "", images=False, rounds=1).parse_args()
    body = []
    for count in (10_000, 100_000, 300_000, 1_000_000):
        store = fresh(arguments.work)
        maker = subprocess.Popen([sys.executable, "-c", MAKER, str(count)], stdout=subprocess.PIPE)
        command = ["convert", "tar:-", "--role", "base", "--store", str(store / "store")]
        converter = subprocess.run(
            [sys.executable, "-c", CONVERTER, *command], stdin=maker.stdout, capture_output=True, text=True, check=True
        )
        maker.wait()
        peak = int(converter.stderr.splitlines()[-1])
        body.append((f"{count:,}", f"{peak / 2**20:.0f} MiB"))
    table(("entries", "peak memory"), body)
    save(arguments.json, {"entries": body})


if __name__ == "__main__":
    main()

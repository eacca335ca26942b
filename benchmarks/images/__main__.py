"""``python -m benchmarks.images DIR [IMAGE ...]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.images.build import build, report
from benchmarks.images.recipes import RECIPES

parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description="Build real OCI images.")
parser.add_argument("directory", type=Path, metavar="DIR")
parser.add_argument("images", nargs="*", metavar="IMAGE", help="of: " + ", ".join(RECIPES))
arguments = parser.parse_args()
if unknown := set(arguments.images) - set(RECIPES):
    parser.error(f"no such image: {', '.join(sorted(unknown))}")
if os.geteuid() != 0:
    parser.error("mmdebstrap and device nodes need root")
build(arguments.directory, arguments.images or RECIPES)
for line in report(arguments.directory):
    print(line)

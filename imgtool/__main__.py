"""``python -m imgtool``."""

from imgtool.cli import entry

entry()

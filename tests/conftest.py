"""Puts ``tests/`` on the path, so that test modules can share ``support``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Mistakes in this program, or in what it calls back: they are told, and end no thread that others depend on."""

from __future__ import annotations

import sys
import threading


def report_mistake() -> None:
    """Tell of the exception being handled as of one that ends a thread."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

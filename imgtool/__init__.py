"""The command line: parse, one call of the library, render.

::

    cli.py ─▶ commands/<verb>.py ─▶ layerstore, overlay ─▶ render.py
                 │
                 └─ options.py (what all verbs share), progress.py, environment.py, exitcodes.py

Commands hold no algorithm and the library never prints. ``--json`` is an interface: its keys are pinned by tests and
described in ``docs/cli.md``; text for people may change.
"""

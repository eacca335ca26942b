"""The node service: one per machine, which answers page faults and makes, keeps and removes sandboxes.

::

    imgtool up, run, ps, down ──┐  HTTP and JSON over <run directory>/node.sock          worker (overlay.lazy)
    a platform's own client ────┴─▶ client ─▶ server ─▶ service ─▶ Node: cache, fetcher, sandboxes
    sandbox.yaml ─▶ description ─▶ request ──────┘          └─▶ receipt ─▶ <root>/receipts/<id>.json

Modules: `request` (what a sandbox is asked for with), `description` (the same as a YAML file), `receipt` (what became
of it), `options` (how the service is started), `place`, `client`, `server`, `service`, `metrics`, `log`.
"""

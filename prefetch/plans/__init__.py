"""Plans: what to fetch before it is asked for, learned from traces of many runs.

::

    traces ─▶ learn/ ─▶ Plan (format.py) ─▶ shelf.py: on the node, by name and by layer
                              │            ─▶ published.py: in a store, beside the layers
                              ▼
                    match.py: frames of packs that the cache has ─▶ replay.py: wants of the background

* **planned range**: blocks of one pack, with the chance that a run reads them and the time by which it does.
* **part**: the ranges of one layer. What was learned of a base serves every workspace over it.

A plan only ever names what may be fetched. It decides nothing about what is read: one that is wrong costs bytes, never
content.
"""

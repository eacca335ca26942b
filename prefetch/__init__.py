"""Time: what to fetch, in which order, before it is asked for, and fetching it.

::

    layer ─▶ plan.py: PackFetch (frame ranges in order) ─▶ running.py ─┐
    reader that waits ─────────────────────────────────────────────────┤ wants
                                                                       ▼
                             fetcher.py: lock, threads, monitor ─ schedule.py, backlog.py: what is next
                                   │                              attempts.py: what after a failure
                             reading.py: one read                 origins.py: from where
                                   │                              share.py, turns.py, readahead.py: policies
                                   ▼
                         verified frames ─▶ cache ─▶ commits.py: durable

* **plan**: ordered ranges of frames. The eager plan is the whole of what a layer refers to.
* **want**: somebody who waits for frames of one pack, by a *deadline* or as long as it takes.
* **demand**: wants of readers. They come before the **background**, which is wants of plans, by when they are due.
* **share**: what the background may have under way, so that a reader's frame finds the link free or nearly so.
* **turn**: the use of a processor, for a frame that has come.
* **read**: one request for neighbouring frames. A frame is in one read at a time, however many want it; only where a
  plan's read takes too long, a reader gets one of its own.
* **attempt**: one read, as a frame that it was to bring sees it.
* **origin**: a place that has a pack (:class:`layerstore.cache.format.Origin`).

Besides: ``statistics`` (what fetching has cost, and who is told of it), ``clock`` (the time, which tests make),
``mistakes`` (exceptions that nobody expects).

A plan is a value; so are backlog and schedule, which the fetcher guards with its one lock. Whoever waits for frames of
a pack keeps it from eviction.
"""

"""Time: what to fetch, in which order, before it is asked for.

::

    layer ─▶ plan.py: FetchPlan (frame ranges in order) ─▶ fetch.py: store ─▶ verified frames ─▶ cache

* **plan**: ordered ranges of frames. The eager plan is the whole of what a layer refers to.

A plan is a value; fetching holds the lock of each pack that it fills.
"""

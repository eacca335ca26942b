"""Learning: from the traces of many runs to a plan, and how good that plan is for runs it has not seen.

::

    Trace ─▶ runs.py: Run (times without waits) ─▶ evidence.py: segments and frames, by how many runs, when
      │                       │                          │
      ▼                       │                learners.py, clusters.py: which frames, in which order
    remap.py: another build   │                          │
                              ▼                          ▼
      sizes.py ──▶ simulate.py: one start ◀── frames.py ◀── planning.py: budget, ranges ─▶ Plan
                              │
                              └▶ score.py: held-out runs ─▶ train.py: the learner that scores best ─▶ describe.py

* **run**: what a trace tells of a program: which ranges it read, and when it would have, had it never waited.
* **segment**: a piece of a pack that every run read wholly or not at all, and that lies in one frame. Runs read ranges
  that overlap in part; cut at the ends of all of them, they can be counted.
* **frame**: what is fetched. One with a single hot segment costs all of its bytes, and is as likely as the union of its
  segments. Which frames are planned is decided by frames; the plan holds the segments, which re-laying needs.
* **learner**: a rule that picks frames and their order from the evidence of some runs.
* **outcome**: what one simulated start came to; **score**: means of outcomes over runs that were held out.

Everything here is a function from values to values: no I/O but in :func:`sizes.open_sizes`, no threads, no chance. The
order in which traces are given, the hashes of strings and the order of dictionaries change nothing.
"""

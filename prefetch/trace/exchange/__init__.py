"""Traces of other tools: read, turned into accesses of an image, and written.

::

    file of another tool ─▶ formats.py: which it is ─▶ nydus, nri, stargz, overlaybd, cvmfs, paths, strace, own
                                                              │ Listing (listing.py): paths, ranges, times, in order
                                                              ▼
                             ImagePlaces ─▶ resolving.py: links, directories, globs ─▶ Trace, ImportReport

    Trace or Plan ─▶ parts.py: (path, offset, length) in order ─▶ the same modules ─▶ Exported: bytes, what was left out

* **wanted**: one entry of a list: a path or pattern, with ranges, a time and a wait where the format has them.
* **part**: a range of a file by its path, as a trace or a plan has it.

Nothing is dropped silently: what a reader skips and what a format can't express is counted, with the reason.
"""

"""Many images from store to store: which, what of them is missing, and moving it.

::

    names, globs ─▶ selection ─┐
    usage.csv ───▶ usage ──────┤
                               ▼
        source ─▶ contents ─▶ (budget) ─▶ plan ─▶ run ─▶ destination
                  what each      which     what is      blobs once,
                  reaches        of them   missing      references last

``selection`` takes names by globs; ``contents`` reads what they reach, many at a time; ``budget`` chooses among them so
that what is chosen, each shared blob counted once, fits into so many bytes and covers most tasks of ``usage``;
``second_site`` puts those two together. ``plan`` compares with the destination, and is a value that can be printed;
``run`` carries it out. Nothing is ever deleted at the destination.

Nouns: *contents* is a reference with all blobs that it reaches; a *move* is what has to be done for one; a *task* is
whatever ``usage.csv`` counts; *coverage* is the part of all tasks whose image is chosen.

Threads: reading and asking is done LOOKS at a time, moving by as many threads as the caller says. An image's blobs are
moved by any of them, each blob once however many images need it; a reference is written by the thread that saw the
last of its blobs arrive. One failure fails the images that need what failed, and no others, unless it is one that all
would meet (:mod:`layerstore.sync.run`).
"""

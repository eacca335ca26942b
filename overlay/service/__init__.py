"""The node service: one per root, which answers page faults and makes, keeps and removes sandboxes.

::

    imgtool up, run, ps, down ─┐
    a platform's own programs ─┼─▶ client ──── HTTP, <run directory>/node.sock ───▶ server      worker (overlay.lazy)
    curl, a metrics scraper ───┘     │                                                │
                                 messages: kinds of errors ◀──────────────────────▶ routes ─▶ service ─▶ overlay.node
    sandbox.yaml ─▶ description ─▶ request ──────────────────────────────────────────▶┘   │        cache, fetcher,
                                                                                          ▼        sandboxes
    systemd ◀─ notify ─▶ start ─▶ holder, keeper, worker           receipt ─▶ receipts: <root>/receipts/<id>.json
                            log ◀─ all of them

Modules, from the outside inwards:

=============  ======================================================================================
`client`       `Client`: a method for each endpoint; light to import
`answers`      what its methods return
`connection`   HTTP over the socket, for the client
`place`        the run directory and the socket in it: whose they are, and how to listen and connect
`messages`     what both ends know: kinds of errors, media types, limits
`server`       `ApiServer`: connections, threads, bounded requests, answers
`routes`       the endpoints, and the check of everything that a request names
`lines`        answers that tell of their progress
`request`      what a sandbox is asked for with; `fields` checks the types, `duration` what is written as 90m
`description`  a request as a YAML file; `yaml_document` reads it, sandbox.schema.json has its shape
`service`      what the endpoints do
`receipt`      what a sandbox was made of, read and wrote; `receipts` keeps them, `written` counts what was written
`metrics`      what Prometheus gets
`log`          one line for each thing that happened
`notify`       systemd: readiness, and its file descriptor store
`options`      how the service is started
`start`        takes the run directory and becomes the holder
`worker`       puts cache, fetcher, service and server together
=============  ======================================================================================

**Who owns what.** The lock of the run directory makes one service of a root; whoever holds the descriptor of ``lock``
there has it, and so do his children. The listening socket is the holder's: it survives workers, and only one worker at
a time accepts from it. The cache's lock is the worker's.

**Threads.** A thread for each connection; the service's methods run in all of them at once, so each guards its own
state. A request never waits for another one's fetching: nobody holds a lock while data come, except that of the layer
which is made ready. What reports progress (fetching threads) never waits for whoever reads it: `lines` keeps the last
state, and a thread of its own sends it. Shutting down ends idle connections, and waits for requests under way.

**Trust.** Who may connect is root: by the modes of directory and socket, and by the kernel's word (SO_PEERCRED). What
is sent is checked all the same, in `routes` and `request`, before the service sees it: a name from a request is never
a path.
"""

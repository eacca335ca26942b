"""A client for OCI registries (distribution-spec 1.1): what docker, containerd and skopeo push to and pull from.

::

    RegistrySource ─┐                                source.py       images for ``convert docker://…``
    RegistryStore ──┤  (layerstore/store/registry)   tags.py         names of references as tags
                    ▼
    blobs  uploads  manifests ◀─ referrers           blobs.py  uploads.py  manifests.py  referrers.py
        └──────┴───────┤
                       ▼
                RegistryClient ──▶ Tokens            client.py       one request: authorized, repeated, its error
                       │             │               tokens.py       one token for each scope
                       │             ▼
                       │        DockerConfig         credentials.py  docker's configuration and helpers, by oras
                       ▼
                     Wire                            wire.py         one exchange, redirects and bounds; by requests
                RegistryAddress                      address.py      where a repository is

Nouns: a *repository* has manifests, blobs and tags, and is ``HOST/PATH``; a *scope* is what a token permits; a
*session* is an upload under way; a *referrer* is a manifest with a subject.

Rules. Nothing is asked before it is needed: there is no ping, and no HEAD before a GET. Credentials go to the registry
and to its token server, never to where a redirect or a Location leads. TLS is always verified. Whatever comes is
verified, against a digest or by the frames above, and its size is checked before memory is taken.

Locks. Any thread may call any of these; connections are shared and stay open. One lock guards the login, and one each
scope's token, so that many threads wait for one new token. None is held while anything but a token is asked for.

Importing this package takes 0.1 s (requests); it is imported when a registry is opened.
"""

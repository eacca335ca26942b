"""OCI documents, and the images in local layouts and archives.

::

    "oci:dir:tag" ─▶ SourceName ─▶ open_source ─▶ ImageSource ─image(platform)─▶ SourceImage ─open_layer(i)─▶ BlobReader
                                   ├── LayoutSource         over DirectoryFiles or ArchiveFiles
                                   └── DockerArchiveSource  over ArchiveFiles

    index.json ─▶ Index ─select─▶ Descriptor ─▶ Manifest ─▶ ImageConfig, (Descriptor, diff ID) of each layer

* **document** (`document.py`): strict JSON with bounds; every document of an image passes through it.
* **descriptor**, **manifest**, **index**, **config** (`descriptor.py`, `manifest.py`, `config.py`): frozen values, made
  only by parsing. Unknown fields survive.
* **platform**, **selection** (`platform.py`, `selection.py`): which image of an index is meant.
* **media type** (`mediatype.py`): their names. What a layer really is, its first bytes decide.
* **reference**, **source name** (`reference.py`, `source_name.py`): what users write.
* **files** (`files.py`, `archive.py`): where bytes lie; archives are indexed, not unpacked.
* **blob** (`blob.py`): the one place where bytes from outside are checked against their descriptors.
* **source** (`source.py`, `layout.py`, `docker_archive.py`, `transport.py`): the above put together.

Everything is read-only. Values are immutable and may be shared; sources and images may be used by several threads,
each with readers of its own, until the source is closed.
"""

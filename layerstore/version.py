"""The release, and the version of everything a conversion's digests depend on."""

VERSION = "0.1.0"
"""The release. Nothing that is content-addressed depends on it."""

FORMAT_VERSION = 1
"""Layout of metadata images and packs: chunk and inline rules, order of inodes and data.

A digest depends on the input and on this number alone. To change it costs every user the deduplication between
old and new layers, so change it only for what is worth that.
"""

"""Layer archives: from a compressed stream to members, digests and random access to file data.

What goes in is a layer blob as a registry or an archive has it: a tar (v7, ustar, PAX, GNU, star) that is plain or
compressed by gzip, zstd, xz or bzip2, whatever its media type claims. What comes out::

    stream ─▶ meter ─▶ decoder ─▶ sink ─▶ spool ◀─ read_at    (file data, by offset)
              hashes   (pump       hashes   ▲
              the blob  thread)    the tar  └───── MemberReader ─▶ Member, Member, …   (the caller's thread)

* **archive** (`archive.py`): `LayerArchive`, the only class that callers need.
* **pump** (`pump.py`): two threads: one reads, hashes and decompresses the blob; one hashes and stores the result.
* **spool** (`spool.py`): the decompressed layer as an anonymous file with a watermark. A plain tar that is a file
  already is its own spool.
* **decoder** (`compression.py`): told by magic; every gzip member, zstd frame, xz and bzip2 stream is read, output is
  bounded whatever the ratio, and sizes in headers are never trusted.
* **member** (`member.py`): one entry as the archive tells it; the merge decides what its name means.
* **reader** (`reader.py`): headers to members; `pax.py` and `sparse.py` hold the extended headers and the four sparse
  maps, `format.py` the records and numbers.

What the archive says and how it is taken:

* PAX beats GNU long names beats ustar; of two headers of one kind before a member the second counts. An empty PAX
  value unsets its keyword, but an extended attribute may be empty. Global headers may set ids, times and attributes,
  never names, sizes or maps.
* Whatever breaks the format is refused with the member's name and offset: a bad checksum anywhere, numbers that are
  none, ids outside 0 to 4,294,967,294, times outside 64 bits, a cut header or body, a record with a wrong length.
* Links, directories, devices and FIFOs have no body, whatever their size field says; if one follows all the same, the
  next header is none, and the layer is refused.
* `d/` of type "0" is a directory when it is empty, and refused when it isn't. Unknown types are skipped, body included.
* A missing end marker is a warning. What follows the marker is no part of the layer, but of its digests and limits.
* Symbolic links have permissions 0777, as on Linux.

Locking: the spool's condition guards the watermark and the error; bytes below the watermark never change and are read
without it, from any thread. Everything else in the package belongs to one thread.
"""

"""One module a verb; each has ``command``. What a verb prints is decided here, what it does is in the library."""

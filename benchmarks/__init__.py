"""Measurements, each a module to run: ``python -m benchmarks.convert DIR``. See ``benchmarks/README.md``."""

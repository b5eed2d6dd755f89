"""Measures this trainer beside its references, in one run: `python -m benchmarks [NAME ...]` (make bench)."""

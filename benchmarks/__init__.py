"""Benchmarks: each module prints its numbers when it is run with `python -m`."""

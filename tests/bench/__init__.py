"""Benchmarks: figures to compare with the run before, no timed tests."""

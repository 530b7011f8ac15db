"""Benchmarks: one per stage, `python -m benchmarks` for all. Each checks its result before it times it."""

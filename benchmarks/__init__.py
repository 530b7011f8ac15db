"""Benchmarks: one per stage, `python -m benchmarks` for those on CPUs. Each checks its result before it times it."""

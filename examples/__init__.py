"""Examples; each runs on a CPU."""

"""What to run: pure numbers, no process group, no device."""

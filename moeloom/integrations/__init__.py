"""Adapters that put moeloom under other frameworks. Each needs its framework installed, and is imported by name."""

"""Adapters that put moeloom under other frameworks, imported by name. Only `transformers` needs its framework to import."""

"""Adapters that put moeloom under other frameworks. Only `transformers` needs its framework to be imported."""

"""The `moeloom` command. Nothing in the package imports it."""

"""Starting processes in tests."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """`preexec_fn` of a process that will get Ctrl-C: what a shell runs in the background starts out ignoring it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

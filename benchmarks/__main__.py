"""The stages on CPUs with their defaults, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

for stage in ("dispatch", "experts", "combine"):
    subprocess.run([sys.executable, "-m", f"benchmarks.bench_{stage}"], check=True)

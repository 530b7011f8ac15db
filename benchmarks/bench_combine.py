"""combine, beside all_to_all_single + weighted unpermute over gloo; and both directions together."""

from __future__ import annotations

from benchmarks.exchange import line, options, times


def main() -> None:
    """Print two lines: combine, and dispatch + combine."""
    chosen = options(__doc__)
    measured = times(chosen)
    print(line("combine", chosen, measured["combine"], measured["gloo combine"]))
    ours, theirs = (measured[f"{name}dispatch"] + measured[f"{name}combine"] for name in ("", "gloo "))
    print(line("dispatch + combine", chosen, ours, theirs))


if __name__ == "__main__":
    main()

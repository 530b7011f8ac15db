"""dispatch to expert-major rows, beside permute + all_to_all_single over gloo."""

from __future__ import annotations

from benchmarks.exchange import line, options, times


def main() -> None:
    """Print one line."""
    chosen = options(__doc__)
    measured = times(chosen)
    print(line("dispatch", chosen, measured["dispatch"], measured["gloo dispatch"]))


if __name__ == "__main__":
    main()

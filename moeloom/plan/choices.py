"""How tokens choose experts, as far as a plan needs it: which chance each group of experts has of being reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol


class Choices(Protocol):
    """K different experts per token, by some law."""

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """For each expert the chance that a token chooses it; they sum to K at most."""

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """For consecutive groups of experts that end at `bounds`, the chance that a token reaches the group."""


@dataclass(frozen=True)
class Uniform:
    """Every set of K experts is equally likely."""

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`: K / E each."""
        return [min(num_topk / num_experts, 1.0)] * num_experts

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`: 1 - C(E - n, K) / C(E, K), one minus the hypergeometric chance of none of n."""
        sizes = (end - begin for begin, end in zip([0, *bounds], bounds, strict=False))
        return [1.0 - _misses(num_experts, size, min(num_topk, num_experts)) for size in sizes]

    def __str__(self) -> str:
        return "uniform"


@lru_cache(maxsize=4096)
def _misses(num_experts: int, size: int, num_topk: int) -> float:
    """C(E - n, K) / C(E, K) as a product of K factors: no overflow at any E."""
    return math.prod(max(0, num_experts - size - k) / (num_experts - k) for k in range(num_topk))


@dataclass(frozen=True)
class Skewed:
    """Expert e is drawn with a weight that falls like 1 / (place ** exponent), without replacement.

    order: for each expert its place, 0 the most popular; None spreads the places over the experts by a fixed shuffle,
    so that popular experts are not neighbours.

    Drawing K without replacement is like a race in which expert e arrives after an exponential time of rate w_e, and
    the first K win (Efraimidis and Spirakis 2006). A group of experts, of rate W together, is reached if fewer than K
    of the others are there at its first arrival: the integral of W exp(-W t) P(fewer than K of the others by t) dt. It
    is taken by the trapezoid rule over log t; within 1e-5 of the exact chance.
    """

    exponent: float = 1.0
    order: tuple[int, ...] | None = None

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`."""
        return self._reached(range(1, num_experts + 1), num_experts, num_topk)

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`."""
        return list(self._reached(bounds, num_experts, num_topk))

    def _reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> tuple[float, ...]:
        if self.order is not None and len(self.order) != num_experts:
            raise ValueError(f"order has {len(self.order)} places; one for each of {num_experts} experts is needed")
        if num_topk >= num_experts:
            return tuple(float(end > begin) for begin, end in zip([0, *bounds], bounds, strict=False))
        # multiplication by an odd number far from 0 shuffles, the same everywhere
        places = self.order or tuple(sorted(range(num_experts), key=lambda e: (e * 2654435761 + 12345) % 2**32))
        return _race(tuple((place + 1.0) ** -self.exponent for place in places), tuple(bounds), num_topk)

    def __str__(self) -> str:
        return f"skewed, exponent {self.exponent:g}"


@lru_cache(maxsize=64)
def _race(weights: tuple[float, ...], bounds: tuple[int, ...], num_topk: int) -> tuple[float, ...]:
    """For each group the chance that one of its experts is among the first K; K < E."""
    rates = [math.fsum(weights[begin:end]) for begin, end in zip([0, *bounds], bounds, strict=False)]
    # from when hardly anyone is there until the last of the K is there for sure
    first = math.log(1e-6 / math.fsum(weights))
    last = math.log((40.0 + 2 * num_topk) / math.fsum(sorted(weights)[: len(weights) - num_topk + 1]))
    num_steps = math.ceil((last - first) / min(0.25, 0.7 / math.sqrt(num_topk)))
    step = (last - first) / num_steps
    sums = [0.0] * len(bounds)
    for place in range(num_steps + 1):
        time = math.exp(first + place * step)
        absent = [math.exp(-weight * time) for weight in weights]
        before, after = _present(absent, num_topk), _present(absent[::-1], num_topk)
        for group, (begin, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
            fewer = sum(map(mul, before[begin], reversed(list(accumulate(after[len(weights) - end])))))
            sums[group] += step * rates[group] * time * math.exp(-rates[group] * time) * fewer
    return tuple(sums)


def _present(absent: Sequence[float], num_topk: int) -> list[list[float]]:
    """For 0, 1, .. E first experts: the chances that 0..K-1 of them are present."""
    rows = [[1.0] + [0.0] * (num_topk - 1)]
    for chance in absent:
        row = rows[-1]
        rows.append([chance * row[0], *(chance * more + (1.0 - chance) * less for less, more in pairwise(row))])
    return rows


@dataclass(frozen=True)
class Recorded:
    """A routing that was seen: counted, not assumed. rows: for each token its expert ids, -1 for none."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; a recorded routing needs at least one token")

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`. An expert named twice by a token counts twice."""
        self._check(num_experts)
        counts = [0] * num_experts
        for row in self.rows:
            for expert in row:
                if expert >= 0:
                    counts[expert] += 1
        return [count / len(self.rows) for count in counts]

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`."""
        self._check(num_experts)
        group = [0] * num_experts
        for number, (begin, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
            group[begin:end] = [number] * (end - begin)
        counts = [0] * len(bounds)
        for row in self.rows:
            for number in {group[expert] for expert in row if expert >= 0}:
                counts[number] += 1
        return [count / len(self.rows) for count in counts]

    def _check(self, num_experts: int) -> None:
        largest = max((expert for row in self.rows for expert in row), default=-1)
        if largest >= num_experts:
            raise ValueError(f"rows name expert {largest}; allowed: 0..{num_experts - 1}, or -1 for none")

    def __str__(self) -> str:
        return f"as recorded, {len(self.rows)} tokens"

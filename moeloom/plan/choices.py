"""How tokens choose experts, as far as a plan needs it: which chance each group of experts has of being reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    the first K win (Efraimidis and Spirakis 2006). With a fixed end of the race instead of a fixed K the experts are
    independent: chance_e = 1 - exp(-c w_e), c such that they sum to K. Within 2 % of drawn routings for 16 experts up.
    """

    exponent: float = 1.0
    order: tuple[int, ...] | None = None

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`."""
        return [1.0 - math.exp(-rate) for rate in self._rates(num_experts, num_topk)]

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`: one minus the product of the chances to miss each expert of the group."""
        rates = self._rates(num_experts, num_topk)
        begins = [0, *bounds]
        return [1.0 - math.exp(-sum(rates[begin:end])) for begin, end in zip(begins, bounds, strict=False)]

    def _rates(self, num_experts: int, num_topk: int) -> tuple[float, ...]:
        if self.order is not None and len(self.order) != num_experts:
            raise ValueError(f"order has {len(self.order)} places; one for each of {num_experts} experts is needed")
        return _race(num_experts, num_topk, self.exponent, self.order)

    def __str__(self) -> str:
        return f"skewed, exponent {self.exponent:g}"


@lru_cache(maxsize=64)
def _race(num_experts: int, num_topk: int, exponent: float, order: tuple[int, ...] | None) -> tuple[float, ...]:
    """c * w_e for each expert."""
    if num_topk >= num_experts:
        return (50.0,) * num_experts  # all of them
    # multiplication by an odd number far from 0 shuffles, the same everywhere
    places = order or sorted(range(num_experts), key=lambda e: (e * 2654435761 + 12345) % 2**32)
    weights = [0.0] * num_experts
    for expert, place in enumerate(places):
        weights[expert] = (place + 1.0) ** -exponent
    low, high = 0.0, 1.0
    while sum(1.0 - math.exp(-high * w) for w in weights) < num_topk:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(1.0 - math.exp(-middle * w) for w in weights) < num_topk:
            low = middle
        else:
            high = middle
    return tuple(high * w for w in weights)


@dataclass(frozen=True)
class Recorded:
    """A routing that was seen: counted, not assumed. rows: for each token its expert ids, -1 for none."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; a recorded routing needs at least one token")

    def chances(self, num_experts: int, num_topk: int) -> Sequence[float]:
        """See `Choices`. An expert named twice by a token counts twice."""
        counts = [0] * num_experts
        for row in self.rows:
            for expert in row:
                if expert >= 0:
                    counts[expert] += 1
        return [count / len(self.rows) for count in counts]

    def reached(self, bounds: Sequence[int], num_experts: int, num_topk: int) -> list[float]:
        """See `Choices`."""
        group = [0] * num_experts
        for number, (begin, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
            group[begin:end] = [number] * (end - begin)
        counts = [0] * len(bounds)
        for row in self.rows:
            for number in {group[expert] for expert in row if expert >= 0}:
                counts[number] += 1
        return [count / len(self.rows) for count in counts]

    def __str__(self) -> str:
        return f"as recorded, {len(self.rows)} tokens"

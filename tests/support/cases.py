"""Generated cases of the exchange, and the inputs of each rank: everything follows from the case's numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st
from torch import Tensor

from moeloom import Placement, Routing, Topology

MEMBERS = {
    1: ((0,), (4,)),
    2: ((0, 1), (2, 5)),
    3: ((0, 1, 2), (1, 3, 4)),
    4: ((0, 1, 2, 3), (0, 2, 4, 5)),
    6: (tuple(range(6)),),
}

LISTED = {
    "ranks": (1, 2, 3, 4, 6),
    "nodes": (1, 2, 3),
    "tokens": (0, 1, 5, 64, 131),
    "topk": tuple(range(1, 17)),
    "experts": (1, 3, 8, 10, 33),
    "exchange": ("direct", "hybrid"),
    "order": ("expert", "rank", "batched"),
    "reduction": ("per_rank", "per_slot"),
    "weighted": (False, True),
    "dtype": ("float32", "bfloat16"),
    "skew": ("uniform", "steep", "all to one"),
    "replicas": (False, True),
    "masked": ("none", "some", "all of a rank"),
    "duplicates": (False, True),
    "contiguous": (False, True),
    "alignment": (1, 8),
    "index_dtype": ("int32", "int64"),
    "identity": (0, 2),
    "subgroup": (0, 1),
}


@dataclass(frozen=True)
class Case:
    """One exchange. `tokens` has an entry per rank; `hidden` and `seed` are not listed: any value must do."""

    ranks: int
    nodes: int
    tokens: tuple[int, ...]
    topk: int
    experts: int
    exchange: str
    order: str
    reduction: str
    weighted: bool
    dtype: str
    skew: str
    replicas: bool
    masked: str
    duplicates: bool
    contiguous: bool
    alignment: int
    index_dtype: str
    identity: int
    subgroup: int
    hidden: int = 12
    seed: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The world ranks that take part."""
        choices = MEMBERS[self.ranks]
        return choices[self.subgroup % len(choices)]

    @property
    def topology(self) -> Topology:
        return Topology.split(self.ranks, self.nodes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def placement(self) -> Placement:
        """Even, or with replicas of some experts on random ranks (also two on one rank, also a rank without any)."""
        if not self.replicas:
            return Placement.even(self.experts, self.ranks, num_identity=self.identity)
        draw = random.Random(self.seed)
        slots: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert in range(self.experts):
            for _ in range(draw.choice((1, 1, 2, 3))):
                slots[draw.randrange(self.ranks)].append(expert)
        return Placement.from_slots(slots, num_identity=self.identity)

    def inputs(self, rank: int, payload: int = 0) -> tuple[Tensor, Routing]:
        """x and routing of a rank; `payload` numbers independent draws."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * rank + payload)
        num_tokens, ids = self.tokens[rank], self.experts + self.identity
        preference = torch.zeros(ids)
        if self.skew == "steep":
            preference = -0.5 * torch.arange(ids, dtype=torch.float32)
        elif self.skew == "all to one":
            preference[0] = 1e4
        noise = -torch.log(-torch.log(torch.rand(num_tokens, ids, generator=generator)))
        order = (preference + noise).argsort(1, descending=True)
        topk_idx = torch.full((num_tokens, self.topk), -1)
        if self.duplicates or self.skew == "all to one":
            topk_idx[:] = order[:, : max(1, ids // 3)].repeat(1, self.topk)[:, : self.topk]
        else:
            topk_idx[:, : min(self.topk, ids)] = order[:, : self.topk]
        if self.masked == "some":
            topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.4] = -1
        elif self.masked == "all of a rank" and rank == 0:
            topk_idx[:] = -1
        topk_weights = torch.rand(num_tokens, self.topk, generator=generator)
        x = torch.randn(num_tokens, self.hidden, generator=generator).to(self.torch_dtype)
        topk_idx = topk_idx.to(getattr(torch, self.index_dtype))
        if not self.contiguous:
            x, topk_idx, topk_weights = (_strided(tensor) for tensor in (x, topk_idx, topk_weights))
        return x, Routing(topk_idx, topk_weights)


def _strided(tensor: Tensor) -> Tensor:
    """The same values as every other column of a wider tensor."""
    wide = tensor.new_empty(tensor.shape[0], 2 * tensor.shape[1])
    wide[:, ::2] = tensor
    return wide[:, ::2]


def is_possible(values: dict) -> bool:
    """Whether a case with these (perhaps few) values exists."""
    if values.get("nodes", 1) > values.get("ranks", 6):
        return False
    if values.get("order") == "rank" and (values.get("weighted") or values.get("reduction") == "per_slot"):
        return False
    if values.get("order") == "rank" and values.get("alignment", 1) != 1:
        return False
    return not (values.get("subgroup") and values.get("ranks") == 6)


def _draw(choose) -> Case:
    """A case from any source of choices."""
    while True:
        values = {name: choose(options) for name, options in LISTED.items() if name != "tokens"}
        if is_possible(values):
            break
        values["nodes"] = 1
        values["subgroup"] = 0
        if values["order"] == "rank":
            values["order"] = choose(("expert", "batched"))
        break
    tokens = tuple(choose(LISTED["tokens"]) for _ in range(values["ranks"]))
    return Case(tokens=tokens, hidden=choose((1, 12, 33)), seed=choose(range(1000)), **values)


def random_cases() -> st.SearchStrategy[Case]:
    """Any possible case."""
    return st.builds(lambda source: _draw(lambda options: source.choice(options)), st.randoms(use_true_random=False))


def pairs_of(case: Case) -> set[tuple]:
    """All pairs of (parameter, value) that this case shows."""
    shown = [
        (field.name, value)
        for field in fields(case)
        if field.name in LISTED
        for value in (case.tokens if field.name == "tokens" else (getattr(case, field.name),))
    ]
    return {pair for pair in itertools.combinations(sorted(set(shown), key=str), 2) if pair[0][0] != pair[1][0]}


def all_pairs() -> set[tuple]:
    """Every pair of listed values of two parameters that is possible."""
    values = sorted(((name, value) for name, options in LISTED.items() for value in options), key=str)
    return {
        pair
        for pair in itertools.combinations(values, 2)
        if pair[0][0] != pair[1][0] and is_possible({name: value for name, value in pair if name != "tokens"})
    }


def covering_cases(seed: int = 0) -> list[Case]:
    """Few cases in which every pair occurs: of some random ones, always take the one that shows most new pairs."""
    source = random.Random(seed)
    missing, cases = all_pairs(), []
    while missing:
        best = max((_draw(source.choice) for _ in range(60)), key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    return cases

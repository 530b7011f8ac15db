"""Routing on a GPU: the choice that `Router.choose` makes of the kernel's own scores, and those within a few ulp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moeloom.backends.sm90.route import MAX_EXPERTS, covered, route
from moeloom.route import GroupScore, Router, Score
from moeloom.types import Routing
from tests.support.compare import equal_bits
from tests.support.host_reads import NoHostReads

gpu = pytest.mark.gpu

SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrt_softplus")
KINDS = ("normal", "ties", "special")
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 1e-40, 88.0, -88.5, -104.0, 20.0, 20.1)
FEW_ULP = 2e-6  # relative
WINDOW = 32  # experts whose scores are asked for at once

# experts, top-k, groups, chosen groups, what ranks a group
SHAPES: list[tuple[int, int, int, int, GroupScore]] = [
    (8, 2, 1, 1, "max"),
    (48, 3, 1, 1, "max"),
    (128, 8, 1, 1, "max"),
    (160, 6, 8, 3, "max"),
    (160, 8, 5, 2, "top2_sum"),
    (256, 8, 8, 4, "top2_sum"),
    (384, 8, 1, 1, "max"),
    (896, 16, 1, 1, "max"),
    (1024, 32, 32, 7, "top2_sum"),
    (1000, 32, 1, 1, "max"),
    (992, 31, 31, 9, "top2_sum"),
    (24, 24, 4, 4, "top2_sum"),
    (31, 31, 31, 31, "top2_sum"),  # one expert in a group: there is no second
    (512, 10, 2, 1, "top2_sum"),
    (320, 9, 20, 5, "top2_sum"),
    (1, 1, 1, 1, "max"),
]

each_score = pytest.mark.parametrize("score", SCORES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors are NaN or the largest integer, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def logits_of(num_tokens: int, num_experts: int, kind: str = "normal", seed: int = 0) -> Tensor:
    """fp32 on the CPU. ties: few different ones. special: rows with many of `SPECIAL`, and rows of one number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_experts, generator=generator) * 2
    if kind == "ties":
        return x.round()
    if kind == "special":
        chosen = torch.rand(x.shape, generator=generator) < torch.rand(num_tokens, 1, generator=generator)
        x[chosen] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(chosen.sum()),), generator=generator)]
        for row, value in enumerate((math.nan, -math.inf, math.inf, 0.0, -1e30)[:num_tokens]):
            x[row] = value
    return x


def biases(num_experts: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(num_experts)
    normal = torch.randn(num_experts, generator=generator) * 0.3
    broken = normal.clone()
    broken[torch.rand(num_experts, generator=generator) < 0.1] = math.nan
    broken[0] = -math.inf
    return {"none": None, "normal": normal, "ties": (normal * 4).round() / 2, "broken": broken}


def scores_on_gpu(score: Score, logits: Tensor) -> Tensor:
    """Every expert's score as the kernel has it, on the CPU; NaN where it is NaN.

    It tells those of the experts that it chooses: a window of them, if a bias of NaN puts all others last.
    """
    num_experts = logits.shape[1]
    router = Router(min(WINDOW, num_experts), score, normalize=False)
    scores = torch.full(logits.shape, math.nan)
    for begin in range(0, num_experts, WINDOW):
        bias = torch.full((num_experts,), math.nan, device="cuda")
        bias[begin : begin + WINDOW] = 0.0
        routing = route(router, logits, bias)
        scores.scatter_(1, routing.topk_idx.cpu(), routing.topk_weights.cpu())
    return scores


def check(router: Router, routing: Routing, scores: Tensor, bias: Tensor | None) -> None:
    """The choice is exact; weights are those of the scores, NaN where those are."""
    assert routing.topk_idx.dtype == torch.int64 and routing.topk_weights.dtype == torch.float32
    ids = router.choose(scores if bias is None else scores + bias)
    assert torch.equal(routing.topk_idx.cpu(), ids)
    torch.testing.assert_close(
        routing.topk_weights.cpu(), router.weigh(scores, ids), rtol=FEW_ULP, atol=0.0, equal_nan=True
    )


@gpu
@pytest.mark.usefixtures("poisoned_memory")
@each_score
@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choice(shape: tuple[int, int, int, int, GroupScore], kind: str, dtype: torch.dtype, score: Score) -> None:
    num_experts, num_topk, *groups = shape
    logits = logits_of(33, num_experts, kind, seed=num_topk).to(dtype)
    on_gpu = logits.cuda()
    scores = scores_on_gpu(score, on_gpu)
    truth = Router(1, score, normalize=False).scores(logits)
    torch.testing.assert_close(scores, truth, rtol=FEW_ULP, atol=1e-44, equal_nan=True)
    for normalize in (False, True)[: 1 + (num_topk > 1)]:
        router = Router(num_topk, score, *groups, normalize=normalize, scale=2.5)
        for bias in biases(num_experts).values():
            routing = route(router, on_gpu, None if bias is None else bias.cuda())
            check(router, routing, scores, bias)


@gpu
@each_score
def test_where_scores_are_far_apart_or_equal_the_ids_are_the_cpus(score: Score) -> None:
    logits = (logits_of(512, 256, seed=3) * 2).round() / 4
    bias = biases(256)["ties"]
    assert bias is not None
    for router in (Router(8, score), Router(8, score, 8, 4, "max")):
        assert torch.equal(route(router, logits.cuda()).topk_idx.cpu(), router(logits).topk_idx)
        assert torch.equal(route(router, logits.cuda(), bias.cuda()).topk_idx.cpu(), router(logits, bias).topk_idx)


@gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 1023, 8192])
def test_any_number_of_tokens(num_tokens: int) -> None:
    router, logits = Router(8, "sigmoid", 8, 4, scale=2.5), logits_of(num_tokens, 256, seed=num_tokens).cuda()
    bias = biases(256)["normal"]
    assert bias is not None
    routing = route(router, logits, bias.cuda())
    assert routing.topk_idx.shape == routing.topk_weights.shape == (num_tokens, 8)
    some = torch.arange(0, num_tokens, 1 + num_tokens // 64)
    check(router, Routing(routing.topk_idx[some], routing.topk_weights[some]), sliced_scores(logits, some), bias)
    if num_tokens:
        alone = route(router, logits[-1:], bias.cuda())
        assert torch.equal(alone.topk_idx, routing.topk_idx[-1:])
        assert equal_bits(alone.topk_weights.cpu(), routing.topk_weights[-1:].cpu())


def sliced_scores(logits: Tensor, rows: Tensor) -> Tensor:
    return scores_on_gpu("sigmoid", logits[rows.to(logits.device)])


@gpu
def test_rows_may_lie_apart() -> None:
    wide = torch.full((40, 300), math.nan, device="cuda", dtype=torch.bfloat16)
    logits = logits_of(40, 161).bfloat16()
    wide[:, 7:168] = logits.cuda()
    router = Router(6)
    got, wanted = route(router, wide[:, 7:168]), route(router, logits.cuda())
    assert torch.equal(got.topk_idx, wanted.topk_idx)
    assert equal_bits(got.topk_weights.cpu(), wanted.topk_weights.cpu())


@gpu
@each_score
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_the_routers(normalize: bool, score: Score) -> None:
    router = Router(4, score, 4, 2, normalize=normalize, scale=1.5)
    logits = logits_of(17, 64, seed=1)
    factors = torch.arange(1.0, 5.0)
    ours, theirs = logits.clone().cuda().requires_grad_(), logits.clone().requires_grad_()
    bias = torch.zeros(64, device="cuda", requires_grad=True)
    routing, wanted = route(router, ours, bias), router(theirs)
    assert torch.equal(routing.topk_idx.cpu(), wanted.topk_idx)
    (routing.topk_weights * factors.cuda()).sum().backward()
    (wanted.topk_weights * factors).sum().backward()
    assert ours.grad is not None and bias.grad is None
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not route(router, ours).topk_weights.requires_grad


@gpu
def test_a_graph_replays() -> None:
    router, logits = Router(8, "sigmoid", 8, 4), logits_of(16, 256).cuda()
    with NoHostReads():
        route(router, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = route(router, logits)
    for seed in (1, 2):
        logits.copy_(logits_of(16, 256, seed=seed))
        graph.replay()
        wanted = route(router, logits)
        assert torch.equal(routing.topk_idx, wanted.topk_idx)
        assert torch.equal(routing.topk_weights, wanted.topk_weights)


ELSEWHERE = {
    "fp16": (Router(8), lambda: logits_of(9, 64).half()),
    "many experts": (Router(8), lambda: logits_of(9, MAX_EXPERTS + 1)),
    "many choices": (Router(33), lambda: logits_of(9, 64)),
    "many groups": (Router(8, "sigmoid", 64, 32), lambda: logits_of(9, 256)),
    "columns apart": (Router(8), lambda: logits_of(64, 9).t()),
}


@gpu
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_router_does_on_the_gpu_what_the_kernel_cannot(name: str) -> None:
    router, make = ELSEWHERE[name]
    logits = make()
    assert not covered(router, logits.cuda())
    got, wanted = route(router, logits.cuda()), router(logits)
    assert got.topk_idx.is_cuda and got.topk_weights.is_cuda
    # where scores are nearly equal, the order may be another
    clear = torch.tensor([all(a - b > 1e-5 * a for a, b in pairwise(row)) for row in wanted.topk_weights.tolist()])
    assert clear.any() and torch.equal(got.topk_idx.cpu()[clear], wanted.topk_idx[clear])
    torch.testing.assert_close(got.topk_weights.cpu(), wanted.topk_weights, rtol=1e-5, atol=1e-7)


def test_on_a_cpu_it_is_the_router() -> None:
    router, logits = Router(8, "sigmoid", 8, 4), logits_of(9, 64)
    got, wanted = route(router, logits), router(logits)
    assert torch.equal(got.topk_idx, wanted.topk_idx) and torch.equal(got.topk_weights, wanted.topk_weights)


@pytest.mark.parametrize(
    ("router", "logits", "bias", "message"),
    [
        (Router(2), torch.zeros(3), None, "^logits has shape"),
        (Router(2), torch.zeros(3, 4, dtype=torch.int64), None, "^logits has shape"),
        (Router(2), torch.zeros(3, 4), torch.zeros(5), "^bias has shape"),
        (Router(2), torch.zeros(3, 4), torch.zeros(4, device="meta"), "^bias is on meta; it must be .* on cpu"),
        (Router(2, num_groups=3), torch.zeros(3, 8), None, "num_groups, 3, must divide"),
        (Router(5), torch.zeros(3, 4), None, "^num_topk is 5"),
    ],
)
def test_errors_are_the_routers(router: Router, logits: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(router, logits, bias)

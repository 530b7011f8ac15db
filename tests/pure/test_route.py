"""`moeloom.route` against plain loops, against what it promises for broken input, and against transformers' routers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeloom.route import GroupScore, Router, Score, hash_route, mask_tokens
from moeloom.types import Routing

SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrt_softplus")


def random_logits(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * 2


def random_bias(num_experts: int, seed: int = 1) -> Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(seed)) * 0.3


def oracle_scores(row: list[float], score: Score) -> list[float]:
    """fp64, by the definitions."""
    if score == "softmax":
        top = max(row)
        exps = [math.exp(x - top) for x in row]
        return [x / sum(exps) for x in exps]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(math.log1p(math.exp(x))) for x in row]


def oracle_row(router: Router, row: list[float], bias: list[float]) -> tuple[list[int], list[float]]:
    """One token, by loops over groups and experts."""
    scores = oracle_scores(row, router.score)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(row) // router.num_groups
    ranking = []
    for group in range(router.num_groups):
        members = sorted(choice[group * size : (group + 1) * size], reverse=True)
        ranking.append(members[0] if router.group_score == "max" else sum(members[:2]))
    kept = sorted(range(router.num_groups), key=lambda g: (-ranking[g], g))[: router.num_topk_groups]
    eligible = [e for e in range(len(row)) if e // size in kept]
    ids = sorted(eligible, key=lambda e: (-choice[e], e))[: router.num_topk]
    weights = [scores[e] for e in ids]
    if router.normalize:
        weights = [w / (sum(scores[e] for e in ids) + 1e-20) for w in weights]
    return ids, [w * router.scale for w in weights]


def check_ids(routing: Routing, num_experts: int) -> None:
    ids = routing.topk_idx
    assert ids.dtype == torch.int64 and routing.topk_weights.dtype == torch.float32
    assert ids.shape == routing.topk_weights.shape
    if ids.numel():
        assert 0 <= int(ids.min()) and int(ids.max()) < num_experts
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_topk", "num_groups", "num_topk_groups", "group_score"),
    [
        (8, 2, 1, 1, "top2_sum"),
        (48, 3, 1, 1, "top2_sum"),
        (160, 6, 8, 3, "max"),
        (160, 8, 5, 2, "top2_sum"),
        (256, 8, 8, 4, "top2_sum"),
        (896, 16, 1, 1, "top2_sum"),
        (24, 24, 4, 4, "top2_sum"),
        (6, 2, 6, 2, "top2_sum"),  # one expert per group: there is no second to add
    ],
)
def test_equals_plain_loops(
    score: Score,
    with_bias: bool,
    num_experts: int,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    group_score: GroupScore,
) -> None:
    bias = random_bias(num_experts) if with_bias else None
    for normalize in (False, True):
        router = Router(num_topk, score, num_groups, num_topk_groups, group_score, normalize, 2.5)
        logits = random_logits(33, num_experts)
        routing = router(logits, bias)
        check_ids(routing, num_experts)
        for token, row in enumerate(logits.double().tolist()):
            ids, weights = oracle_row(router, row, [0.0] * num_experts if bias is None else bias.double().tolist())
            assert routing.topk_idx[token].tolist() == ids
            assert routing.topk_weights[token].tolist() == pytest.approx(weights, rel=1e-5, abs=1e-7)


def test_softmax_normalized_is_softmax_of_the_chosen_logits() -> None:
    logits = random_logits(64, 128)
    routing = Router(4)(logits)
    values, ids = logits.topk(4)
    assert torch.equal(routing.topk_idx, ids)
    torch.testing.assert_close(routing.topk_weights, values.softmax(-1))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_normalized_weights_sum_to_scale(score: Score, scale: float) -> None:
    routing = Router(8, score, scale=scale)(random_logits(100, 48), random_bias(48))
    torch.testing.assert_close(routing.topk_weights.sum(-1), torch.full((100,), scale))


def test_scale_is_applied_once() -> None:
    logits = random_logits(10, 32)
    plain = Router(4, normalize=False)(logits)
    scaled = Router(4, normalize=False, scale=16.0)(logits)
    assert torch.equal(plain.topk_idx, scaled.topk_idx)
    assert torch.equal(plain.topk_weights * 16.0, scaled.topk_weights)


def test_bias_moves_the_choice_and_not_the_weights() -> None:
    router = Router(2, "sigmoid", normalize=False)
    logits = random_logits(20, 8)
    bias = torch.zeros(8)
    bias[5] = 10.0
    routing = router(logits, bias)
    assert (routing.topk_idx[:, 0] == 5).all()
    assert torch.equal(routing.topk_weights[:, 0], logits[:, 5].sigmoid())
    assert torch.equal(router(logits, torch.full((8,), 3.0)).topk_weights, router(logits).topk_weights)


@pytest.mark.parametrize("num_topk", [1, 4, 16])
def test_ties_go_to_the_lower_id(num_topk: int) -> None:
    router = Router(num_topk, "sigmoid", normalize=False)
    assert router(torch.zeros(5, 896)).topk_idx.tolist() == [list(range(num_topk))] * 5
    logits = torch.zeros(1, 64)
    logits[0, 40] = logits[0, 50] = 1.0
    assert router(logits).topk_idx[0].tolist() == ([40, 50] + list(range(14)))[:num_topk]


def test_tied_groups_go_to_the_lower_group() -> None:
    assert Router(4, "sigmoid", 8, 2)(torch.zeros(3, 32)).topk_idx.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_nan_row_stays_one_row_with_distinct_ids(score: Score, groups: tuple[int, int], normalize: bool) -> None:
    router = Router(6, score, *groups, normalize=normalize)
    logits, bias = random_logits(9, 32), random_bias(32)
    want = router(logits, bias)
    broken = logits.clone()
    broken[4] = math.nan
    got = router(broken, bias)
    check_ids(got, 32)
    rest = torch.arange(9) != 4
    assert torch.equal(got.topk_idx[rest], want.topk_idx[rest])
    assert torch.equal(got.topk_weights[rest], want.topk_weights[rest])
    assert got.topk_idx[4].tolist() == list(range(6))
    assert got.topk_weights[4].isnan().all()


def test_a_nan_expert_is_chosen_last() -> None:
    logits = random_logits(7, 8)
    logits[:, 3] = math.nan
    bias = torch.full((8,), -2.0)  # every other biased score is negative
    routing = Router(7, "sigmoid", normalize=False)(logits, bias)
    assert not (routing.topk_idx == 3).any() and routing.topk_weights.isfinite().all()
    everyone = Router(8, "sigmoid", normalize=False)(logits, bias)
    assert (everyone.topk_idx[:, -1] == 3).all() and everyone.topk_weights[:, -1].isnan().all()


def test_nan_inside_a_chosen_group_does_not_leak_the_choice_out_of_it() -> None:
    logits = torch.tensor([[5.0, 5.0, math.nan, math.nan, -5.0, -5.0, -5.0, -5.0]])
    routing = Router(4, "sigmoid", 2, 1, normalize=False)(logits)
    assert routing.topk_idx.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("fill", [-math.inf, math.inf, -1e30, 1e30, 1e-40])
def test_extreme_rows_keep_distinct_ids(score: Score, fill: float) -> None:
    check_ids(Router(8, score, 4, 2)(torch.full((3, 48), fill)), 48)


def test_normalizing_zero_scores_gives_zero_weights() -> None:
    routing = Router(4, "sigmoid")(torch.full((2, 16), -1e4))
    assert torch.equal(routing.topk_weights, torch.zeros(2, 4))


@pytest.mark.parametrize("router", [Router(8), Router(16, "sigmoid", 8, 4, scale=2.5), Router(6, "sqrt_softplus")])
@pytest.mark.parametrize("num_experts", [48, 160, 896])
def test_no_tokens(router: Router, num_experts: int) -> None:
    routing = router(torch.empty(0, num_experts), torch.zeros(num_experts))
    assert routing.topk_idx.shape == routing.topk_weights.shape == (0, router.num_topk)
    check_ids(routing, num_experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_is_routed_in_fp32(dtype: torch.dtype) -> None:
    logits = random_logits(20, 64).to(dtype)
    got, want = Router(8, "sigmoid")(logits), Router(8, "sigmoid")(logits.float())
    assert torch.equal(got.topk_idx, want.topk_idx) and torch.equal(got.topk_weights, want.topk_weights)


def test_a_token_does_not_depend_on_its_batch() -> None:
    router, logits, bias = Router(8, "sigmoid", 8, 4), random_logits(50, 256).round(), random_bias(256).round()
    whole = router(logits, bias)
    for token in (0, 17, 49):
        alone = router(logits[token : token + 1], bias)
        assert torch.equal(alone.topk_idx[0], whole.topk_idx[token])
        assert torch.equal(alone.topk_weights[0], whole.topk_weights[token])


@pytest.mark.parametrize("score", SCORES)
def test_gradient_reaches_the_logits_and_is_finite(score: Score) -> None:
    logits = random_logits(6, 16).double()
    logits[0, :8] = -200.0  # softplus underflows in fp32
    logits.requires_grad_()
    bias = random_bias(16).requires_grad_()
    routing = Router(4, score, scale=2.0)(logits, bias)
    assert not routing.topk_idx.requires_grad
    (routing.topk_weights * torch.arange(1.0, 5.0)).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad.abs().sum(-1) > 0).all()
    assert bias.grad is None


def test_gradient_is_the_derivative() -> None:
    bias = -10.0 * torch.arange(12)  # far apart, so that no step changes the choice

    def weights(logits: Tensor) -> Tensor:
        return Router(3, "sigmoid", 4, 2, scale=1.5)(logits, bias).topk_weights

    logits = random_logits(4, 12)
    direction = random_logits(4, 12, seed=5)
    _, slope = torch.autograd.functional.jvp(weights, logits, direction)
    step = 1e-2
    numeric = (weights(logits + step * direction) - weights(logits - step * direction)) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_topk": 0}, "num_topk"),
        ({"num_topk": 2.0}, "num_topk"),
        ({"num_topk": 2, "num_groups": 0}, "num_groups"),
        ({"num_topk": 2, "num_topk_groups": 0}, "num_topk_groups"),
        ({"num_topk": 2, "num_groups": 2, "num_topk_groups": 3}, "num_topk_groups"),
        ({"num_topk": 2, "score": "relu"}, "score"),
        ({"num_topk": 2, "group_score": "mean"}, "group_score"),
        ({"num_topk": 2, "scale": 0.0}, "scale"),
        ({"num_topk": 2, "scale": math.nan}, "scale"),
    ],
)
def test_construction_names_the_wrong_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        Router(**fields)


@pytest.mark.parametrize(
    ("router", "logits", "bias", "name"),
    [
        (Router(2), torch.zeros(3), None, "logits"),
        (Router(2), torch.zeros(3, 4, dtype=torch.int64), None, "logits"),
        (Router(2), torch.zeros(3, 4), torch.zeros(5), "bias"),
        (Router(2, num_groups=3), torch.zeros(3, 8), None, "num_groups"),
        (Router(5), torch.zeros(3, 4), None, "num_topk"),
        (Router(5, num_groups=4, num_topk_groups=2), torch.zeros(3, 8), None, "num_topk"),
    ],
)
def test_call_names_the_wrong_argument(router: Router, logits: Tensor, bias: Tensor | None, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        router(logits, bias)


def test_a_router_that_cannot_train_warns() -> None:
    with pytest.warns(UserWarning, match="never trains") as caught:
        Router(1)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Router(1, "sigmoid", normalize=False)
        Router(2)


def test_hash_route_takes_ids_from_the_table_and_weights_from_the_scores() -> None:
    router = Router(3, "sqrt_softplus", scale=1.5)
    table = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:3] for i in range(50)])
    token_ids = torch.tensor([7, 0, 49, 7])
    logits = random_logits(4, 16)
    routing = hash_route(token_ids, table.int(), logits, router)
    check_ids(routing, 16)
    assert torch.equal(routing.topk_idx, table[token_ids])
    for token, row in enumerate(logits.double().tolist()):
        scores = [oracle_scores(row, "sqrt_softplus")[e] for e in table[token_ids[token]].tolist()]
        assert routing.topk_weights[token].tolist() == pytest.approx([1.5 * s / sum(scores) for s in scores], rel=1e-5)
    empty = hash_route(token_ids[:0], table, logits[:0], router)
    assert empty.topk_idx.shape == empty.topk_weights.shape == (0, 3)


@pytest.mark.parametrize(
    ("token_ids", "table", "name"),
    [
        (torch.zeros(4, 1, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int64), "token_ids"),
        (torch.zeros(4), torch.zeros(5, 3, dtype=torch.int64), "token_ids"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int64), "token_ids"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(5, 3), "table"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(5, 2, dtype=torch.int64), "table"),
    ],
)
def test_hash_route_names_the_wrong_argument(token_ids: Tensor, table: Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} has"):
        hash_route(token_ids, table, torch.zeros(4, 8), Router(3))


def test_hash_route_does_not_wrap_a_negative_token_id() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        hash_route(torch.tensor([-1]), torch.zeros(5, 3, dtype=torch.int64), torch.zeros(1, 8), Router(3))


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_mask_tokens_takes_padding_out(idx_dtype: torch.dtype) -> None:
    logits = random_logits(5, 16)
    logits[1] = math.nan
    routed = Router(4)(logits)
    routing = Routing(routed.topk_idx.to(idx_dtype), routed.topk_weights)
    before = routing.topk_idx.clone()
    valid = torch.tensor([True, False, True, False, True])
    masked = mask_tokens(routing, valid)
    assert masked.topk_idx.dtype == idx_dtype
    assert (masked.topk_idx[~valid] == -1).all() and (masked.topk_weights[~valid] == 0).all()
    assert torch.equal(masked.topk_idx[valid], routing.topk_idx[valid])
    assert torch.equal(masked.topk_weights[valid], routing.topk_weights[valid])
    assert torch.equal(routing.topk_idx, before)


@pytest.mark.parametrize("valid", [torch.ones(4, dtype=torch.bool), torch.ones(5), torch.ones(5, 1, dtype=torch.bool)])
def test_mask_tokens_names_the_wrong_mask(valid: Tensor) -> None:
    with pytest.raises(ValueError, match="^valid has"):
        mask_tokens(Router(2)(torch.zeros(5, 8)), valid)


def test_the_recorded_routing_is_legal_and_uneven() -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a safetensors file")
    recorded = safetensors.load_file(Path(__file__).parents[1] / "assets" / "routing_qwen3moe_stdlib.safetensors")
    ids, weights = recorded["topk_idx"], recorded["topk_weights"]
    assert ids.dtype == torch.int32 and ids.shape == weights.shape == (4096, 4)
    check_ids(Routing(ids.long(), weights), 32)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4096))
    load = torch.bincount(ids.flatten(), minlength=32).float()
    assert load.min() > 0 and 2 * load.mean() < load.max() < 8 * load.mean()


def transformers_class(module: str, name: str) -> Any:
    found = pytest.importorskip(f"transformers.models.{module}.modeling_{module}", reason="compares with transformers")
    return getattr(found, name)


TRANSFORMERS_ROUTERS = [
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
        },
        Router(6, "softmax", 8, 3, "max", normalize=False, scale=16.0),
    ),
    ("deepseek_v3", "DeepseekV3TopkRouter", {}, Router(8, "sigmoid", 8, 4, scale=2.5)),
    ("deepseek_v4", "DeepseekV4TopKRouter", {}, Router(6, "sqrt_softplus", scale=1.5)),
    ("glm4_moe", "Glm4MoeTopkRouter", {"routed_scaling_factor": 2.5}, Router(8, "sigmoid", scale=2.5)),
    ("gpt_oss", "GptOssTopKRouter", {}, Router(4)),
    ("longcat_flash", "LongcatFlashTopkRouter", {}, Router(12, normalize=False, scale=6.0)),
    ("mixtral", "MixtralTopKRouter", {}, Router(2)),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, Router(8)),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}, Router(8, normalize=False)),
]
CONFIG_NAMES = {
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "deepseek_v4": "DeepseekV4Config",
    "glm4_moe": "Glm4MoeConfig",
    "gpt_oss": "GptOssConfig",
    "longcat_flash": "LongcatFlashConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}


def by_expert(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """`[T, E]`: transformers leaves the order of the slots open."""
    return torch.zeros(len(ids), num_experts).scatter(-1, ids, weights.float())


@pytest.mark.parametrize(("module", "name", "changes", "router"), TRANSFORMERS_ROUTERS)
def test_equals_transformers(module: str, name: str, changes: dict[str, Any], router: Router) -> None:
    theirs_class = transformers_class(module, name)
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    config = getattr(transformers, CONFIG_NAMES[module])(hidden_size=32, **changes)
    torch.manual_seed(0)
    theirs = theirs_class(config).float()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    bias = getattr(theirs, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(std=0.1)
    hidden = torch.randn(200, 32)
    with torch.no_grad():
        logits, weights, ids = theirs(hidden)
    ours = router(logits, bias)
    check_ids(ours, logits.shape[1])
    torch.testing.assert_close(
        by_expert(ours.topk_idx, ours.topk_weights, logits.shape[1]),
        by_expert(ids, weights, logits.shape[1]),
        rtol=1e-5,
        atol=1e-6,
    )


def test_hash_route_equals_transformers() -> None:
    theirs_class = transformers_class("deepseek_v4", "DeepseekV4HashRouter")
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    torch.manual_seed(0)
    theirs = theirs_class(transformers.DeepseekV4Config(hidden_size=32, vocab_size=300))
    torch.nn.init.normal_(theirs.weight, std=0.3)
    theirs.tid2eid.copy_(torch.rand(300, 256).argsort(-1)[:, :6])
    token_ids = torch.randint(300, (200,))
    with torch.no_grad():
        logits, weights, ids = theirs(torch.randn(200, 32), token_ids)
    ours = hash_route(token_ids, theirs.tid2eid, logits, Router(6, "sqrt_softplus", scale=1.5))
    assert torch.equal(ours.topk_idx, ids)
    torch.testing.assert_close(ours.topk_weights, weights)

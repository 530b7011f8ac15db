"""Tiny models of real architectures, and what the ranks of the transformers tests do. No test lives here."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.23")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, DistributedConfig  # noqa: E402
from transformers.distributed import expert_parallel  # noqa: E402

from moeloom import CapabilityError, MoeloomError  # noqa: E402
from moeloom.integrations import transformers as adapter  # noqa: E402

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

NUM_RANKS = 4
MESHES = {
    "tp4 ep4": {"tp_size": 4, "ep_size": 4},
    "fsdp4 ep4": {"fsdp_size": 4, "ep_size": 4},
    "tp2 fsdp2 ep4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "fsdp4 ep2": {"fsdp_size": 4, "ep_size": 2},
}
NUM_STEPS = 3
RATE = 0.1

_common = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,  # the default makes every logit nearly the same
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_grouped = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 48,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": None},
    "DeepseekV3": {
        **_grouped,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "GptOss": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 8},
    "Glm4Moe": {**_grouped, "use_qk_norm": True},
    "Qwen3Next": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "intermediate_size": 48,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


# transformers' TP plan for GLM-4.5 forgets these (Qwen3's has them): each rank keeps the gradient of its own heads
_norms = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
TP_PLANS = {"Glm4Moe": _norms}

# experts modules of every kind: gated, interleaved with biases, without a gate, with a norm behind
EXPERTS = {"Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss", "NemotronH": "nemotron_h", "MuseSpark": "muse_spark"}


def build(name: str, path: str, *, swapped: bool = False, biased: bool = False) -> None:
    """Save a randomly initialised model of that architecture.

    swapped: the first and the last expert of each layer change places. biased: every token goes to experts 0 and 1.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_common, **CONFIGS[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in key:  # these start at zero
                tensor.normal_(std=0.1)
            if swapped and ".mlp.experts." in key:
                tensor.copy_(tensor[[7, *range(1, 7), 0]])
            if biased and key.endswith("router.bias"):
                tensor[:2] += 100
    model.save_pretrained(path)


def build_dense(path: str) -> None:
    """Save a model without experts."""
    config = transformers.LlamaConfig(**{**_common, "intermediate_size": 48})
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def batches(count: int) -> list[Tensor]:
    """Token ids, different ones and differently many for each batch."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 96, (2, 5 + 2 * index), generator=generator) for index in range(count)]


def generate(model: nn.Module) -> Tensor:
    prompt = torch.tensor([[5, 17, 42], [3, 7, 11]])
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.named_parameters()}


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor.grad) for name, tensor in model.named_parameters()}


def step(model: nn.Module) -> None:
    """Plain SGD; torch's own groups tensors for its kernels, and refuses sharded ones beside others."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor -= RATE * tensor.grad
            tensor.grad = None


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def distances(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {name: distance(tensor, wanted[name]) for name, tensor in found.items()}


def load(path: str, **options: Any) -> nn.Module:
    options = {"dtype": torch.float32, "experts_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(path, **options).train()


def load_parallel(path: str, mesh: str, *, plans: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    adapter.register()
    config = DistributedConfig(**MESHES[mesh], **(plans or {}), ep_implementation="moeloom")
    return load(path, distributed_config=config, **options)


def reference(path: str, num_batches: int, **options: Any) -> dict[str, Any]:
    """What transformers computes alone, eagerly: tokens, logits, gradients of the mean loss, change by three steps."""
    model = load(path, **options)
    found: dict[str, Any] = {"tokens": generate(model)}
    before = weights_of(model)
    for number in range(NUM_STEPS):
        outputs = [model(input_ids=ids, labels=ids) for ids in batches(num_batches)]
        (sum(output.loss for output in outputs) / num_batches).backward()
        if number == 0:
            found["logits"] = [output.logits.detach() for output in outputs]
            found["grads"] = grads_of(model)
        step(model)
    found["change"] = {name: tensor - before[name] for name, tensor in weights_of(model).items()}
    return found


@contextmanager
def others_forbidden() -> Iterator[None]:
    """transformers' own implementations raise if they are called."""

    def refuse(self: object, *_: Any) -> None:
        raise AssertionError(f"{type(self).__name__} ran instead of moeloom")

    others = [expert_parallel.AllToAllEP, expert_parallel.AllReduceEP, expert_parallel.AutoEP]
    calls = [cls.__call__ for cls in others]
    for cls in others:
        cls.__call__ = refuse
    try:
        yield
    finally:
        for cls, call in zip(others, calls, strict=True):
            cls.__call__ = call


def compare(path: str, wanted_path: str, mesh: str, checkpointing: bool, options: dict[str, Any]) -> dict[str, Any]:
    """On a rank: how far logits, gradients and the change by three steps are from the reference, and what moved."""
    wanted = torch.load(wanted_path)
    model = load_parallel(path, mesh, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    (runtime,) = adapter.runtimes()
    found: dict[str, Any] = {"replaced": adapter.replaced_modules(model), "runtime": runtime}
    found["tokens"] = bool(torch.equal(generate(model), wanted["tokens"]))
    before = weights_of(model)
    batch = dist.get_rank() // MESHES[mesh].get("tp_size", 1)
    ids = batches(NUM_RANKS)[batch]
    for number in range(NUM_STEPS):
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        if number == 0:
            found["logits"] = distance(whole(output.logits), wanted["logits"][batch])
            found["grads"] = distances(grads_of(model), wanted["grads"])
        step(model)
    change = {name: tensor - before[name] for name, tensor in weights_of(model).items()}
    found["change"] = distances(change, wanted["change"])
    return found


def compare_and_forget(*args: Any) -> dict[str, Any]:
    """On a rank: `compare`, and that the model's end is its Runtime's."""
    with others_forbidden():
        found = compare(*args)
    gc.collect()
    assert adapter.runtimes() == []
    runtime = found.pop("runtime")
    with pytest.raises(MoeloomError, match="closed"):
        runtime.symmetric_bytes()
    return {**found, "stats": runtime.stats()}


def experts_module(name: str, implementation: str = "eager") -> nn.Module:
    """An experts module alone, with random weights; the same on all ranks."""
    sizes = {"hidden_size": 64, "moe_hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    counts = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 8)
    gpt_oss = {"swiglu_alpha": 1.702, "swiglu_limit": 1.0}
    others = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None, "post_norm_eps": 1e-6}
    config = SimpleNamespace(**sizes, **counts, **gpt_oss, **others, _experts_implementation=implementation)
    modeling = importlib.import_module(f"transformers.models.{EXPERTS[name]}.modeling_{EXPERTS[name]}")
    experts = getattr(modeling, f"{name}Experts")(config)
    torch.manual_seed(3)
    for tensor in experts.parameters():
        nn.init.normal_(tensor, std=0.2)
    return experts


def call_experts(experts: nn.Module, ids: list[list[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """An experts module's output for tokens with these ids, and all gradients there are."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(ids), 64, generator=generator).requires_grad_()
    weights = torch.rand(len(ids), len(ids[0]), generator=generator).to(dtype).requires_grad_()
    y = experts(x, torch.tensor(ids), weights)
    experts.zero_grad()
    if not y.requires_grad:  # no token went anywhere
        return {"y": y}
    (y * torch.randn(y.shape, generator=generator)).sum().backward()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads_of(experts)}


def compare_experts(name: str, tokens: dict[str, list[list[int]]], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """On a rank: how far an experts module shared by four ranks is from the module alone, in outputs and gradients."""
    adapter.register()
    alone, parent = experts_module(name), nn.Module()
    parent.experts = experts_module(name)
    sharded = [f"experts.{key}" for key, _ in parent.experts.named_parameters(recurse=False)]
    plan = {**dict.fromkeys(sharded, "grouped_gemm"), "experts": "ep_dispatch_experts"}
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    expert_parallel.apply_expert_parallelism(parent, mesh, mesh, plan, ep_implementation="moeloom")
    found = {}
    for case, ids in tokens.items():
        wanted, ours = (call_experts(experts, ids, dtype) for experts in (alone, parent.experts))
        for key in ours:
            if "norm" in key:  # transformers replicates it and leaves its gradient to whoever reduces replicated ones
                dist.all_reduce(ours[key])
        found[case] = {key: float((ours[key] - wanted[key]).float().norm()) for key in wanted}
    return found


def models_side_by_side(path: str) -> list[int]:
    """On a rank: how many Runtimes live with one model, with a second one beside it, after the first has gone."""
    gc.collect()  # models of earlier calls
    first = load_parallel(path, "tp4 ep4")
    counts = [len(adapter.runtimes())]
    second = load_parallel(path, "fsdp4 ep4")
    counts.append(len(adapter.runtimes()))
    generate(first)
    generate(second)
    del first
    gc.collect()
    counts.append(len(adapter.runtimes()))
    generate(second)
    assert adapter.runtimes()[0].stats()["dispatch"].calls == 2 * 2 * 4  # runs, layers, tokens
    return counts


def alone_in_a_world() -> float:
    """On a rank: how far `experts_implementation="moeloom"` is from eager where each rank is for itself."""
    adapter.register()
    ids = [[0, 1]] * (1 + dist.get_rank())
    wanted, found = (
        call_experts(experts_module("GptOss", which), ids, torch.float32) for which in ("eager", "moeloom")
    )
    return max(float((found[key] - wanted[key]).norm()) for key in wanted)


def refusals(path: str, dense: str) -> dict[str, str]:
    """On a rank: what is said where nothing would run through moeloom."""
    found = {}
    with pytest.raises(ValueError) as refused:
        load_parallel(dense, "tp4 ep4")
    found["no plan"] = str(refused.value)

    # transformers applies no rule of such a plan, without a word
    other = {"ep_plan": {"model.layers.*.mlp.experts": "grouped_gemm"}}
    with pytest.raises(ValueError) as refused:
        adapter.replaced_modules(load_parallel(path, "tp4 ep4", plans=other))
    found["no dispatch"] = str(refused.value)

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    with pytest.raises(ValueError) as refused:
        adapter.MoeloomEP(load(path).model.layers[0].mlp.experts, mesh, mesh)
    found["not sharded"] = str(refused.value)

    with pytest.raises(CapabilityError) as refused:
        generate(load_parallel(path, "tp4 ep4", experts_implementation="moeloom"))
    found["both"] = str(refused.value)
    return found

"""Tiny models of real architectures, and what the ranks of the transformers tests do. No test lives here."""

from __future__ import annotations

from contextlib import contextmanager
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, DistributedConfig  # noqa: E402
from transformers.distributed import expert_parallel  # noqa: E402

from moeloom.integrations import transformers as adapter  # noqa: E402

NUM_RANKS = 4
MESHES = {
    "tp4 ep4": {"tp_size": 4, "ep_size": 4},
    "fsdp4 ep4": {"fsdp_size": 4, "ep_size": 4},
    "tp2 fsdp2 ep4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "fsdp4 ep2": {"fsdp_size": 4, "ep_size": 2},
}
NUM_STEPS = 3
RATE = 0.5

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


def build(name: str, path: str) -> None:
    """Save a randomly initialised model of that architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_common, **CONFIGS[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in key:  # these start at zero
                tensor.normal_(std=0.1)
    model.save_pretrained(path)


def batches(count: int) -> list[torch.Tensor]:
    """Token ids, different ones and differently many for each batch."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 96, (2, 5 + 2 * index), generator=generator) for index in range(count)]


def prompt() -> torch.Tensor:
    return torch.tensor([[5, 17, 42], [3, 7, 11]])


def generate(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(prompt(), max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(model: torch.nn.Module) -> None:
    """Plain SGD, without an optimizer's foreach kernels, which do not mix sharded and other tensors."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor -= RATE * tensor.grad
            tensor.grad = None


def reference(path: str, num_batches: int, bfloat16: bool = False) -> dict[str, Any]:
    """What transformers computes alone, eagerly: the loss is the mean over the batches."""
    model = load(path, bfloat16, experts_implementation="eager").train()
    found: dict[str, Any] = {"tokens": generate(model)}
    before = {name: whole(tensor) for name, tensor in model.named_parameters()}
    for number in range(NUM_STEPS):
        outputs = [model(input_ids=ids, labels=ids) for ids in batches(num_batches)]
        if number == 0:
            found["logits"] = [output.logits.detach() for output in outputs]
        (sum(output.loss for output in outputs) / num_batches).backward()
        if number == 0:
            found["grads"] = {name: tensor.grad.clone() for name, tensor in model.named_parameters()}
        step(model)
    found["change"] = {name: whole(tensor) - before[name] for name, tensor in model.named_parameters()}
    return found


def load(path: str, bfloat16: bool = False, **options: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if bfloat16 else torch.float32, **options)


def load_parallel(path: str, mesh: dict[str, int], **options: Any) -> torch.nn.Module:
    adapter.register()
    config = DistributedConfig(**mesh, ep_implementation="moeloom")
    options.setdefault("experts_implementation", "eager")
    return load(path, distributed_config=config, **options)


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


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


def compare(path: str, mesh: dict[str, int], rank: int, wanted: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Largest distances from the reference, over this rank's logits and all gradients and weights, and what moved."""
    with others_forbidden():
        model = load_parallel(path, mesh, **options).train()
        before = {name: whole(tensor) for name, tensor in model.named_parameters()}
        found: dict[str, Any] = {"replaced": adapter.replaced_modules(model), "runtimes": len(adapter.runtimes())}
        found["tokens"] = bool(torch.equal(generate(model), wanted["tokens"]))
        batch = rank // mesh.get("tp_size", 1)
        ids = batches(NUM_RANKS)[batch]
        for number in range(NUM_STEPS):
            output = model(input_ids=ids, labels=ids)
            if number == 0:
                found["logits"] = distance(whole(output.logits), wanted["logits"][batch])
            output.loss.backward()
            if number == 0:
                grads = {name: whole(tensor.grad) for name, tensor in model.named_parameters()}
                found["grads"] = {name: distance(grad, wanted["grads"][name]) for name, grad in grads.items()}
            step(model)
    change = {name: whole(tensor) - before[name] for name, tensor in model.named_parameters()}
    found["change"] = max(distance(tensor, wanted["change"][name]) for name, tensor in change.items())
    found["stats"] = adapter.runtimes()[-1].stats()
    return found

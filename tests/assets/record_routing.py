"""Record the routing of a small, randomly initialised Qwen3-MoE model over Python source text.

Real routers do not choose uniformly: neighbouring tokens agree, some experts are hot, some are nearly idle. A model
that was never trained has such a skew too, since its input does. Needs transformers, safetensors and a Python with its
standard library as source files:

    python tests/assets/record_routing.py tests/assets/routing_qwen3moe_stdlib.safetensors
"""

from __future__ import annotations

import argparse
import platform
import sysconfig
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

MODULES = (
    "argparse.py",
    "ast.py",
    "bisect.py",
    "calendar.py",
    "copy.py",
    "csv.py",
    "dataclasses.py",
    "heapq.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "textwrap.py",
)
NUM_TOKENS = 4096
CONTEXT = 512
SEED = 20261130


def read_text() -> Tensor:
    """`[NUM_TOKENS]` int64, bytes of the modules in alphabetical order, an equal share from each one's beginning."""
    library = Path(sysconfig.get_path("stdlib"))
    share = -(-NUM_TOKENS // len(MODULES))
    text = b"".join((library / name).read_bytes()[:share] for name in sorted(MODULES))
    if len(text) < NUM_TOKENS:
        raise SystemExit(f"the modules of {platform.python_version()} give {len(text)} bytes; {NUM_TOKENS} are needed")
    return torch.tensor(list(text[:NUM_TOKENS]))


def build_model() -> transformers.PreTrainedModel:
    """Bytes are its vocabulary; its weights depend on SEED and the torch release alone."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(SEED)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def record(model: transformers.PreTrainedModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """topk_idx `[N, K]` int32 and topk_weights `[N, K]` fp32 of the last layer, in the order of the text."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(_module: torch.nn.Module, _args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _logits, weights, ids = output
        kept.append((ids.int(), weights.float()))

    hook = model.model.layers[-1].mlp.gate.register_forward_hook(keep)
    with torch.inference_mode():
        for context in text.split(CONTEXT):
            model(context.unsqueeze(0))
    hook.remove()
    ids, weights = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return ids.contiguous(), weights.contiguous()


def main() -> None:
    """Write the file named on the command line and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    out = parser.parse_args().out
    model = build_model()
    ids, weights = record(model, read_text())
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    save_file(
        {"topk_idx": ids, "topk_weights": weights},
        out,
        metadata={
            "model": f"Qwen3-MoE, random weights, {num_parameters} parameters, hidden {config.hidden_size}, "
            f"{config.num_hidden_layers} layers, {config.num_experts} experts, top-{config.num_experts_per_tok}; "
            "router of the last layer, normalised weights",
            "num_experts": str(config.num_experts),
            "text": f"bytes of the Python {platform.python_version()} standard library: {', '.join(sorted(MODULES))}",
            "seed": str(SEED),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        },
    )
    load = torch.bincount(ids.flatten(), minlength=config.num_experts)
    print(f"{out}: {tuple(ids.shape)}, {out.stat().st_size} bytes")
    print(f"rows per expert: least {int(load.min())}, mean {load.float().mean():.0f}, most {int(load.max())}")


if __name__ == "__main__":
    main()

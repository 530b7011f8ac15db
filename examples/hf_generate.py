"""Greedy generation by a small random Qwen3-MoE, on one process and expert-parallel through moeloom; they agree.

    python examples/hf_generate.py --ranks 4 --new-tokens 12

Needs `pip install moeloom[transformers] accelerate`.
"""

from __future__ import annotations

import tempfile

import torch
import typer

import moeloom

PROMPT = [[11, 42, 7, 99, 23]]


def save_model(path: str, num_experts: int) -> None:
    """Random weights, spread wider than usual so that the continuation is not one token over and over."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def continue_prompt(path: str, new_tokens: int, ranks: int = 1) -> tuple[list[int], str]:
    """The continuation, and what was moved for it. On several ranks each of them calls this."""
    import transformers
    from transformers import AutoModelForCausalLM, DistributedConfig

    from moeloom.integrations.transformers import register, replaced_modules, runtimes

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"experts_implementation": "eager", "dtype": torch.float32}
    if ranks > 1:
        register()
        options["distributed_config"] = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="moeloom")
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    prompt = torch.tensor(PROMPT)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)[
        0, prompt.shape[1] :
    ].tolist()
    if ranks == 1:
        return tokens, ""
    stats = runtimes()[0].stats()
    moved = sum(stats[stage].scale_up_bytes for stage in ("dispatch", "combine"))
    return tokens, f"{len(replaced_modules(model))} layers, {stats['dispatch'].calls} dispatches, {moved} bytes moved"


def main(ranks: int = 4, new_tokens: int = 12) -> None:
    """Build, load and compare."""
    with tempfile.TemporaryDirectory() as path:
        save_model(path, 4 * ranks)
        alone, _ = continue_prompt(path, new_tokens)
        results = moeloom.launch(continue_prompt, ranks=ranks, args=(path, new_tokens, ranks), timeout=120.0)
    parallel = results[0][0]
    print("one process:      ", *alone)
    print(f"{ranks} ranks, moeloom: ", *parallel)
    for rank, (_, moved) in enumerate(results):
        print(f"  rank {rank}: {moved}")
    equal = all(tokens == alone for tokens, _ in results)
    print("equal:", equal)
    raise SystemExit(not equal)


if __name__ == "__main__":
    typer.run(main)

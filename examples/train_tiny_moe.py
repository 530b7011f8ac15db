"""Train a small mixture-of-experts language model, expert-parallel, on real text: the standard library's sources.

python examples/train_tiny_moe.py --ranks 4 --steps 200 --plot loss.png

Bytes are the tokens. Every rank holds all of the dense parts and its share of the experts, and takes its share of
each batch. The loss is the mean over the whole batch, so each rank's part is divided by the global number of tokens:
moeloom's gradients are those of the sum of all ranks' losses, and the dense parts' are summed over ranks.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import moeloom
from moeloom.nn import MoE, MoEConfig, expert_parameters

VOCABULARY = 256


@dataclass(frozen=True)
class Options:
    """One training run. batch: sequences over all ranks, a multiple of ranks."""

    ranks: int = 4
    steps: int = 200
    batch: int = 16
    length: int = 128
    hidden: int = 64
    layers: int = 2
    experts: int = 8
    topk: int = 2
    learning_rate: float = 3e-3
    seed: int = 0
    text: str = ""


@dataclass(frozen=True)
class Progress:
    """After a step: its loss in nats per byte, and the rows each expert got (all layers, all ranks)."""

    step: int
    loss: float
    load: tuple[int, ...]


class Block(nn.Module):
    """Causal attention, then a mixture of experts; both residual."""

    def __init__(self, options: Options, runtime: moeloom.Runtime, mesh: DeviceMesh | None) -> None:
        super().__init__()
        hidden = options.hidden
        self.before_attention, self.before_experts = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        config = MoEConfig(
            hidden=hidden,
            intermediate=2 * hidden,
            num_experts=options.experts,
            router=moeloom.Router(options.topk),
            bias_update_speed=1e-2,
        )
        self.moe = MoE(config, runtime, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, H] -> [B, S, H]`."""
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.before_experts(x))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, options: Options, runtime: moeloom.Runtime, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, options.hidden)
        self.place = nn.Embedding(options.length, options.hidden)
        self.blocks = nn.ModuleList(Block(options, runtime, mesh) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.hidden), nn.Linear(options.hidden, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """`[B, S]` bytes -> `[B, S, 256]` logits."""
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(path: str) -> Tensor:
    """A file's bytes, or (empty path) those of the standard library's modules, in order of their names."""
    if path:
        text = Path(path).read_bytes()
    else:
        text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-j]*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of a model that knows only how often each byte occurs: what training has to beat."""
    share = torch.bincount(text, minlength=VOCABULARY).double() / len(text)
    return float(-(share * share.clamp(min=1e-12).log()).sum())


def train(options: Options) -> Iterator[Progress]:
    """Runs on every rank; yields after each step."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    text, own = read_text(options.text), options.batch // num_ranks
    mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None
    with moeloom.Runtime(mesh) as rt:
        torch.manual_seed(options.seed)  # all ranks alike: the same dense parts, experts by their global ids
        model = Model(options, rt, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
        split = {id(parameter) for parameter in expert_parameters(model)}
        draw = torch.Generator().manual_seed(options.seed)
        for step in range(options.steps):
            starts = torch.randint(len(text) - options.length, (options.batch,), generator=draw)
            windows = torch.stack([text[start : start + options.length + 1] for start in starts.tolist()])
            mine = windows[rank * own : (rank + 1) * own]
            logits = model(mine[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
            loss = loss / (options.batch * options.length)
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if num_ranks > 1:
                dist.all_reduce(total)
                for parameter in model.parameters():
                    if id(parameter) not in split and parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
            optimizer.step()
            load = sum(block.moe.global_load() for block in model.blocks)
            for block in model.blocks:
                block.moe.update_bias()
            yield Progress(step, float(total), tuple(load.tolist()))


def plot(curve: list[Progress], entropy: float, path: str) -> None:
    """Loss over steps, and how evenly the experts were used."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    left.plot([p.step for p in curve], [p.loss for p in curve], label="training loss")
    left.axhline(entropy, color="grey", linestyle="--", label="unigram entropy of the text")
    left.set(xlabel="step", ylabel="nats per byte", ylim=(0, None), title="loss")
    left.legend()
    load = torch.tensor([p.load for p in curve]).double()
    share = load / load.sum(1, keepdim=True)
    right.stackplot(range(len(curve)), share.t().numpy(), labels=[f"expert {e}" for e in range(share.shape[1])])
    right.set(xlabel="step", ylabel="share of rows", xlim=(0, len(curve) - 1), ylim=(0, 1), title="expert load")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, report, plot."""
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--plot", default="", help="write loss and expert load to this PNG (needs matplotlib)")
    chosen = vars(parser.parse_args())
    path = chosen.pop("plot")
    options = Options(**chosen)
    if options.batch % options.ranks:
        parser.error(f"--batch is {options.batch}; it must be a multiple of --ranks {options.ranks}")
    entropy, curve = unigram_entropy(read_text(options.text)), []
    with moeloom.RankPool(options.ranks) as pool:
        for progress in pool.stream(train, options):
            curve.append(progress)
            if progress.step % 20 == 0 or progress.step == options.steps - 1:
                print(f"step {progress.step:4d}  loss {progress.loss:.4f}", flush=True)
    print(f"unigram entropy {entropy:.4f}; perplexity per byte {math.exp(curve[-1].loss):.2f}")
    if path:
        plot(curve, entropy, path)


if __name__ == "__main__":
    main()

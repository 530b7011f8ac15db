"""The shapes of published mixture-of-experts models, for benchmarks, planning and tests. No weights, no downloads.

Every `ModelShape.source` says where its numbers come from, in one of two forms:

* "transformers 5.24 XConfig defaults": equal to what `XConfig()` of that release holds, which tests/pure/test_models.py
  compares; what the config does not hold (the score function, whether weights are normalised) is from the model code
  of the same release. "defaults for ..." names the fields this covers, where it is not all of them.
* "reported, not verified: ...": read in a public place that is not the model's own configuration.

A "; but" or "; and" after that names what the shape does not describe. Models whose numbers could not be had to this
degree, or whose routing or activation would be a different one here (Gemma-4, Phi-3.5-MoE, Inkling), are left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moeloom.activation import SwiGLU
from moeloom.route import Router

_SCALED_MULTIPLE = 16
"""Sizes of scaled shapes are multiples of this: rows stay 16-byte aligned in every format down to one byte a value."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One model's mixture-of-experts layers.

    hidden, intermediate: the model's width and the width inside one routed expert, in elements.
    num_experts: routed experts with weights. num_identity_experts: experts without, which return their input; their
        ids follow, so that the gate has `num_choices` outputs (LongCat).
    num_shared_experts, shared_intermediate: experts that see every token, and the width of one; None: `intermediate`.
    routed_hidden: the width at which tokens reach the routed experts, if a projection comes before; None: `hidden`.
    num_layers: transformer layers. num_dense_layers: those of them without experts, wherever they are.
    num_hash_layers: layers that look their experts up by token id (`moeloom.route.hash_route`).
    router: top-k, scores, groups, scale. activation: between the gate/up and the down product.
    has_biases: both expert products add a bias. gate_up_interleaved: in the checkpoint gate and up alternate row by
        row, instead of gate first. weight_on_input: the router weight multiplies the expert's input, not its output.
    weights: format of the experts in the published checkpoint, as reported and never verified here: "bf16" (also where
        nothing was reported), "fp8-128x128" (E4M3 with one scale per 128x128 block) or "mxfp4".
    source: where the numbers come from, see the module's head.

    Raises ValueError for sizes that fit no model.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    num_layers: int
    router: Router
    source: str
    num_identity_experts: int = 0
    num_shared_experts: int = 0
    shared_intermediate: int | None = None
    routed_hidden: int | None = None
    num_dense_layers: int = 0
    num_hash_layers: int = 0
    activation: SwiGLU = SwiGLU()  # noqa: RUF009 (frozen)
    has_biases: bool = False
    gate_up_interleaved: bool = False
    weight_on_input: bool = False
    weights: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "num_layers", "shared_intermediate", "routed_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("num_identity_experts", "num_shared_experts", "num_dense_layers", "num_hash_layers"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if self.num_dense_layers + self.num_hash_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers is {self.num_dense_layers} and num_hash_layers {self.num_hash_layers}; "
                f"together they must be at most num_layers, {self.num_layers}"
            )
        if self.num_topk > self.num_choices:
            raise ValueError(f"router chooses {self.num_topk} experts; it must be at most {self.num_choices}")

    @property
    def num_topk(self) -> int:
        """Experts per token."""
        return self.router.num_topk

    @property
    def num_choices(self) -> int:
        """Outputs of the gate: experts with weights, then those without."""
        return self.num_experts + self.num_identity_experts

    @property
    def expert_hidden(self) -> int:
        """Elements per token on the way to the routed experts and back."""
        return self.hidden if self.routed_hidden is None else self.routed_hidden

    def scaled(self, factor: int) -> ModelShape:
        """The same layer, narrower: every width divided by factor, experts, top-k and router as they are.

        Widths are rounded to the nearest multiple of 16 and are at least 16. The name gets "/factor". Raises ValueError
        for a factor below 1.
        """
        if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
            raise ValueError(f"factor is {factor!r}; it must be an integer of at least 1")

        def narrow(width: int) -> int:
            return max(1, round(width / (factor * _SCALED_MULTIPLE))) * _SCALED_MULTIPLE

        return replace(
            self,
            name=f"{self.name}/{factor}",
            hidden=narrow(self.hidden),
            intermediate=narrow(self.intermediate),
            shared_intermediate=None if self.shared_intermediate is None else narrow(self.shared_intermediate),
            routed_hidden=None if self.routed_hidden is None else narrow(self.routed_hidden),
        )


def find_model(name: str) -> ModelShape:
    """The preset of that name. Raises ValueError, with close names and all names, if there is none."""
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name.lower(), MODELS)
    hint = f"; close: {', '.join(close)}" if close else ""
    raise ValueError(f"name is {name!r}, which is no known model{hint}; known: {', '.join(sorted(MODELS))}")


def _sigmoid(num_topk: int, scale: float = 1.0, num_groups: int = 1, num_topk_groups: int = 1) -> Router:
    """The DeepSeek-V3 family: sigmoid scores, normalised; the bias that steers the choice comes with the weights."""
    return Router(num_topk, "sigmoid", num_groups, num_topk_groups, scale=scale)


_CLAMPED = SwiGLU(clamp=10.0)
_GPT_OSS = SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)

# A model per paragraph: one value per line would make the table three times as long.
# fmt: off
_DEEPSEEK = (
    ModelShape(
        name="deepseek-v2", hidden=5120, intermediate=1536, num_experts=160, num_shared_experts=2, num_layers=60,
        num_dense_layers=1, router=Router(6, "softmax", 8, 3, "max", normalize=False, scale=16.0),
        source="reported, not verified: Primus, primus/configs/models/megatron/deepseek_v2.yaml; top-k 6 and weights "
               "that are not normalised from the DeepSeek-V2 report",
    ),
    ModelShape(
        name="deepseek-v3", hidden=7168, intermediate=2048, num_experts=256, num_shared_experts=1, num_layers=61,
        num_dense_layers=3, router=_sigmoid(8, 2.5, 8, 4), weights="fp8-128x128",
        source="transformers 5.24 DeepseekV3Config defaults",
    ),
    ModelShape(
        name="deepseek-v3.2", hidden=7168, intermediate=2048, num_experts=256, num_shared_experts=1, num_layers=61,
        num_dense_layers=3, router=_sigmoid(8, 2.5, 8, 4), weights="fp8-128x128",
        source="transformers 5.24 DeepseekV32Config defaults",
    ),
    ModelShape(
        name="deepseek-v4-flash", hidden=4096, intermediate=2048, num_experts=256, num_shared_experts=1, num_layers=43,
        num_hash_layers=3, router=Router(6, "sqrt_softplus", scale=1.5), activation=_CLAMPED, weights="mxfp4",
        source="transformers 5.24 DeepseekV4Config defaults",
    ),
)

_KIMI = (
    ModelShape(
        name="kimi-k2", hidden=7168, intermediate=2048, num_experts=384, num_shared_experts=1, num_layers=61,
        num_dense_layers=1, router=_sigmoid(8, 2.827), weights="fp8-128x128",
        source="reported, not verified: slime, scripts/models/kimi-k2.sh",
    ),
    ModelShape(
        name="kimi-k3", hidden=7168, routed_hidden=3584, intermediate=3072, num_experts=896, num_shared_experts=2,
        num_layers=93, num_dense_layers=1, router=_sigmoid(16), weights="mxfp4",
        source="reported, not verified: copies of moonshotai/Kimi-K3 config.json in tests of public repositories; but "
               "its activation is SiTU, for which SwiGLU stands in here, and the routed output is normalised",
    ),
    ModelShape(
        name="kimi-linear-48b-a3b", hidden=2304, intermediate=1024, num_experts=256, num_shared_experts=1,
        num_layers=27, num_dense_layers=1, router=_sigmoid(8, 2.446),
        source="transformers 5.24 KimiLinearConfig defaults",
    ),
)

_QWEN = (
    ModelShape(
        name="qwen1.5-moe-a2.7b", hidden=2048, intermediate=1408, num_experts=60, num_shared_experts=1,
        shared_intermediate=5632, num_layers=24, router=Router(4, normalize=False),
        source="transformers 5.24 Qwen2MoeConfig defaults; but the shared expert is gated",
    ),
    ModelShape(
        name="qwen3-30b-a3b", hidden=2048, intermediate=768, num_experts=128, num_layers=48, router=Router(8),
        source="transformers 5.24 Qwen3MoeConfig defaults for hidden, intermediate, num_experts, num_topk; the rest "
               "reported, not verified: slime, scripts/models/qwen3-30B-A3B.sh",
    ),
    ModelShape(
        name="qwen3-235b-a22b", hidden=4096, intermediate=1536, num_experts=128, num_layers=94, router=Router(8),
        source="reported, not verified: slime, scripts/models/qwen3-235B-A22B.sh",
    ),
    ModelShape(
        name="qwen3-coder-480b-a35b", hidden=6144, intermediate=2560, num_experts=160, num_layers=62, router=Router(8),
        source="reported, not verified: miles, scripts/models/qwen3-coder-480B-A35B.sh",
    ),
    ModelShape(
        name="qwen3-next-80b-a3b", hidden=2048, intermediate=512, num_experts=512, num_shared_experts=1,
        num_layers=48, router=Router(10),
        source="transformers 5.24 Qwen3NextConfig defaults; but the shared expert is gated",
    ),
    ModelShape(
        name="qwen3.5-35b-a3b", hidden=2048, intermediate=512, num_experts=256, num_shared_experts=1, num_layers=40,
        router=Router(8),
        source="transformers 5.24 Qwen3_5MoeTextConfig defaults; but the shared expert is gated",
    ),
    ModelShape(
        name="qwen3.5-397b-a17b", hidden=4096, intermediate=1024, num_experts=512, num_shared_experts=1,
        num_layers=60, router=Router(10),
        source="reported, not verified: slime, scripts/models/qwen3.5-397B-A17B.sh; but the shared expert is gated",
    ),
)

_GLM = (
    ModelShape(
        name="glm-4.5", hidden=5120, intermediate=1536, num_experts=160, num_shared_experts=1, num_layers=92,
        num_dense_layers=3, router=_sigmoid(8, 2.5),
        source="reported, not verified: slime, scripts/models/glm4.5-355B-A32B.sh",
    ),
    ModelShape(
        name="glm-4.5-air", hidden=4096, intermediate=1408, num_experts=128, num_shared_experts=1, num_layers=46,
        num_dense_layers=1, router=_sigmoid(8),
        source="transformers 5.24 Glm4MoeConfig defaults",
    ),
    ModelShape(
        name="glm-4.7-flash", hidden=2048, intermediate=1536, num_experts=64, num_shared_experts=1, num_layers=47,
        num_dense_layers=1, router=_sigmoid(4, 1.8),
        source="transformers 5.24 Glm4MoeLiteConfig defaults",
    ),
    ModelShape(
        name="glm-5", hidden=6144, intermediate=2048, num_experts=256, num_shared_experts=1, num_layers=78,
        num_dense_layers=3, router=_sigmoid(8, 2.5),
        source="transformers 5.24 GlmMoeDsaConfig defaults",
    ),
    ModelShape(
        name="glm-5.3-flash", hidden=4096, intermediate=2048, num_experts=288, num_shared_experts=1, num_layers=45,
        num_dense_layers=3, router=_sigmoid(8, 2.5), activation=_CLAMPED,
        source="transformers 5.24 Glm5NextTextConfig defaults",
    ),
)

_MINIMAX = (
    ModelShape(
        name="minimax-m2", hidden=3072, intermediate=1536, num_experts=256, num_layers=62, router=_sigmoid(8),
        weights="fp8-128x128",
        source="transformers 5.24 MiniMaxM2Config defaults",
    ),
    ModelShape(
        name="minimax-m3", hidden=6144, intermediate=3072, num_experts=128, num_shared_experts=1, num_layers=60,
        router=_sigmoid(4, 2.0), activation=_GPT_OSS,
        source="transformers 5.24 MiniMaxM3VLTextConfig defaults",
    ),
)

_GPT_OSS_SHAPES = (
    ModelShape(
        name="gpt-oss-20b", hidden=2880, intermediate=2880, num_experts=32, num_layers=24, router=Router(4),
        activation=_GPT_OSS, has_biases=True, gate_up_interleaved=True, weights="mxfp4",
        source="reported, not verified: copies of openai/gpt-oss-20b config.json in public repositories",
    ),
    ModelShape(
        name="gpt-oss-120b", hidden=2880, intermediate=2880, num_experts=128, num_layers=36, router=Router(4),
        activation=_GPT_OSS, has_biases=True, gate_up_interleaved=True, weights="mxfp4",
        source="transformers 5.24 GptOssConfig defaults",
    ),
)

_MISTRAL = (
    ModelShape(
        name="mixtral-8x7b", hidden=4096, intermediate=14336, num_experts=8, num_layers=32, router=Router(2),
        source="transformers 5.24 MixtralConfig defaults",
    ),
    ModelShape(
        name="mixtral-8x22b", hidden=6144, intermediate=16384, num_experts=8, num_layers=56, router=Router(2),
        source="reported, not verified: Primus, primus/configs/models/megatron/mixtral_8x22B_v0.1.yaml",
    ),
    ModelShape(
        name="mistral-small-4", hidden=4096, intermediate=2048, num_experts=128, num_shared_experts=1, num_layers=36,
        router=Router(4),
        source="transformers 5.24 Mistral4Config defaults",
    ),
    ModelShape(
        name="mistral-large-4", hidden=6144, intermediate=6144, num_experts=128, num_shared_experts=1, num_layers=72,
        num_dense_layers=1, router=Router(4),
        source="transformers 5.24 MistralLarge4TextConfig defaults",
    ),
)

_META = (
    ModelShape(
        name="llama-4-scout", hidden=5120, intermediate=8192, num_experts=16, num_shared_experts=1, num_layers=48,
        router=Router(1, "sigmoid", normalize=False), weight_on_input=True,
        source="transformers 5.24 Llama4TextConfig defaults",
    ),
    ModelShape(
        name="llama-4-maverick", hidden=5120, intermediate=8192, num_experts=128, num_shared_experts=1, num_layers=48,
        num_dense_layers=24, router=Router(1, "sigmoid", normalize=False), weight_on_input=True,
        source="reported, not verified: a public Megatron script for Llama-4-Maverick-17B-128E; every second layer is "
               "dense",
    ),
    ModelShape(
        name="muse-spark", hidden=8192, routed_hidden=4096, intermediate=4096, num_experts=256, num_layers=62,
        router=_sigmoid(8),
        source="transformers 5.24 MuseSparkTextConfig defaults; but each expert's output is also normalised",
    ),
)

_OTHERS = (
    ModelShape(
        name="ernie-4.5-21b-a3b", hidden=2560, intermediate=1536, num_experts=64, num_shared_experts=2, num_layers=28,
        num_dense_layers=1, router=Router(6),
        source="transformers 5.24 Ernie4_5_MoeConfig defaults",
    ),
    ModelShape(
        name="hy3", hidden=4096, intermediate=1536, num_experts=192, num_shared_experts=1, num_layers=80,
        num_dense_layers=1, router=_sigmoid(8, 2.826),
        source="transformers 5.24 HYV3Config defaults",
    ),
    ModelShape(
        name="hy4", hidden=2816, intermediate=768, num_experts=256, num_shared_experts=1, num_layers=34,
        num_dense_layers=1, router=_sigmoid(8, 2.827), activation=_CLAMPED,
        source="transformers 5.24 HYV4Config defaults",
    ),
    ModelShape(
        name="ling-3.0-flash", hidden=2560, intermediate=768, num_experts=512, num_shared_experts=1, num_layers=42,
        num_dense_layers=2, router=_sigmoid(8, 2.5, 8, 4),
        source="transformers 5.24 BailingHybridConfig defaults",
    ),
    ModelShape(
        name="longcat-flash", hidden=6144, intermediate=2048, num_experts=512, num_identity_experts=256, num_layers=28,
        router=Router(12, normalize=False, scale=6.0),
        source="transformers 5.24 LongcatFlashConfig defaults; and each layer has a dense path beside the experts",
    ),
    ModelShape(
        name="mimo-v2-flash", hidden=4096, intermediate=2048, num_experts=256, num_layers=48, num_dense_layers=1,
        router=_sigmoid(8), weights="fp8-128x128",
        source="transformers 5.24 MiMoV2FlashConfig defaults",
    ),
    ModelShape(
        name="solar-open-100b", hidden=4096, intermediate=1280, num_experts=128, num_shared_experts=1, num_layers=48,
        router=_sigmoid(8),
        source="transformers 5.24 SolarOpenConfig defaults",
    ),
    ModelShape(
        name="step-3.7-flash", hidden=4096, intermediate=1280, num_experts=288, num_shared_experts=1, num_layers=45,
        num_dense_layers=3, router=_sigmoid(8),
        source="transformers 5.24 Step3p7TextConfig defaults; but the checkpoint's own config may set another scale, "
               "and clamps the experts of its last two layers after the activation",
    ),
)

# fmt: on
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for family in (_DEEPSEEK, _KIMI, _QWEN, _GLM, _MINIMAX, _GPT_OSS_SHAPES, _MISTRAL, _META, _OTHERS)
        for shape in family
    }
)
"""Every preset by name."""

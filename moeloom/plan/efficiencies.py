"""What implementations reach on H100 and H200: moeloom's own kernels where they were measured, others' elsewhere.

Fitted by `python -m benchmarks.predict_published --fit`, which also says how well the numbers predict the rows that
were not fitted; rounded. The time that a fit cannot attribute to a stage is with the experts. moeloom was measured on
two ranks of one node; what more ranks take is the model's word. Other GPUs get the same shares of their rates.
"""

from __future__ import annotations

from dataclasses import replace

from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.plan import PipelineName

_OURS = "measured on moeloom itself, 2 x H200 (benchmarks/results/h200_layer_2026-11-30.md); between nodes as DeepEP"
# within a node the link as it was measured, 361-364 of 450 GB/s; between nodes as DeepEP V2, and as V1 low latency
_MANY = Rates(scale_up=0.8, scale_out=0.92, message_seconds=0.06e-6)
_FEW = Rates(scale_up=0.8, scale_out=0.94, message_seconds=0.06e-6)
_INSIDE = Rates(memory=0.93, scale_up=0.68, scale_out=0.92, message_seconds=0.06e-6)

GPU: dict[PipelineName, Efficiency] = {
    "split": Efficiency(
        {
            "dispatch": replace(_MANY, memory=0.68, fixed_seconds=20e-6),  # with the quantisation of rows
            "experts": Rates(compute=0.565, memory=0.94, fixed_seconds=64e-6),
            "combine": replace(_MANY, memory=0.91, fixed_seconds=9.7e-6),
        },
        exposed=0.02, tile_rows=64, exchange_apart=True, source=_OURS,
    ),
    "mega": Efficiency(
        {"dispatch": _INSIDE, "experts": Rates(compute=0.56, memory=0.93, fixed_seconds=85e-6), "combine": _INSIDE},
        exposed=0.01, tile_rows=64, exchange_apart=True, others=True,
        source="others' kernels, as moeloom's is not built yet: fused SM90 kernel on 8 x H100 (DeepGEMM pull request"
        " 440); between nodes DeepEP V2",
    ),
    "decode": Efficiency(
        {
            "dispatch": replace(_FEW, memory=0.68, fixed_seconds=1.9e-6),
            "experts": Rates(compute=0.565, memory=0.913, fixed_seconds=35.5e-6),
            "combine": replace(_FEW, memory=0.91, fixed_seconds=3.7e-6),
        },
        exposed=0.02, tile_rows=64, source=_OURS,
    ),
}  # fmt: skip

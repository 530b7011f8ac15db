"""What known implementations reach on GPUs.

Until moeloom's own kernels are measured these stand in: fitted to published measurements of comparable systems by
`python -m benchmarks.predict_published --fit`, which also says how well they predict the rows that were not fitted.
Rounded. The time that a fit cannot attribute to a stage is with the experts.
"""

from __future__ import annotations

from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.plan import PipelineName

_MANY = Rates(memory=0.3, scale_up=0.8, scale_out=0.92, fixed_seconds=20e-6, message_seconds=0.06e-6)
_INSIDE = Rates(memory=0.93, scale_up=0.68, scale_out=0.92, message_seconds=0.06e-6)
_FEW = Rates(memory=0.8, scale_up=0.77, scale_out=0.94, fixed_seconds=24e-6, message_seconds=0.06e-6)

GPU: dict[PipelineName, Efficiency] = {
    "split": Efficiency(
        {"dispatch": _MANY, "experts": Rates(compute=0.45, memory=0.81, fixed_seconds=120e-6), "combine": _MANY},
        exposed=0.07, tile_rows=64, exchange_apart=True,
        source="fitted to DeepEP + DeepGEMM on 8 x H200 (DeepGEMM pull requests 352 and 383); between nodes DeepEP V2",
    ),
    "mega": Efficiency(
        {"dispatch": _INSIDE, "experts": Rates(compute=0.56, memory=0.93, fixed_seconds=85e-6), "combine": _INSIDE},
        exposed=0.01, tile_rows=64, exchange_apart=True,
        source="fitted to the fused SM90 kernel on 8 x H100 (DeepGEMM pull request 440); between nodes DeepEP V2",
    ),
    "decode": Efficiency(
        {"dispatch": _FEW, "experts": Rates(compute=0.6, memory=0.93, fixed_seconds=107e-6), "combine": _FEW},
        exposed=0.2, tile_rows=64,
        source="fitted to DeepEP V1 low latency (H800, H200) + masked GEMM on 8 x H200 (DeepGEMM pull request 383)",
    ),
}  # fmt: skip

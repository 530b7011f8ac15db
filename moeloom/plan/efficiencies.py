"""What known implementations reach on GPUs.

Until moeloom's own kernels are measured these stand in: fitted to published measurements of comparable systems by
`python -m benchmarks.predict_published --fit`, which also says how well they predict the rows that were not fitted.
"""

from __future__ import annotations

from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.plan import PipelineName

_MOVE = Rates(memory=0.8, scale_up=0.8, scale_out=0.85, fixed_seconds=15e-6, message_seconds=0.3e-6)

GPU: dict[PipelineName, Efficiency] = {
    "split": Efficiency(
        {"dispatch": _MOVE, "experts": Rates(compute=0.6, memory=0.8, fixed_seconds=20e-6), "combine": _MOVE},
        exposed=0.2, tile_rows=128, exchange_apart=True,
    ),
    "mega": Efficiency(
        {"dispatch": _MOVE, "experts": Rates(compute=0.5, memory=0.75), "combine": _MOVE},
        exposed=0.3, tile_rows=64, exchange_apart=True,
    ),
    "decode": Efficiency(
        {"dispatch": _MOVE, "experts": Rates(compute=0.5, memory=0.75), "combine": _MOVE},
        exposed=0.2, tile_rows=64,
    ),
}  # fmt: skip

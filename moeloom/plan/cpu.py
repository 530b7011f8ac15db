"""Numbers for CPUs that were not measured."""

from __future__ import annotations

from moeloom.plan.efficiency import Efficiency, Rates
from moeloom.plan.machine import Machine
from moeloom.plan.measured import Measured

_SOURCE = "built in: two virtual cores of an AMD EPYC server; `moeloom measure` replaces it"

BUILT_IN = Measured(
    machine=Machine(
        name="a CPU that was not measured",
        flops={"fp32": 100e9, "bf16": 95e9, "fp8": 80e9},
        memory_bytes=None,
        memory_bandwidth=8e9,
        scale_up_bandwidth=8e9,
        scale_out_bandwidth=0.6e9,
        scale_up_latency=50e-6,
        scale_out_latency=1e-3,
        launch_seconds=0.0,
        ranks_per_domain=8,
        num_sms=None,
        nics_per_rank=1.0,
        l2_bytes=None,
        sources=dict.fromkeys(
            (
                "flops.fp32", "flops.bf16", "flops.fp8", "memory_bandwidth", "scale_up_bandwidth",
                "scale_out_bandwidth", "scale_up_latency", "scale_out_latency", "launch_seconds", "ranks_per_domain",
                "nics_per_rank",
            ),
            _SOURCE,
        ),
    ),
    efficiencies={
        "split": Efficiency(
            {
                "dispatch": Rates(fixed_seconds=2e-3),
                "experts": Rates(fixed_seconds=1e-4, expert_seconds=1e-4),
                "combine": Rates(fixed_seconds=1e-3),
            },
            exposed=1.0, tile_rows=1, source=_SOURCE,
        ),
        "decode": Efficiency(
            {
                "dispatch": Rates(fixed_seconds=2e-3),
                "experts": Rates(fixed_seconds=1e-4, expert_seconds=1e-4),
                "combine": Rates(fixed_seconds=1e-3),
            },
            exposed=1.0, tile_rows=1, fixed_shapes=True, source=_SOURCE,
        ),
    },
    ranks=2,
    cores=2,
)  # fmt: skip

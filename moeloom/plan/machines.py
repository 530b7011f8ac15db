"""Known machines: what vendors promise, each number with its source.

Peaks are dense: half of what datasheets give "with sparsity". Bandwidths are per direction: half of what datasheets
give for NVLink. What was reached of a peak is said in its source; shares of it belong to an `Efficiency`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeloom.plan.machine import Machine

Number = tuple[Any, str]  # value or None, where it comes from

GB, TB, MIB, TERA = 1e9, 1e12, 2**20, 1e12

H100_SHEET = "NVIDIA H100 datasheet"
SPARSE = "half of the rate with sparsity"
ANT_REPORT = "Ant Group and SGLang, serving DeepSeek-R1 on H20 (lmsys.org, 2025-09-26)"
NO_SHEET = "NVIDIA has no public datasheet"


def _machine(name: str, flops: Mapping[str, Number], numbers: Mapping[str, Number]) -> Machine:
    values = {field: value for field, (value, _) in numbers.items()}
    sources = {field: source for field, (_, source) in numbers.items()}
    sources |= {f"flops.{recipe}": source for recipe, (_, source) in flops.items()}
    return Machine(name=name, flops={recipe: rate for recipe, (rate, _) in flops.items()}, sources=sources, **values)


def _hopper(fp32: float, bf16: float, fp8: float, source: str) -> dict[str, Number]:
    return {
        "fp32": (fp32 * TERA, f"{source}, without tensor cores"),
        "bf16": (bf16 * TERA, f"{source}, {SPARSE}"),
        "fp8": (fp8 * TERA, f"{source}, {SPARSE}"),
    }


# waits, as far as anybody measured them
_WAITS: dict[str, Number] = {
    "scale_up_latency": (1.2e-6, "as measured on H200"),
    "scale_out_latency": (
        8.35e-6,
        "half the 16.7 us round trip of small messages that H100s start themselves (NCCL GIN, arXiv 2511.15076)",
    ),
    "launch_seconds": (4.6e-6, "as measured on H200"),
}
# eight SXM5 Hopper GPUs on NVSwitches, one ConnectX-7 each
_HGX: dict[str, Number] = _WAITS | {
    "scale_up_bandwidth": (450 * GB, f"{H100_SHEET}: NVLink, half of 900 GB/s"),
    "scale_out_bandwidth": (50 * GB, "DGX BasePOD reference: 8 single-port ConnectX-7 of 400 Gbit/s for 8 GPUs"),
    "nics_per_rank": (1.0, "DGX BasePOD reference: 8 ConnectX-7 for 8 GPUs"),
    "ranks_per_domain": (8, "DGX BasePOD reference: 8 GPUs on NVSwitches"),
    "num_sms": (132, "NVIDIA H100 architecture paper, SXM5"),
    "l2_bytes": (50 * MIB, "NVIDIA H100 architecture paper; CUDA reports the same"),
}
_H100 = _HGX | {
    "memory_bytes": (80 * GB, H100_SHEET),
    "memory_bandwidth": (3.35 * TB, H100_SHEET),
}
_H200 = _HGX | {
    "memory_bytes": (141 * GB, "NVIDIA H200 datasheet; CUDA reports 150.1e9 bytes"),
    "memory_bandwidth": (
        4.8 * TB,
        "NVIDIA H200 datasheet; measured on H200: 4.24-4.27 TB/s in a copy, 4.48-4.64 TB/s reading only",
    ),
    "scale_up_bandwidth": (
        450 * GB,
        "NVIDIA H200 datasheet: NVLink, half of 900 GB/s; measured on 2 x H200, GB/s per direction: copy engines 393"
        " one way, 391 both ways at once; copies by 64 SMs both ways at once: stores 361, bulk stores 364, loads 334",
    ),
    "scale_up_latency": (1.2e-6, "measured on 2 x H200: a released store until an acquiring load sees it, 1.2-1.3 us"),
    "launch_seconds": (
        4.6e-6,
        "measured on H200: a launch through cuda.core; by jit.Kernel 4.4-6.1 us, from run to run; a node of a CUDA"
        " graph takes 0.5-0.9 us",
    ),
    "num_sms": (132, "CUDA, on H200"),
    "l2_bytes": (60 * MIB, "CUDA, on H200"),
}
_H800 = _H100 | {
    "memory_bytes": (80 * GB, ANT_REPORT),
    "memory_bandwidth": (3.35 * TB, f"as H100; {ANT_REPORT}: 3352 GB/s"),
    "scale_up_bandwidth": (
        200 * GB,
        f"{ANT_REPORT}: NVLink, half of 400 GB/s; DeepEP README: about 160 GB/s at most, 153-158 GB/s reached",
    ),
    "scale_out_bandwidth": (50 * GB, f"{ANT_REPORT}: 8 x 400 Gbit/s for 8 GPUs; DeepEP README: about 50 GB/s at most"),
    "nics_per_rank": (1.0, f"{ANT_REPORT}: 8 NICs for 8 GPUs"),
    "num_sms": (132, "as H100, whose peak it has"),
    "l2_bytes": (50 * MIB, "as H100, the same chip with the same memory"),
}
_H20 = _HGX | {
    "memory_bytes": (96 * GB, ANT_REPORT),
    "memory_bandwidth": (4.0 * TB, ANT_REPORT),
    "scale_up_bandwidth": (450 * GB, f"{ANT_REPORT}: NVLink, half of 900 GB/s"),
    "scale_out_bandwidth": (25 * GB, f"{ANT_REPORT}: 4 x 400 Gbit/s for 8 GPUs"),
    "nics_per_rank": (0.5, f"{ANT_REPORT}: 4 NICs for 8 GPUs"),
    "ranks_per_domain": (8, f"{ANT_REPORT}: 8 GPUs in a node"),
    "num_sms": (78, "PyTorch's device properties, as printed in public code"),
    "l2_bytes": (None, NO_SHEET),
}
_A100 = _WAITS | {
    "memory_bytes": (80 * GB, "NVIDIA A100 datasheet, 80 GB SXM"),
    "memory_bandwidth": (2039 * GB, "NVIDIA A100 datasheet, 80 GB SXM"),
    "scale_up_bandwidth": (300 * GB, "NVIDIA A100 datasheet: NVLink, half of 600 GB/s"),
    "scale_out_bandwidth": (25 * GB, "NVIDIA DGX A100 datasheet: 8 ConnectX-6 of 200 Gbit/s for 8 GPUs"),
    "nics_per_rank": (1.0, "NVIDIA DGX A100 datasheet: 8 ConnectX-6 for 8 GPUs"),
    "ranks_per_domain": (8, "NVIDIA DGX A100 datasheet: 8 GPUs on NVSwitches"),
    "num_sms": (108, "NVIDIA A100 architecture paper"),
    "l2_bytes": (40 * MIB, "NVIDIA A100 architecture paper; CUDA reports the same"),
}
_B200 = _HGX | {
    "memory_bytes": (180 * GB, "NVIDIA DGX B200 datasheet: 1440 GB of 8 GPUs"),
    "memory_bandwidth": (
        8.0 * TB,
        "NVIDIA DGX B200 datasheet: 64 TB/s of 8 GPUs; what a device reports, 7680 bits at 3996 MHz, gives 7.67 TB/s",
    ),
    "scale_up_bandwidth": (
        900 * GB,
        "NVIDIA DGX B200 datasheet: NVLink, half of 14.4 TB/s of 8 GPUs; DeepEP README, SM100, 8 ranks: 726-740 GB/s",
    ),
    "num_sms": (148, "CUDA, as reported in pytorch/ao pull request 4002"),
    "l2_bytes": (126.5 * MIB, "CUDA, as reported in pytorch/ao pull request 4002"),
}
_GB200 = _WAITS | {
    "memory_bytes": (186 * GB, "NVIDIA GB200 NVL72 datasheet: 13.4 TB of 72 GPUs; MLPerf systems name 186 GB"),
    "memory_bandwidth": (8.0 * TB, "NVIDIA GB200 NVL72 datasheet: 576 TB/s of 72 GPUs"),
    "scale_up_bandwidth": (900 * GB, "NVIDIA GB200 NVL72 datasheet: NVLink, half of 130 TB/s of 72 GPUs"),
    "scale_out_bandwidth": (50 * GB, "NVIDIA DGX GB200 user guide: 4 ConnectX-7 of 400 Gbit/s for 4 GPUs of a tray"),
    "nics_per_rank": (1.0, "NVIDIA DGX GB200 user guide: 4 ConnectX-7 for 4 GPUs of a tray"),
    "ranks_per_domain": (72, "NVIDIA GB200 NVL72 datasheet"),
    "num_sms": (152, "derived: fp32 peak / (256 FLOP x 2062 MHz, its highest clock); public code names the same"),
    "l2_bytes": (126 * MIB, "NVIDIA Blackwell tuning guide, of GB200"),
}
# cards in PCIe slots, no NVLink bridges; servers differ in their NICs
_H100_PCIE = _WAITS | {
    "memory_bytes": (80 * GB, f"{H100_SHEET}, PCIe"),
    "memory_bandwidth": (2.0 * TB, f"{H100_SHEET}, PCIe"),
    "scale_up_bandwidth": (63 * GB, "derived: PCIe 5.0, 16 lanes x 32 GT/s x 128/130 bits, before packet headers"),
    "scale_out_bandwidth": (None, "servers differ"),
    "nics_per_rank": (None, "servers differ"),
    "ranks_per_domain": (8, "assumed: the most that common servers for PCIe cards hold"),
    "scale_up_latency": (1.2e-6, "as measured on H200 over NVLink; not less over PCIe"),
    "num_sms": (114, "NVIDIA H100 architecture paper, PCIe"),
    "l2_bytes": (50 * MIB, "NVIDIA H100 architecture paper"),
}

MACHINES: dict[str, Machine] = {
    found.name: found
    for found in (
        _machine("h100", _hopper(67, 989, 1979, f"{H100_SHEET}, SXM"), _H100),
        _machine(
            "h200",
            {
                "fp32": (67 * TERA, "NVIDIA H200 datasheet, without tensor cores"),
                "bf16": (
                    989 * TERA,
                    f"NVIDIA H200 datasheet, {SPARSE}; measured on H200: 790-801 TFLOP/s in a cuBLAS GEMM of 8192^3",
                ),
                "fp8": (
                    1979 * TERA,
                    f"NVIDIA H200 datasheet, {SPARSE}; measured on H200 in a cuBLAS GEMM of 8192^3, TFLOP/s: 1500 with"
                    " one scale a tensor, 1276-1458 with one a row",
                ),
            },
            _H200,
        ),
        _machine(
            "h800",
            {
                "fp32": (67 * TERA, "as H100, whose bf16 and fp8 peaks it has"),
                "bf16": (989 * TERA, ANT_REPORT),
                "fp8": (1979 * TERA, ANT_REPORT),
            },
            _H800,
        ),
        _machine(
            "h20",
            {
                "fp32": (44 * TERA, f"press reports of 2023; {NO_SHEET}"),
                "bf16": (148 * TERA, ANT_REPORT),
                "fp8": (296 * TERA, ANT_REPORT),
            },
            _H20,
        ),
        _machine(
            "a100",
            {
                "fp32": (19.5 * TERA, "NVIDIA A100 datasheet, without tensor cores"),
                "bf16": (312 * TERA, "NVIDIA A100 datasheet, without sparsity"),
            },
            _A100,
        ),
        _machine(
            "b200",
            {
                "fp32": (75 * TERA, "NVIDIA HGX B200 datasheet; 148 SMs x 256 FLOP x 1965 MHz = 74.5 TFLOP/s"),
                "bf16": (2250 * TERA, "half of fp8"),
                "fp8": (4500 * TERA, f"NVIDIA DGX B200 datasheet, 72 PFLOP/s of 8 GPUs, {SPARSE}"),
            },
            _B200,
        ),
        _machine(
            "gb200",
            {
                "fp32": (80 * TERA, "NVIDIA GB200 NVL72 datasheet; 152 SMs x 256 FLOP x 2062 MHz = 80.2 TFLOP/s"),
                "bf16": (2500 * TERA, "half of fp8"),
                "fp8": (5000 * TERA, f"NVIDIA GB200 NVL72 datasheet, 720 PFLOP/s of 72 GPUs, {SPARSE}"),
            },
            _GB200,
        ),
        _machine("h100-pcie", _hopper(51, 756, 1513, f"{H100_SHEET}, PCIe"), _H100_PCIE),
    )
}

# by the name that CUDA gives; other variants of a chip have other memory or links
_GPUS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA H800": "h800",
    "NVIDIA H20": "h20",
}


def machine_of_gpu(name: str) -> Machine | None:
    """The known machine of a Hopper GPU, by the name that CUDA gives; None for others.

    >>> machine_of_gpu("NVIDIA H200").name
    'h200'
    """
    return MACHINES.get(_GPUS.get(name, ""))


def machine(name: str) -> Machine:
    """A known machine by its short name, like "h200". Raises ValueError for others.

    >>> machine("gb200").ranks_per_domain
    72
    """
    if name not in MACHINES:
        raise ValueError(f"machine is {name!r}; known: {', '.join(MACHINES)}")
    return MACHINES[name]

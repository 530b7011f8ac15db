"""A mode under which reading a value on the host is an error, as it would be inside a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten.unique_consecutive.default, aten._unique2.default, aten.equal.default, aten.is_nonzero.default,
}  # fmt: skip


class NoHostReads(TorchDispatchMode):
    """Raises on operators whose result or shape depends on a value that the host would have to wait for."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        by_mask = op in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        by_repeats = op in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor) and not kwargs.get(
            "output_size"
        )
        if op in READS or by_mask or by_repeats:
            raise AssertionError(f"{op} reads a value on the host")
        return op(*args, **kwargs)

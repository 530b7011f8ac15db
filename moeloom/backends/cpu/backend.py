"""The CPU backend: what it owns, and its stages."""

from __future__ import annotations

import platform
import sys

import torch
from torch import Tensor
from torch.distributed import Store

from moeloom.backends.base import ExpertGrads, Handle, Pending, RowOrder, Traffic
from moeloom.backends.control import Control
from moeloom.backends.cpu.buffers import SymmetricBuffer
from moeloom.backends.cpu.combine import combine
from moeloom.backends.cpu.decode import Decode, begin_combine, begin_dispatch, decode_experts
from moeloom.backends.cpu.dispatch import dispatch
from moeloom.backends.cpu.experts import experts, experts_backward
from moeloom.backends.cpu.wire import Wire
from moeloom.backends.peers import Peers
from moeloom.config import Recipe
from moeloom.errors import CapabilityError
from moeloom.experts import Experts
from moeloom.placement import Placement
from moeloom.quantize import pack_records, quantize
from moeloom.route import Router
from moeloom.topology import Topology
from moeloom.types import ExchangeName, Received, Routing


class CpuBackend:
    """Shared memory within a node, gloo between nodes. See `Backend` for the stages."""

    name = "cpu"
    device = torch.device("cpu")
    pipelines: tuple[str, ...] = ("split", "decode")
    overlaps_chunks = True
    layer_rows = RowOrder(exact=False)
    decode_rows = RowOrder("batched", exact=False)

    def __init__(self, peers: Peers, store: Store | None, topology: Topology, max_tokens: int | None) -> None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64") and topology.num_ranks > 1:
            raise CapabilityError(
                f"several CPU ranks need Linux on x86-64 (its memory order and /dev/shm); this is {sys.platform}"
                f" on {platform.machine()}. One rank works anywhere."
            )
        self.rank, self.topology, self.max_tokens = peers.rank, topology, max_tokens
        self.local_ranks = topology.local_ranks(self.rank)
        self.local_index = topology.local_index(self.rank)
        self.forwarded_sources = topology.forwarded_sources(self.rank)
        self.traffic = Traffic()
        self.control = Control(peers, self.local_ranks)
        self.wire: Wire | None = None
        if topology.num_ranks > 1:
            self.control.attach()
        if store is not None and topology.num_nodes > 1:
            self.wire = self.control.wire = Wire(store, self.control, peers.timeout)
            peers.gather("connected", {})  # a rank that closed before would break the connecting of the others
        self.buffer = SymmetricBuffer(self.control)
        self.decode = Decode(self)

    def dispatch(
        self, x: Tensor, routing: Routing | Handle, placement: Placement, rows: RowOrder, exchange: ExchangeName
    ) -> tuple[Received, Handle]:
        """See `Backend.dispatch`."""
        return dispatch(self, x, routing, placement, rows, exchange)

    def experts(self, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
        """See `Backend.experts`."""
        return experts(received, weights, recipe)

    def experts_backward(self, received: Received, d_out: Tensor, weights: Experts, recipe: Recipe) -> ExpertGrads:
        """See `Backend.experts_backward`."""
        return experts_backward(received, d_out, weights, recipe)

    def combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool, identity: bool = True) -> Tensor:
        """See `Backend.combine`."""
        return combine(self, rows, handle, recipe, weighted, identity)

    def route(self, router: Router, logits: Tensor, bias: Tensor | None) -> Routing:
        """See `Backend.route`."""
        return router(logits, bias)

    def pack(self, weights: Experts) -> Experts:
        """See `Backend.pack`."""
        return weights.quantized()

    def check(self) -> None:
        """See `Backend.check`. Every call has raised what was wrong with it."""

    def records(self, x: Tensor) -> Tensor:
        """See `Backend.records`."""
        return pack_records(quantize(x))

    def begin_dispatch(
        self, x: Tensor, routing: Routing, placement: Placement, rows: RowOrder, exchange: ExchangeName
    ) -> Pending:
        """See `Backend.begin_dispatch`."""
        return begin_dispatch(self, x, routing, placement, rows, exchange)

    def decode_experts(self, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
        """See `Backend.decode_experts`."""
        return decode_experts(self, received, weights, recipe)

    def begin_combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Pending:
        """See `Backend.begin_combine`."""
        return begin_combine(self, rows, handle, recipe, weighted)

    def gather(self, kind: str, own: dict) -> list[dict]:
        """See `Backend.gather`."""
        with self.control.operation(kind):
            return self.control.agree({}, own)

    def refuse(self, kind: str, error: Exception) -> None:
        """See `Backend.refuse`. Raises the error on this rank."""
        with self.control.operation(kind):
            raise error

    def symmetric_bytes(self) -> int:
        """See `Backend.symmetric_bytes`."""
        return self.buffer.bytes_per_rank + sum(buffer.bytes_per_rank for buffer in self.decode.buffers)

    def close(self) -> None:
        """See `Backend.close`."""
        self.buffer.close()
        self.decode.close()
        if self.wire is not None:
            self.wire.close()
            self.wire = self.control.wire = None
        self.control.detach()

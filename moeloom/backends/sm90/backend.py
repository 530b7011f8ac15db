"""The SM90 backend: the GPUs of a node, H100 or H200. What it owns, and its stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from moeloom import jit
from moeloom.backends import plain_experts
from moeloom.backends.base import ExpertGrads, Handle, Pending, RowOrder, Traffic
from moeloom.backends.control import Control
from moeloom.backends.peers import Peers
from moeloom.backends.sm90 import combine, dispatch, exchange, experts, experts_backward, grouped, quantize, route
from moeloom.backends.sm90.homes import Homes, Served
from moeloom.backends.sm90.launch import in_vectors
from moeloom.backends.sm90.member import Member
from moeloom.backends.sm90.memory import SymmetricMemory, check_peers, write_word
from moeloom.backends.sm90.news import News
from moeloom.backends.sm90.spaces import LIMITS, MAX_ROW_BYTES, VECTOR_BYTES, Sizes
from moeloom.config import Recipe
from moeloom.errors import CapabilityError, CapacityError
from moeloom.experts import Experts
from moeloom.placement import Placement
from moeloom.quantize import pack_records, record_bytes, scales_begin
from moeloom.route import Router
from moeloom.topology import Topology
from moeloom.types import ExchangeName, Quantized, Received, Routing

log = logging.getLogger("moeloom")
STOP_BYTES = 256  # behind what kernels use; its first word is `State.stop`
STOPPED = 0xFFFFFFFF  # from the first epoch on
MAX_CAPTURED = 4096  # calls whose tickets need not be made anew
MAX_KEPT = 256  # members and placements; those of long ago are made again
# of dispatch and combine every other one is for ranks played on one GPU
_USED = (
    *dispatch.KERNELS[::2],
    *combine.KERNELS[::2],
    *quantize.KERNELS,
    *experts.KERNELS,
    *experts_backward.KERNELS,
    *route.KERNELS,
)


class Sm90Backend:
    """Kernels over memory that the GPUs of one node share. See `Backend` for the stages.

    An operation begins with a round of the hosts, so that what is wrong on one rank is an error on all of them; GPUs
    run behind. Not so under capture: a graph's replay is of the GPUs only. What kernels find, the next call raises.
    """

    name = "sm90"
    pipelines: tuple[str, ...] = ("split", "decode")
    overlaps_chunks = False  # a thread for the experts shares the stream
    layer_rows = RowOrder(alignment=grouped.ALIGNMENT, exact=False)
    decode_rows = RowOrder(exact=False)

    def __init__(self, peers: Peers, store: Store | None, topology: Topology, max_tokens: int | None) -> None:
        if topology.num_nodes > 1 or topology.num_ranks > LIMITS["MAX_RANKS"]:
            raise CapabilityError(
                f"the sm90 backend serves the GPUs of one node, up to {LIMITS['MAX_RANKS']}; found:"
                f" {topology.num_ranks} ranks on {topology.num_nodes} nodes. backend='cpu' has no such limit"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.topology, self.max_tokens = peers.rank, topology, max_tokens
        self.traffic = Traffic()
        self._base: Member | None = None
        self._members: dict[tuple, Member] = {}
        self._served: dict[Placement, Served] = {}
        self._in_graphs: dict[int, tuple[Homes, Member]] = {}  # their addresses are in graphs, for good
        self._base_is_in_graphs = False
        self._stream: torch.cuda.Stream | None = None
        self._stops: list[int] = []  # addresses, of all other ranks
        self._captured = 0
        self.control = Control(peers, topology.local_ranks(self.rank))
        if topology.num_ranks > 1:
            self.control.attach()
            check_peers(self.control, self.device)
        with self.operation("construction"):  # all hear of it if one cannot
            # compiled once per user; loaded now, since loading behind a kernel that waits for peers waits for it
            for binary in jit.prewarm(declared.source for declared in _USED):
                jit.load(binary, self.device)
            self.memory = SymmetricMemory(self.control, self.device)
            self.news = News(self.control)
            self._slab = torch.zeros(MAX_CAPTURED, 2, dtype=torch.int32, device=self.device)
            self.control.agree({})

    # ---- the stages

    def dispatch(
        self, x: Tensor, routing: Routing | Handle, placement: Placement, rows: RowOrder, exchange_name: ExchangeName
    ) -> tuple[Received, Handle]:
        """See `Backend.dispatch`."""
        return exchange.dispatch(self, x, routing, placement, rows, exchange_name)

    def combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool, identity: bool = True) -> Tensor:
        """See `Backend.combine`."""
        return exchange.combine(self, rows, handle, recipe, weighted)

    def experts(self, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
        """See `Backend.experts`."""
        if recipe.dtype == torch.float32:
            if self.capturing:
                raise CapabilityError("recipe fp32 reads counts on the host, which a graph cannot; use bf16 or fp8")
            return plain_experts.experts(received, weights, recipe)
        with torch.cuda.device(self.device):
            if recipe.quantized and weights.scales is None:
                weights = quantize.quantize_experts(weights)
            rows = received.rows.reshape(-1, received.rows.shape[-1])
            if received.scales is not None:
                rows = _records(rows, received.scales.reshape(-1, received.scales.shape[-1]))
            out = experts.experts(
                rows,
                received.expert_start.int(),
                received.num_tokens_per_expert.int(),
                received.topk_weights.reshape(-1),
                weights,
                recipe,
                experts.Scratch.make(len(rows), weights, recipe, self._tickets()),
            )
            return out.view(*received.rows.shape)

    def experts_backward(self, received: Received, d_out: Tensor, weights: Experts, recipe: Recipe) -> ExpertGrads:
        """See `Backend.experts_backward`."""
        if recipe.quantized:
            raise CapabilityError(f"recipe {recipe.name} is forward only; train in bf16")
        if recipe.dtype == torch.float32:
            return plain_experts.experts_backward(received, d_out, weights, recipe)
        with torch.cuda.device(self.device):
            return experts_backward.experts_backward(
                received.rows,
                received.expert_start.int(),
                received.num_tokens_per_expert.int(),
                received.topk_weights,
                d_out,
                weights,
                owned=True,
                zero_tail=False,
            )

    def begin_dispatch(
        self, x: Tensor, routing: Routing, placement: Placement, rows: RowOrder, exchange_name: ExchangeName
    ) -> Pending:
        """See `Backend.begin_dispatch`. The stream orders what follows: nothing is left to wait for."""
        return Pending(None, exchange.dispatch(self, x, routing, placement, rows, exchange_name, pipeline="decode"))

    def decode_experts(self, received: Received, weights: Experts, recipe: Recipe) -> Tensor:
        """See `Backend.decode_experts`."""
        return self.experts(received, weights, recipe)

    def begin_combine(self, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Pending:
        """See `Backend.begin_combine`."""
        return Pending(None, exchange.combine(self, rows, handle, recipe, weighted))

    def route(self, router: Router, logits: Tensor, bias: Tensor | None) -> Routing:
        """See `Backend.route`."""
        return route.route(router, logits, bias)

    def pack(self, weights: Experts) -> Experts:
        """See `Backend.pack`."""
        return quantize.quantize_experts(weights)

    def check(self) -> None:
        """See `Backend.check`."""
        torch.cuda.synchronize(self.device)
        self.news.raise_failure()
        error = self.news.take()
        if error is not None:
            raise error

    def records(self, x: Tensor) -> Tensor:
        """See `Backend.records`."""
        try:
            with torch.cuda.device(self.device):
                return quantize.quantize_rows(in_vectors(x))
        except Exception as error:
            self.refuse("dispatch", error)  # the other ranks are on their way there
            raise

    def _tickets(self) -> Tensor | None:
        """Of a captured call, for good: a graph then has no kernel that makes them zero."""
        if not self.capturing or self._captured == len(self._slab):
            return None
        self._captured += 1
        return self._slab[self._captured - 1]

    # ---- what stages need

    @contextmanager
    def operation(self, kind: str) -> Iterator[None]:
        """One collective operation on this device."""
        try:
            with self.control.operation(kind), torch.cuda.device(self.device):
                yield
        except BaseException:
            if self.control.failure is not None:
                self._stop_peers()  # they may have launched what now waits for this rank
            raise

    def _stop_peers(self) -> None:
        """End every wait of the other ranks' kernels, for good. Beside a stream that may itself be waiting."""
        if not self._stops:
            return
        try:
            with torch.cuda.device(self.device):
                stream = torch.cuda.Stream(self.device)
                for stop in self._stops:
                    write_word(stop, STOPPED, stream.cuda_stream)
                stream.synchronize()
        except Exception as failed:  # what went wrong before is what the caller raises
            log.warning("rank %d: kernels of other ranks wait until their deadline: %s", self.rank, failed)

    @property
    def capturing(self) -> bool:
        """Whether the current stream's launches go into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def agree(self, same: dict, own: dict | None = None) -> list[dict]:
        """`Control.agree`, with what kernels have found since; under capture the hosts do not meet, and it is empty."""
        self.news.raise_failure()
        if self.capturing:
            return []
        return self.control.agree(same, own, self.news.take())

    @contextmanager
    def in_order(self) -> Iterator[torch.cuda.Stream]:
        """Launches that wait for other ranks follow each other, on whatever streams. Gives the current one."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream and not self.capturing:
            stream.wait_stream(self._stream)
        yield stream
        if not self.capturing:
            self._stream = stream

    def served(self, placement: Placement) -> Served:
        """The placement on this device."""
        served = self._served.get(placement)
        if served is None:
            if self.capturing:
                raise CapabilityError("placement is new, and a graph cannot capture its copy; run once before capture")
            _make_room(self._served)
            served = self._served[placement] = Served(placement, self.rank, self.device)
        return served

    def member(
        self,
        homes: Homes,
        num_topk: int,
        max_tokens: int,
        row_bytes: int = VECTOR_BYTES,
        sum_bytes: int = VECTOR_BYTES,
        strict: bool = True,
        slots_travel: bool = False,
    ) -> Member:
        """This rank's end of an exchange of such rows. Collective where symmetric memory has to grow for it."""
        shape: dict[str, Any] = {
            "max_tokens": max_tokens,
            "num_topk": num_topk,
            "num_local": homes.num_local,
            "row_bytes": row_bytes,
            "sum_bytes": sum_bytes,
            "slots_travel": slots_travel,
        }
        self._reserve(shape)
        key = (homes, strict, *shape.values())
        if key not in self._members:
            assert self._base is not None
            within = self._base.sizes
            sizes = Sizes(within.num_ranks, num_experts=homes.num_experts, within=within, **shape)
            _make_room(self._members)
            self._members[key] = replace(
                self._base,
                sizes=sizes,
                expert_rank=homes.expert_rank,
                expert_slot=homes.expert_slot,
                problems=self.news.strict if strict else self.news.lenient,
            )
        member = self._members[key]
        if self.capturing:
            self._in_graphs[id(member)], self._base_is_in_graphs = (homes, member), True
        return member

    def _reserve(self, shape: dict[str, Any]) -> None:
        """Let the symmetric memory have room for this, beside what it had room for before; for what follows too.

        What graphs have been captured with stays beside it: they go on exchanging through that.
        """
        likely = min(2 * shape["row_bytes"], MAX_ROW_BYTES)  # fp8 rows come back as bf16, bf16 gradients as fp32
        need = {**shape, "sum_bytes": max(shape["sum_bytes"], likely)}
        if self._base is not None:
            have = {name: getattr(self._base.sizes, name) for name in need}
            if all(have[name] >= shape[name] for name in shape):
                return
            need = {name: max(have[name], need[name]) for name in need}
        if self.capturing:
            raise CapacityError(
                f"symmetric memory must grow to {need}, which a graph cannot capture; run the layer once before capture"
            )
        num_ranks = self.topology.num_ranks
        placement = Placement.even(num_ranks * need["num_local"], num_ranks)
        sizes = Sizes(num_ranks=num_ranks, num_experts=placement.num_experts, **need)
        self._members.clear()
        self._base = None
        if not self._base_is_in_graphs:
            self._stops = []
        addresses = self.memory.make(sizes.num_bytes + STOP_BYTES, keep=self._base_is_in_graphs)
        stops = [address + sizes.num_bytes for address in addresses]
        self._stops += stops[: self.rank] + stops[self.rank + 1 :]
        self._base_is_in_graphs = False
        self._base = Member.make(
            sizes,
            placement,
            self.rank,
            addresses,
            self.control.peers.timeout,
            self.device,
            self.news.failures,
            stops[self.rank],
        )

    # ---- for the Runtime

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
        return self.memory.num_bytes

    def close(self) -> None:
        """See `Backend.close`."""
        self._members.clear()
        self._served.clear()
        self._stops = []
        try:
            self.memory.close()
        finally:
            self._in_graphs.clear()
            self._base = self._stream = None
            self.control.detach()


def _records(values: Tensor, scales: Tensor) -> Tensor:
    """Quantised rows as records: as they have come, if they have."""
    num_rows, hidden = values.shape
    begin = scales_begin(hidden)
    pitch = values.stride(0)
    together = scales.data_ptr() == values.data_ptr() + begin and scales.stride(0) * 4 == pitch
    if num_rows and together:
        return values.view(torch.uint8).as_strided((num_rows, record_bytes(hidden)), (pitch, 1))
    return pack_records(Quantized(values, scales))


def _make_room(kept: dict) -> None:
    if len(kept) >= MAX_KEPT:
        del kept[next(iter(kept))]

"""dispatch and combine as the contract has them: what ranks agree on, the launches, and what callers see of them."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from moeloom.backends.base import Handle, RowOrder
from moeloom.backends.sm90.combine import combine as launch_combine
from moeloom.backends.sm90.dispatch import MAX_ALIGNMENT, MAX_CAPACITY, Arrived, Tokens
from moeloom.backends.sm90.dispatch import dispatch as launch_dispatch
from moeloom.backends.sm90.homes import Homes, Ranks
from moeloom.backends.sm90.launch import in_vectors
from moeloom.backends.sm90.spaces import MAX_ROW_BYTES, VECTOR_BYTES, Sizes, between, most_tokens
from moeloom.config import Recipe
from moeloom.errors import CapabilityError, CapacityError
from moeloom.layout import Layout
from moeloom.placement import Placement
from moeloom.regions import next_step
from moeloom.types import ExchangeName, Received, Routing

if TYPE_CHECKING:
    from moeloom.backends.sm90.backend import Sm90Backend

NO_ROOM = -2  # in `Arrived.pair_row`


@dataclass(frozen=True, eq=False)
class Paths:
    """What a handle keeps of a dispatch on this backend.

    homes: of `ids [T, K]`, which the kernels got. served: ids of the slots that serve, the same but for order "rank".
    order: of the launch, with a capacity. max_tokens: of any rank. arrived: without rows. stream: on which all of these
    were made.
    """

    homes: Homes
    ids: Tensor
    served: Tensor
    order: RowOrder
    max_tokens: int
    arrived: Arrived
    stream: torch.cuda.Stream

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Another stream reads them: torch must not give their memory away before it has. Callers cannot say so."""
        if stream != self.stream:
            for tensor in (self.ids, self.served, *vars(self.arrived).values()):
                tensor.record_stream(stream)


@dataclass(frozen=True, eq=False)
class DeviceLayout:
    """What others read of a `Layout`, made when they do. num_rows: as the caller sees them."""

    num_rows: int
    num_local: int
    paths: Paths

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """`[L]`."""
        return self.paths.arrived.expert_rows[: self.num_local]

    @property
    def pos_to_topk(self) -> Tensor:
        """`[num_rows]` int64, -1 for padding."""
        pair = self.paths.arrived.row_pair[: self.num_rows].long()
        if isinstance(self.paths.homes, Ranks):
            return pair.clamp(max=0)
        return torch.where(pair < 0, -1, pair % self.paths.ids.shape[1])


def dispatch(
    gpu: Sm90Backend,
    x: Tensor,
    routing: Routing | Handle,
    placement: Placement,
    rows: RowOrder,
    exchange: ExchangeName,
    pipeline: str = "split",
) -> tuple[Received, Handle]:
    """See `Backend.dispatch`; with pipeline "decode" shapes follow from max_tokens, and no count is read."""
    with gpu.operation("dispatch"):
        if placement.num_identity:
            raise CapabilityError("placement has identity experts; the sm90 backend has none yet, the cpu backend does")
        if isinstance(routing, Handle):
            gpu.agree({**_payload(x), "handle of operation": routing.number})
            arrived = _launch(gpu, x, routing.routing, routing.paths, routing.rows.overflow)
            return _received(gpu, x, arrived, routing), routing
        _check_limits(gpu, x, routing, placement, rows)
        same = {**_payload(x), "top-k": routing.num_topk, "placement": placement.fingerprint, "exchange": exchange}
        same |= {"pipeline": pipeline, "rows by rank": rows.order == "rank"}
        same["batched without a capacity"] = rows.order == "batched" and rows.capacity is None  # one launch more
        counts = [record["tokens"] for record in gpu.agree(same, {"tokens": len(x)})]
        max_tokens = gpu.max_tokens or _roomy(max(counts), routing.num_topk)
        fixed = pipeline == "decode" or gpu.capturing
        total = max_tokens * gpu.topology.num_ranks if fixed else sum(counts)
        if fixed and rows.exact and rows.capacity is None:
            rows = replace(rows, capacity=_worst_capacity(rows, placement.num_local(gpu.rank), routing.num_topk, total))
        paths = _plan(gpu, routing, placement, rows, total, max_tokens)
        arrived = _launch(gpu, x, routing, paths, rows.overflow)
        num_local = placement.num_local(gpu.rank)
        num_rows = len(arrived.rows)
        if rows.capacity is not None:
            num_rows = rows.capacity * (num_local if rows.order == "batched" else 1)
        elif rows.exact:
            num_rows = int(arrived.expert_start[1 if rows.order == "rank" else num_local])  # waits for the GPU
        paths = _kept(paths, arrived, rows, num_rows)
        layout = cast(Layout, DeviceLayout(num_rows, num_local, paths))
        handle = Handle(
            weakref.ref(gpu), gpu.control.number, len(x), routing, placement, exchange, rows, layout, None, paths,
            pipeline,
        )  # fmt: skip
        return _received(gpu, x, arrived, handle), handle


def _check_limits(gpu: Sm90Backend, x: Tensor, routing: Routing, placement: Placement, rows: RowOrder) -> None:
    """Raise for what the kernels cannot do while the ranks can still be told: after they have agreed it would be the
    end of the Runtime.
    """
    if gpu.max_tokens is None and gpu.capturing:
        raise CapacityError("max_tokens is None; a captured call's shapes follow from it, so construct with a number")
    served = gpu.served(placement)
    homes: Homes = served
    row_bytes = _whole_vectors(x.shape[1] * x.element_size())
    if rows.order == "rank":
        homes, row_bytes = served.ranks, row_bytes + _whole_vectors(8 * routing.num_topk)
    numbers = (gpu.max_tokens or max(len(x), 1), routing.num_topk, homes.num_experts, homes.num_local, row_bytes)
    _fits(gpu.topology.num_ranks, *numbers)
    between("alignment", rows.alignment, 1, MAX_ALIGNMENT)
    if rows.capacity is not None:
        per = homes.num_local if rows.order == "batched" else 1
        between("rows for capacity", rows.capacity * per, 0, MAX_CAPACITY)


@functools.lru_cache(1024)
def _fits(num_ranks: int, max_tokens: int, num_topk: int, num_experts: int, num_local: int, row_bytes: int) -> None:
    """Raise ValueError unless there can be symmetric memory for it."""
    Sizes(num_ranks, max_tokens, num_topk, num_experts, num_local, row_bytes, row_bytes)


def _roomy(num_tokens: int, num_topk: int) -> int:
    """Room for so many tokens and some more, in steps, but not for more than the kernels can do."""
    return min(next_step(num_tokens), max(num_tokens, most_tokens(num_topk)))


def _whole_vectors(num_bytes: int) -> int:
    return -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES


def _worst_capacity(rows: RowOrder, num_local: int, num_topk: int, num_tokens: int) -> int:
    """Room for a row of each token for each expert ("batched"), or of each pair."""
    if rows.order == "batched":
        return -(-num_tokens // rows.alignment) * rows.alignment
    return num_tokens * num_topk + num_local * (rows.alignment - 1)


def _kept(paths: Paths, arrived: Arrived, rows: RowOrder, num_rows: int) -> Paths:
    """What combine and a second payload need, for the num_rows that the caller sees."""
    pair_row, order = arrived.pair_row, paths.order
    if rows.order == "rank":
        pair_row = pair_row.masked_fill(pair_row >= num_rows, NO_ROOM)
    if rows.order == "rank" or (rows.order == "expert" and rows.exact):
        order = replace(order, capacity=num_rows)
    tables = {"row_pair": arrived.row_pair[:num_rows], "row_weight": arrived.row_weight[:num_rows]}
    return replace(paths, order=order, arrived=replace(arrived, rows=arrived.rows[:0], pair_row=pair_row, **tables))


def _plan(
    gpu: Sm90Backend,
    routing: Routing,
    placement: Placement,
    rows: RowOrder,
    num_tokens: int,
    max_tokens: int,
) -> Paths:
    """Which ids the kernel gets, and room for the rows of num_tokens tokens unless there is a capacity."""
    served = gpu.served(placement)
    slots = served.ids(routing.topk_idx)
    if slots.data_ptr() == routing.topk_idx.data_ptr() and not gpu.capturing:
        # combine reads them again, perhaps in a backward long after: if the caller had changed them by then, it would
        # wait for rows that nobody sends
        slots = slots.clone()
    ids = slots
    homes: Homes = served
    order, num_pairs = rows, num_tokens * routing.num_topk
    if rows.order == "rank":
        homes = served.ranks
        ids, order, num_pairs = homes.ids(slots), RowOrder(), num_tokens
        if rows.capacity is not None and rows.overflow == "error":
            num_pairs = rows.capacity  # the kernel says if that is too little; else what is dropped is counted here
    if order.capacity is None:
        order = replace(order, capacity=num_pairs + homes.num_local * (order.alignment - 1))
        if order.order == "batched":
            order = replace(order, capacity=_fullest(gpu, routing, placement, rows, num_tokens, max_tokens))
    nothing = Arrived(*[slots.new_empty(0)] * 7)
    stream = torch.cuda.current_stream(gpu.device)
    return Paths(homes, ids, slots, order, max_tokens, nothing, stream)


def _fullest(
    gpu: Sm90Backend,
    routing: Routing,
    placement: Placement,
    rows: RowOrder,
    num_tokens: int,
    max_tokens: int,
) -> int:
    """Rows of the expert that gets most on this rank, aligned: one more launch, of small rows, and a wait for it."""
    small = torch.zeros(routing.num_tokens, VECTOR_BYTES, dtype=torch.uint8, device=gpu.device)
    paths = _plan(gpu, routing, placement, RowOrder(), num_tokens, max_tokens)
    most = int(_launch(gpu, small, routing, paths, "drop").expert_rows.max())
    return -(-most // rows.alignment) * rows.alignment


def _launch(gpu: Sm90Backend, x: Tensor, routing: Routing, paths: Paths, overflow: str) -> Arrived:
    """Bring x over the routing."""
    rows = _as_bytes(x)
    if isinstance(paths.homes, Ranks):
        words = torch.cat([paths.served.int(), routing.topk_weights.contiguous().view(torch.int32)], 1)
        rows = _as_bytes(torch.cat([rows, words.view(torch.uint8)], 1))
    num_topk, strict = paths.ids.shape[1], overflow == "error"
    member = gpu.member(paths.homes, num_topk, paths.max_tokens, row_bytes=rows.shape[1], strict=strict)
    tokens = Tokens(rows, paths.ids, routing.topk_weights.contiguous())
    out = Arrived.empty(member.sizes, paths.order, gpu.device)
    gpu.news.given = paths.homes.given
    with gpu.in_order() as stream:
        paths.keep_for(stream)
        launch_dispatch([member], [tokens], paths.order, [out])
    return out


def _received(gpu: Sm90Backend, x: Tensor, arrived: Arrived, handle: Handle) -> Received:
    """The rows as the caller sees them. Within a layer (rows not exact) only what its stages read."""
    rows, num_rows, paths = handle.rows, handle.layout.num_rows, handle.paths
    num_local = handle.placement.num_local(gpu.rank)
    row_bytes = x.shape[1] * x.element_size()
    if isinstance(paths.homes, Ranks):
        return _received_by_rank(gpu, x, arrived, handle)
    start, counts = arrived.expert_start[: num_local + 1], arrived.expert_rows[:num_local]
    payload = arrived.rows[:num_rows, :row_bytes].view(x.dtype)
    weights, pair = arrived.row_weight[:num_rows], arrived.row_pair[:num_rows]
    if not rows.exact:
        return Received(payload, pair, weights, start, counts, start[0], "expert")  # which is 0
    place = torch.arange(num_rows, device=gpu.device)
    if rows.order == "batched":
        expert = place // max(num_rows // max(num_local, 1), 1)
    else:
        expert = torch.searchsorted(start[1:].contiguous(), place.int(), right=True)
    padding = pair < 0
    if rows.alignment > 1 or rows.capacity is not None or rows.order == "batched":
        arrived.rows[:num_rows].view(torch.int32).masked_fill_(padding.unsqueeze(1), 0)
    shape: tuple[int, ...] = (num_rows,)
    if rows.order == "batched":
        shape = (num_local, num_rows // max(num_local, 1))
    return Received(
        rows=payload.unflatten(0, shape) if rows.order == "batched" else payload,
        topk_idx=expert.masked_fill(padding, -1).view(shape),
        topk_weights=weights.view(shape),
        expert_start=start.long(),
        num_tokens_per_expert=counts.long(),
        num_dropped=_dropped(arrived),
        order=rows.order,
    )


def _received_by_rank(gpu: Sm90Backend, x: Tensor, arrived: Arrived, handle: Handle) -> Received:
    """A token's ids and weights come behind its row."""
    num_topk, num_rows, served = handle.routing.num_topk, handle.layout.num_rows, handle.paths.homes.served
    row_bytes = x.shape[1] * x.element_size()
    begin = _whole_vectors(row_bytes)
    words = arrived.rows[:, begin : begin + 8 * num_topk].contiguous().view(torch.int32)
    ids, weights = words[:, :num_topk], words[:, num_topk:].contiguous().view(torch.float32)
    valid = (arrived.row_pair >= 0).unsqueeze(1) & (ids >= 0) & (ids < served.num_experts)
    known = ids.clamp(0, served.num_experts - 1)
    local = torch.where(valid & (served.expert_rank[known] == gpu.rank), served.expert_slot[known], -1).long()
    weights = torch.where(local >= 0, weights, 0.0)
    num_local = handle.placement.num_local(gpu.rank)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=gpu.device)
    counts.scatter_add_(0, local[:num_rows].flatten() + 1, torch.ones_like(local[:num_rows].flatten()))
    arrived.rows.view(torch.int32).masked_fill_(arrived.row_pair.unsqueeze(1) < 0, 0)
    return Received(
        rows=arrived.rows[:num_rows, :row_bytes].view(x.dtype),
        topk_idx=local[:num_rows],
        topk_weights=weights[:num_rows],
        expert_start=torch.zeros(num_local + 1, dtype=torch.int64, device=gpu.device),
        num_tokens_per_expert=counts[1:],
        num_dropped=(local[num_rows:] >= 0).sum(),
        order="rank",
    )


def _dropped(arrived: Arrived) -> Tensor:
    """Pairs of all ranks that had no room here, `[]` int64."""
    most = arrived.pair_row.shape[1]
    token = torch.arange(most, device=arrived.pair_row.device)
    sent = token < arrived.tokens_of_rank.unsqueeze(1)
    return ((arrived.pair_row == NO_ROOM) & sent.unsqueeze(2)).sum()


def combine(gpu: Sm90Backend, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Tensor:
    """See `Backend.combine`; dispatch has refused identity experts."""
    with gpu.operation("combine"):
        between("bytes of a row", rows.shape[1] * rows.element_size(), 1, MAX_ROW_BYTES)
        wanted = {"handle of operation": handle.number, "hidden": rows.shape[1], "dtype": str(rows.dtype)}
        gpu.agree({**wanted, "reduction": recipe.reduction, "weighted": weighted})
        return _sum(gpu, rows, handle, recipe, weighted)


def _sum(gpu: Sm90Backend, rows: Tensor, handle: Handle, recipe: Recipe, weighted: bool) -> Tensor:
    paths, hidden = handle.paths, rows.shape[1]
    wide = _as_bytes(rows.contiguous()).view(rows.dtype)
    sum_bytes = wide.shape[1] * wide.element_size()
    by_slot = recipe.reduction == "per_slot" and gpu.topology.num_ranks > 1
    shape = (paths.ids.shape[1], paths.max_tokens)
    member = gpu.member(paths.homes, *shape, sum_bytes=sum_bytes, slots_travel=by_slot)
    y = wide.new_empty(handle.num_tokens, wide.shape[1])
    tokens = Tokens(rows[:0], paths.ids, handle.routing.topk_weights.contiguous())
    with gpu.in_order() as stream:
        paths.keep_for(stream)
        launch_combine(
            [member], [(tokens, paths.arrived)], [wide], weighted=weighted, reduction=recipe.reduction, out=[y]
        )
    return y if wide.shape[1] == hidden else y[:, :hidden].contiguous()


def _payload(x: Tensor) -> dict[str, Any]:
    """What must be equal on all ranks for rows to travel."""
    if x.dtype == torch.uint8:
        return {"dtype": "torch.float8_e4m3fn with scales", "bytes of a row": x.shape[1]}
    return {"dtype": str(x.dtype), "hidden": x.shape[1]}


def _as_bytes(rows: Tensor) -> Tensor:
    """`[N, bytes]` uint8 as kernels copy rows: whole vectors, aligned. A copy only where they are not."""
    missing = -rows.shape[1] % (VECTOR_BYTES // rows.element_size())
    if missing:
        rows = functional.pad(rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows, (0, missing))
    return in_vectors(rows).view(torch.uint8)

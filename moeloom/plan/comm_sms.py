"""How many SMs communication needs so that the slower link, not the SMs, is the limit.

The formulas are those that DeepEP 2.1 documents in its source (`get_theoretical_num_sms`, `get_theoretical_num_qps`,
the buffer size hints), written from their description; they reproduce its published SM counts and buffer sizes.

A domain has as many ranks as the largest one: nodes of different size count as if all were full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeloom.plan.choices import Uniform
from moeloom.plan.problem import Domains, bounds
from moeloom.types import ExchangeName

SM_READ_BYTES_PER_SECOND = 200e9  # DeepEP's assumptions for one SM that moves rows
SM_WRITE_BYTES_PER_SECOND = 50e9
MARGIN = 1.25
MIN_SMS = 4
MIN_SMS_ALONE = 64  # where communication need not leave SMs to computation
QPS_PER_SM = 16  # hybrid
MAX_DIRECT_QPS = 9
MAX_CHANNELS = 160 * 8  # hybrid, SMs x channels each: a row more for each
RECORD_ALIGNMENT = 32
BUFFER_ALIGNMENT = 2**21


@dataclass(frozen=True)
class Links:
    """Bytes per second of a rank's links, one direction; None or 0 if not known."""

    scale_up: float | None
    scale_out: float | None = None


@dataclass(frozen=True)
class _Share:
    """Bytes of one rank's dispatch, in units of all rows it sends: what SMs read and write, what each link carries."""

    read: float
    write: float
    scale_up: float
    scale_out: float = 0.0


def num_comm_sms(
    num_experts: int,
    num_topk: int,
    domains: Domains,
    links: Links,
    exchange: ExchangeName = "hybrid",
    device_sms: int = 132,
    prefer_overlap: bool = True,
) -> int:
    """SMs with which reading and writing keep up with the link that limits a dispatch, times 1.25, even, 4 at least.

    SMs = link's rate / its share of the bytes x max(share read / 200 GB/s, share written / 50 GB/s). The link that
    limits hybrid is the one that takes longer; in direct it is always scale-up, as in DeepEP. Hybrid on one node is
    direct. prefer_overlap: False takes 64 at least.
    A link whose rate is not known is left out, which gives as many SMs or more. If that leaves no link, or a rank sends
    nothing on it, all of the device's: nothing says that fewer would do.

    >>> num_comm_sms(256, 8, Domains(num_ranks=16, num_nodes=2), Links(scale_up=430e9, scale_out=50e9))
    12
    """
    share = _share(num_experts, num_topk, domains, exchange)
    limits = [(share.scale_up, links.scale_up), (share.scale_out, links.scale_out)]
    # of one byte of the dispatch on the slower link
    seconds = max((part / rate for part, rate in limits if rate), default=0.0)
    if seconds == 0.0:
        return device_sms
    needed = max(share.read / SM_READ_BYTES_PER_SECOND, share.write / SM_WRITE_BYTES_PER_SECOND) / seconds
    fewest = MIN_SMS if prefer_overlap else MIN_SMS_ALONE
    return min(device_sms, max(fewest, 2 * math.ceil(math.ceil(MARGIN * needed) / 2)))


def _share(num_experts: int, num_topk: int, domains: Domains, exchange: ExchangeName) -> _Share:
    """With t, s the different ranks and nodes that a token reaches, each of its t rows being 1/t of the bytes:

    direct: a row is read once, written to the ranks of the own node, and once more for messages to other nodes.
    hybrid: a row is read once, and again by each of the s forwarders; written for messages, by the s / N of them that
    are of the own node, and to its t ranks.
    """
    nodes, per_node = domains.num_nodes, _per_node(domains)
    ranks = nodes * per_node
    to_ranks, to_nodes = (_reached(groups, num_experts, num_topk) for groups in (ranks, nodes))
    once = 1.0 / to_ranks
    if exchange == "direct" or nodes == 1:
        return _Share(once, 1.0 / nodes + (once if nodes > 1 else 0.0), (1.0 - 1.0 / per_node) / nodes)
    return _Share(
        read=once * (1.0 + to_nodes),
        write=once * (1.0 + to_nodes / nodes) + 1.0,
        scale_up=1.0 - 1.0 / per_node,
        scale_out=once * to_nodes * (1.0 - 1.0 / nodes),
    )


def _reached(groups: int, num_experts: int, num_topk: int) -> float:
    """Into how many of equal groups of experts a token's K fall."""
    return math.fsum(Uniform().reached(bounds(num_experts, groups), num_experts, num_topk))


def _per_node(domains: Domains) -> int:
    return -(-domains.num_ranks // domains.num_nodes)


def num_qps(num_sms: int, exchange: ExchangeName = "hybrid", allocated: int | None = None) -> int:
    """Queue pairs: 16 for each SM and one for counts and barriers (hybrid), or one for each SM, 9 at most (direct).

    allocated: how many there are; None for DeepEP's own 129 (hybrid) and 17 (direct).
    """
    if exchange == "hybrid":
        return min(QPS_PER_SM * num_sms + 1, 129 if allocated is None else allocated)
    return min(num_sms, MAX_DIRECT_QPS, 17 if allocated is None else allocated)


def dispatch_record_bytes(hidden: int, num_topk: int, scale_words: int | None = None) -> int:
    """Bytes of a row in a dispatch buffer: values, scales, top-k ids and weights, source, K links; 32-byte multiples.

    scale_words: 4-byte words of scales beside E4M3 values; None for BF16 rows.

    >>> dispatch_record_bytes(7168, 8), dispatch_record_bytes(7168, 8, scale_words=56)
    (14464, 7520)
    """
    values, words = (2 * hidden, 0) if scale_words is None else (hidden, scale_words)
    return _record(values) + _record(4 * words) + _record(4 * (2 * num_topk) + 4 * (1 + num_topk))


def combine_record_bytes(hidden: int, num_topk: int) -> int:
    """Bytes of a row in a combine buffer: BF16 values, top-k ids and weights; 32-byte multiples.

    >>> combine_record_bytes(7168, 8)
    14400
    """
    return _record(2 * hidden) + _record(4 * (2 * num_topk))


def _record(num_bytes: int) -> int:
    return -(-num_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def buffer_bytes(
    domains: Domains,
    max_tokens: int,
    hidden: int,
    num_topk: int,
    exchange: ExchangeName = "hybrid",
    quantized: bool = False,
    multiple_reduction: bool = True,
) -> int:
    """Bytes of DeepEP's buffer for up to `max_tokens` on each rank: the larger of dispatch's and combine's, in 2 MiB.

    quantized: rows are E4M3, with room for one word of scales for each 32 values. multiple_reduction: a token's rows
    are summed on each rank (and node) before they travel; otherwise all K do. Hybrid on one node is direct.

    >>> buffer_bytes(Domains(num_ranks=16, num_nodes=2), max_tokens=4096, hidden=7168, num_topk=8)
    1218445312
    """
    nodes, per_node = domains.num_nodes, _per_node(domains)
    ranks = nodes * per_node
    direct = exchange == "direct" or nodes == 1

    def lanes(most: int) -> int:
        return min(most, num_topk) if multiple_reduction else num_topk

    each = 1 if multiple_reduction else num_topk
    if direct:  # arrived rows; between nodes, rows on their way out as well
        there = ranks * max_tokens + (max_tokens if nodes > 1 else 0)
        back = lanes(ranks) * max_tokens + (ranks * max_tokens * each if nodes > 1 else 0)
    else:  # forwarded rows, own rows on their way out, rows of other nodes to forward
        forwarded = nodes * (max_tokens + MAX_CHANNELS)
        there = per_node * nodes * max_tokens + max_tokens + forwarded
        back = lanes(per_node) * nodes * max_tokens + lanes(nodes) * max_tokens + each * forwarded
    scale_words = -(-hidden // 32) if quantized else None
    needed = max(
        there * dispatch_record_bytes(hidden, num_topk, scale_words), back * combine_record_bytes(hidden, num_topk)
    )
    return -(-needed // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT

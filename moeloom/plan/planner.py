"""Problem + topology -> Plan: a first, simple choice of the exchange by expected communication time.

The numbers below stand for any machine: they decide between two exchanges, not how long either takes.
"""

from __future__ import annotations

from moeloom.plan.plan import PHASES, Candidate, PipelineName, Plan, Problem
from moeloom.quantize import record_bytes
from moeloom.topology import Topology
from moeloom.types import ExchangeName

SCALE_OUT_BYTES_PER_US = 50e3  # one 400 Gbit/s network port per rank
SCALE_UP_BYTES_PER_US = 370e3  # NVLink of Hopper, both directions at once, as measured on two H200
MESSAGE_US = 5.0  # one network message's latency
POST_US = 0.3  # to hand one message to the network card
HOP_US = 3.0  # one more flag within a node: signal and poll
UNKNOWN_TOKENS = 4096  # a training or prefill batch


def choose(problem: Problem, topology: Topology) -> Plan:
    """The exchange with the least expected communication time; a pure function of what all ranks share."""
    candidates = tuple(_candidate(problem, topology, exchange) for exchange in ("direct", "hybrid"))
    if problem.phase not in PHASES:
        raise ValueError(f"phase is {problem.phase!r}; allowed: {', '.join(PHASES)}")
    if topology.num_nodes == 1:
        return Plan(candidates[0].pipeline, "direct", "one node: nothing to forward", candidates[:1])
    best = min(candidates, key=lambda candidate: candidate.microseconds)
    reason = "least expected communication time" + ("" if problem.num_tokens is not None else ", tokens unknown")
    return Plan(best.pipeline, best.exchange, reason, candidates)


def reached(num_domains: float, share: float, num_topk: int) -> float:
    """Expected number of `num_domains` domains, each holding `share` of the experts, that a token reaches.

    Uniform routing: 1 - (1 - share)^K for each.
    """
    return num_domains * (1.0 - (1.0 - share) ** num_topk)


def _candidate(problem: Problem, topology: Topology, exchange: ExchangeName) -> Candidate:
    tokens = UNKNOWN_TOKENS if problem.num_tokens is None else problem.num_tokens
    back = problem.hidden * problem.recipe.dtype.itemsize
    there = record_bytes(problem.hidden) if problem.recipe.quantized else back
    ranks, nodes = topology.num_ranks, topology.num_nodes
    per_node = ranks / nodes
    remote_ranks = reached(ranks - per_node, 1 / ranks, problem.num_topk)
    remote_nodes = reached(nodes - 1, 1 / nodes, problem.num_topk)
    local_ranks = reached(per_node - 1, 1 / ranks, problem.num_topk)
    if exchange == "direct":
        out, up, messages, hops = remote_ranks, local_ranks, ranks - per_node, 1
        note = "one hop"
    else:
        # a forwarder hands on to the other ranks of its node what a source would send them itself
        out, up, messages, hops = remote_nodes, local_ranks + remote_ranks * (1 - 1 / per_node), nodes - 1, 2
        note = "one row per node, then forwarded"
    # both ways: dispatch and combine
    scale_out, scale_up = (tokens * (there + back) * rows for rows in (out, up))
    posted = min(messages, tokens * problem.num_topk)  # a few tokens need few receivers
    latency = 2 * (MESSAGE_US * min(messages, 1) + HOP_US * hops + POST_US * posted)
    microseconds = scale_out / SCALE_OUT_BYTES_PER_US + scale_up / SCALE_UP_BYTES_PER_US + latency
    pipeline: PipelineName = "decode" if problem.phase == "decode" else "split"
    return Candidate(pipeline, exchange, scale_out, scale_up, microseconds, note)

"""SMs, queue pairs and buffer bytes: what DeepEP 2.1 publishes or prints."""

from __future__ import annotations

import doctest

import pytest

import moeloom.plan.comm_sms
from moeloom.plan.comm_sms import (
    Links,
    buffer_bytes,
    combine_record_bytes,
    dispatch_record_bytes,
    num_comm_sms,
    num_qps,
)
from moeloom.plan.problem import Domains

H200, B200 = Links(430e9, 50e9), Links(810e9, 50e9)  # NVLink as the driver reports it x 0.9; one CX7 port
MIB = 2**20


def test_the_examples_of_the_docstrings_run() -> None:
    result = doctest.testmod(moeloom.plan.comm_sms)
    assert result.attempted >= 4 and result.failed == 0


@pytest.mark.parametrize(("nodes", "sms"), [(2, 12), (4, 6), (8, 4)])
@pytest.mark.parametrize("links", [H200, B200])
def test_hybrid_sms_on_nodes_of_eight(nodes: int, sms: int, links: Links) -> None:
    """The NIC is the limit: NVLink's rate does not matter."""
    assert num_comm_sms(256, 8, Domains(8 * nodes, nodes), links) == sms


@pytest.mark.parametrize(
    ("num_ranks", "links", "sms"), [(8, H200, 14), (4, H200, 16), (2, H200, 22), (8, B200, 24), (4, B200, 28)]
)
@pytest.mark.parametrize(("num_experts", "num_topk"), [(256, 8), (256, 6), (64, 4)])
@pytest.mark.parametrize("exchange", ["direct", "hybrid"])
def test_sms_on_one_node(
    num_ranks: int, links: Links, sms: int, num_experts: int, num_topk: int, exchange: str
) -> None:
    """Writing limits the SMs, so that they do not depend on the routing; hybrid is direct here."""
    assert num_comm_sms(num_experts, num_topk, Domains(num_ranks), links, exchange) == sms


def test_sms_by_hand() -> None:
    """E = 8, K = 1 on 2 nodes of 2: one row per token, t = s = 1, half of it leaves the node.

    hybrid: read 2, written 2.5, scale-out 0.5, scale-up 0.5. direct: read 1, written 0.5 + 1, scale-up 0.25.
    """
    domains = Domains(4, 2)
    assert num_comm_sms(8, 1, domains, Links(1000e9, 100e9)) == 14  # 1.25 x 100 / 0.5 x 2.5 / 50 = 12.5
    assert num_comm_sms(8, 1, domains, Links(100e9, 1000e9)) == 14  # now scale-up is the limit
    assert num_comm_sms(8, 1, domains, Links(100e9, 1e9), "direct") == 16  # 1.25 x 100 / 0.25 x 1.5 / 50 = 15
    assert num_comm_sms(8, 1, domains, Links(1000e9, 1e9), "direct") == 132


def test_sms_have_bounds() -> None:
    eight = Domains(8)
    assert num_comm_sms(256, 8, eight, B200, prefer_overlap=False) == 64
    assert num_comm_sms(256, 8, eight, B200, device_sms=20) == 20
    assert num_comm_sms(256, 8, eight, B200, device_sms=20, prefer_overlap=False) == 20
    assert num_comm_sms(256, 8, eight, Links(1e9)) == 4
    assert num_comm_sms(256, 8, eight, Links(1e15)) == 132


@pytest.mark.parametrize("unknown", [None, 0.0])
def test_a_link_that_is_not_known_is_left_out(unknown: float | None) -> None:
    sixteen = Domains(16, 2)
    assert num_comm_sms(256, 8, sixteen, Links(unknown, 50e9)) == 12
    # NVLink alone: 430 / (7/8) x written 1.34 / 50, more than with the slower NIC
    assert num_comm_sms(256, 8, sixteen, Links(430e9, unknown)) == 18
    assert num_comm_sms(256, 8, sixteen, Links(unknown, unknown), device_sms=148) == 148
    assert num_comm_sms(256, 8, Domains(8), Links(unknown, 50e9)) == 132
    assert num_comm_sms(256, 8, Domains(1), H200) == 132  # nothing to send
    assert num_comm_sms(256, 8, Domains(4, 4), H200, "direct") == 132  # nothing on scale-up


def test_uneven_nodes_count_as_full_ones() -> None:
    assert num_comm_sms(256, 8, Domains(15, 2), H200) == 12
    assert buffer_bytes(Domains(15, 2), 128, 64, 2) == buffer_bytes(Domains(16, 2), 128, 64, 2)


def test_queue_pairs() -> None:
    assert [num_qps(sms) for sms in (4, 6, 8, 12)] == [65, 97, 129, 129]
    assert [num_qps(sms, "direct") for sms in (4, 9, 14)] == [4, 9, 9]
    assert num_qps(12, allocated=65) == 65 and num_qps(12, allocated=1000) == 193
    assert num_qps(12, "direct", allocated=5) == 5


def test_records() -> None:
    assert dispatch_record_bytes(7168, 8) == 14464
    assert dispatch_record_bytes(7168, 8, scale_words=56) == 7520
    assert dispatch_record_bytes(7168, 8, scale_words=14) == 7360
    assert combine_record_bytes(7168, 8) == 14400
    # each part is a multiple of 32: 2 x 40 -> 96, 16 x 2 + 4 x 3 = 28 -> 32
    assert dispatch_record_bytes(40, 2) == 96 + 32 and combine_record_bytes(40, 2) == 96 + 32


def test_hybrid_buffer_that_a_user_saw_printed() -> None:
    assert buffer_bytes(Domains(16, 2), 4096, 7168, 8) == 1_218_445_312


@pytest.mark.parametrize(("max_tokens", "mib", "fp8_mib"), [(128, 16, 16), (4096, 452, 450), (8192, 904, 900)])
def test_direct_buffer_of_eight_ranks(max_tokens: int, mib: int, fp8_mib: int) -> None:
    """BF16's dispatch is larger than combine; FP8's is smaller, so that combine's bytes remain."""
    assert buffer_bytes(Domains(8), max_tokens, 7168, 8, "direct") == mib * MIB
    assert buffer_bytes(Domains(8), max_tokens, 7168, 8, "direct", quantized=True) == fp8_mib * MIB
    assert buffer_bytes(Domains(8), max_tokens, 7168, 8) == mib * MIB  # hybrid is direct on one node


def rounded(rows: int, record: int) -> int:
    return -(-rows * record // (2 * MIB)) * 2 * MIB


def test_buffers_by_hand() -> None:
    """6 ranks on 3 nodes, M = 1000, H = 1024. K = 4: records of 2048 + 64 (dispatch) and 2048 + 32 bytes (combine)."""
    domains, shape = Domains(6, 3), (1000, 1024, 4)
    assert buffer_bytes(domains, *shape) == rounded(2 * 3000 + 3 * 1000 + 3 * 2280, 2080)
    # every pair's row travels: 4 x 3 nodes, 4, and 4 for each of the forwarded
    each = buffer_bytes(domains, *shape, multiple_reduction=False)
    assert each == rounded(12_000 + 4000 + 4 * 3 * 2280, 2080)
    assert buffer_bytes(domains, *shape, "direct") == rounded(4000 + 6000, 2080)
    assert buffer_bytes(domains, *shape, "direct", multiple_reduction=False) == rounded(4000 + 24_000, 2080)
    # two ranks hold two sums of a token, or all its four rows
    assert buffer_bytes(Domains(2), *shape, "direct") == rounded(2000, 2112)
    assert buffer_bytes(Domains(2), *shape, "direct", multiple_reduction=False) == rounded(4000, 2080)
    # K = 1: records of 2080 both, FP8 with 32 words of scales 1024 + 128 + 32 = 1184; dispatch is the larger
    assert buffer_bytes(domains, 1000, 1024, 1) == rounded(6000 + 1000 + 3 * 2280, 2080)
    assert buffer_bytes(domains, 10_000, 1024, 1, "direct") == rounded(70_000, 2080)
    assert buffer_bytes(Domains(6), 10_000, 1024, 1, "direct", quantized=True) == rounded(60_000, 1184)

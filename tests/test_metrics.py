"""The Prometheus export: the rules of the text format, and what the numbers mean."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from moeloom import Experts, Router, Runtime
from moeloom.integrations.prometheus import CONTENT_TYPE, render
from tests.support.pool import Ranks, runtime_of

FAMILIES = {
    "moeloom_stage_calls_total": "counter",
    "moeloom_stage_seconds_total": "counter",
    "moeloom_bytes_total": "counter",
    "moeloom_rows_total": "counter",
    "moeloom_symmetric_memory_bytes": "gauge",
}
# a label value: anything but the three that must be escaped, or one of them escaped
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')


def call(rt: Runtime) -> None:
    num_ranks = rt.topology.num_ranks
    routing = Router(num_topk=2)(torch.randn(6, 2 * num_ranks))
    rt.moe(torch.randn(6, 8), routing, Experts(torch.randn(2, 16, 8), torch.randn(2, 8, 8)))


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and labels; fails where the text breaks the format's rules."""
    found: dict[tuple[str, str], float] = {}
    assert text.endswith("\n")
    helped, typed, current = Counter(), Counter(), ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            _, _, current, _ = line.split(" ", 3)
            helped[current] += 1
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            typed[name] += 1
            assert name == current and FAMILIES[name] == kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == current, line  # families are not mixed
            assert (match[1], match[2]) not in found, "twice"
            found[match[1], match[2]] = float(match[3])
    assert set(helped.values()) == set(typed.values()) == {1} and set(helped) == set(typed) == set(FAMILIES)
    return found


def test_format_and_monotony() -> None:
    with Runtime() as rt:
        assert list(samples(render(rt))) == [("moeloom_symmetric_memory_bytes", 'rank="0"')]
        call(rt)
        before = samples(render(rt))
        assert before["moeloom_stage_calls_total", 'rank="0",stage="dispatch"'] == 1
        assert before["moeloom_rows_total", 'rank="0",stage="dispatch"'] == 12
        assert before["moeloom_bytes_total", 'rank="0",stage="combine",link="between_nodes"'] == 0
        call(rt)
        after = samples(render(rt))
    assert set(before) == set(after)
    for (name, labels), value in before.items():
        if "bytes" in name:
            assert after[name, labels] >= value
        elif 'stage="dispatch"' in labels:
            assert after[name, labels] > value


def test_label_values_are_escaped_and_names_checked() -> None:
    with Runtime() as rt:
        text = render(rt, {"model": 'a "b"\\c\nd', "where": "Zürich"})
        assert '{rank="0",model="a \\"b\\"\\\\c\\nd",where="Zürich"}' in text
        samples(text)
        for name in ("", "0a", "a-b", "__a", "stage", "rank", "a\n"):
            with pytest.raises(ValueError, match="is not allowed"):
                render(rt, {name: "x"})


def render_twice() -> list[str] | None:
    rt = runtime_of((0, 1, 2), 2)
    if rt is None:
        return None
    texts = []
    for _ in range(2):
        call(rt)
        texts.append(render(rt, {"job": "j"}))
    return texts


def test_links_of_several_ranks(ranks: Ranks) -> None:
    for rank, texts in enumerate(ranks.run(render_twice)[:3]):
        first, second = map(samples, texts)
        for link, used in (("within_nodes", rank < 2), ("between_nodes", True)):
            key = ("moeloom_bytes_total", f'rank="{rank}",job="j",stage="dispatch",link="{link}"')
            assert (second[key] > first[key] > 0) is used, key
        assert second["moeloom_symmetric_memory_bytes", f'rank="{rank}",job="j"'] > 0


def test_prometheus_can_read_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with Runtime() as rt:
        call(rt)
        families = list(parser.text_string_to_metric_families(render(rt, {"model": 'a "b"\\c\nd'})))
    assert {family.type for family in families} == {"counter", "gauge"} and len(families) == len(FAMILIES)
    for family in families:
        assert family.documentation and family.samples
        assert all(sample.labels["model"] == 'a "b"\\c\nd' for sample in family.samples)
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")

"""A Runtime's totals in Prometheus' text exposition format, for whatever serves it; nothing is imported for that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from moeloom.meter import StageStats
from moeloom.runtime import Runtime

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWN_LABELS = ("rank", "stage", "link")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

Samples = list[tuple[dict[str, str], float]]


def render(rt: Runtime, labels: Mapping[str, str] | None = None) -> str:
    """This rank's counters since the Runtime's construction, and its symmetric memory now. Not collective.

    labels: put on every sample beside `rank`, for instance {"model": "qwen3"}. Serve the text as `CONTENT_TYPE`.
    """
    fixed = {"rank": str(rt.rank), **_checked(labels or {})}
    return "".join(
        f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        + "".join(f"{name}{_braces({**fixed, **own})} {_number(value)}\n" for own, value in samples)
        for name, kind, text, samples in _families(rt)
    )


def _families(rt: Runtime) -> Iterator[tuple[str, str, str, Samples]]:
    """Name, type, meaning and samples of each metric."""
    stages = rt.stats()

    def each(value: Callable[[StageStats], float]) -> Samples:
        return [({"stage": name}, value(stage)) for name, stage in stages.items()]

    def on_link(link: str, value: Callable[[StageStats], float]) -> Samples:
        return [({**own, "link": link}, count) for own, count in each(value)]

    links = on_link("within_nodes", lambda stage: stage.scale_up_bytes)
    links += on_link("between_nodes", lambda stage: stage.scale_out_bytes)
    yield "moeloom_stage_calls_total", "counter", "Calls of a stage.", each(lambda stage: stage.calls)
    yield "moeloom_stage_seconds_total", "counter", "Time spent in a stage.", each(lambda stage: stage.seconds)
    yield "moeloom_bytes_total", "counter", "Bytes that this rank has put on a link.", links
    yield "moeloom_rows_total", "counter", "Rows that this rank has received.", each(lambda stage: stage.rows)
    memory: Samples = [({}, rt.symmetric_bytes())]
    yield "moeloom_symmetric_memory_bytes", "gauge", "Symmetric memory that this rank holds.", memory


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    for name in labels:
        if not LABEL_NAME.fullmatch(name) or name in OWN_LABELS:
            raise ValueError(
                f"label {name!r} is not allowed; letters, digits and _, no __ or digit first, none of {OWN_LABELS}"
            )
    return {name: str(value) for name, value in labels.items()}


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """All digits: a float of 17 of them, or an integer of any length."""
    return repr(value)

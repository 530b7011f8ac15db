"""What the drawings contain; how they look was judged by eye."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeloom.cli.drawings import KIND_COLOURS, draw_roofline, draw_timeline, predicted_events, save_trace
from moeloom.cli.plan import Query, parse_range, plan_rows
from moeloom.plan.plan import Plan
from moeloom.schedule.trace import Event

pytest.importorskip("matplotlib")
from matplotlib import image

LIGHT = 0.9


def pixels(path: Path) -> np.ndarray:
    return image.imread(path)[..., :3]


def share_of(path: Path, colour: str) -> float:
    """Of the picture's pixels, those of about this colour."""
    wanted = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return float((np.abs(pixels(path) - wanted).max(axis=-1) < 0.03).mean())


def measured(ranks: int, chunks: int = 2) -> list[Event]:
    events = []
    for rank in range(ranks):
        for chunk in range(chunks):
            at = 1e-3 * chunk + 1e-5 * rank
            events.append(Event("dispatch", chunk, "links", at, at + 4e-4, rank))
            events.append(Event("experts", chunk, "compute", at + 4e-4, at + 9e-4, rank))
    return events


@pytest.mark.parametrize("ranks", [1, 8])
def test_timeline_shows_every_kind_and_rank(tmp_path: Path, ranks: int) -> None:
    (row,) = plan_rows(Query(nodes=2, tokens=(1024,), phase="prefill"))
    events = predicted_events(row.plan) + measured(ranks)
    draw_timeline(events, str(tmp_path / "t.png"), "a title")
    height = pixels(tmp_path / "t.png").shape[0]
    assert 300 < height < 1800 and (pixels(tmp_path / "t.png").mean(axis=-1) < LIGHT).mean() > 0.05
    assert share_of(tmp_path / "t.png", KIND_COLOURS["dispatch"]) > 0.01
    assert share_of(tmp_path / "t.png", KIND_COLOURS["experts"]) > 0.01
    one = tmp_path / "one.png"
    draw_timeline(measured(1), str(one), "a title")
    assert height > pixels(one).shape[0], "rows are not added"


def test_timeline_is_in_proportion(tmp_path: Path) -> None:
    """Twice as long a task covers twice as many pixels."""
    both = [Event("dispatch", 0, "links", 0.0, 1e-3, 0), Event("mega", 0, "compute", 1e-3, 3e-3, 0)]
    only = [Event("dispatch", 0, "links", 0.0, 1e-3, 0), Event("dispatch", 0, "compute", 1e-3, 3e-3, 0)]
    draw_timeline(both, str(tmp_path / "a.png"), "")
    draw_timeline(only, str(tmp_path / "b.png"), "")
    long, short = (share_of(tmp_path / "a.png", KIND_COLOURS[kind]) for kind in ("mega", "dispatch"))
    assert 1.7 < long / short < 2.1, "legend included"
    assert share_of(tmp_path / "b.png", KIND_COLOURS["mega"]) == 0


def test_predicted_events_last_as_long_as_predicted() -> None:
    query = Query(machine="cpu", model="qwen3-30b-a3b", gpus_per_node=4, nodes=2, tokens=(512,), phase="prefill")
    (row,) = plan_rows(query)
    for candidate in row.possible:
        plan = Plan(candidate.pipeline, candidate.exchange, candidate.chunks, candidates=(candidate,))
        assert max(event.end for event in predicted_events(plan)) == pytest.approx(candidate.seconds), candidate.name
    assert predicted_events(Plan()) == []


@pytest.mark.parametrize(("nodes", "tokens"), [(4, "1..8192"), (1, "64"), (2, "3,9000")])
def test_roofline_is_drawn(tmp_path: Path, nodes: int, tokens: str) -> None:
    path = tmp_path / "r.png"
    rows = list(plan_rows(Query(nodes=nodes, tokens=parse_range(tokens), recipe_name="fp8")))
    draw_roofline(rows, str(path), "a title")
    assert path.stat().st_size > 20_000 and pixels(path).shape[:2] == (1110, 1725)
    assert (pixels(path).mean(axis=-1) < LIGHT).mean() > 0.03
    for colour in ("#0072B2", "#D55E00", "#009E73"):
        assert share_of(path, colour) > 1e-4, colour


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline([], str(tmp_path / "t.png"), "")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_roofline([], str(tmp_path / "t.png"), "")
    save_trace([], str(tmp_path / "t.json"), "")
    assert "traceEvents" in (tmp_path / "t.json").read_text()

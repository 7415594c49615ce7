"""What a measurement makes of links whose times are given; no process is needed."""

from __future__ import annotations

from typing import Any

import pytest

from decentlam.analysis.cost import links
from decentlam.exchange.network import Network


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures a link of so many bytes per second, so late, that lets a burst pass at once."""

    def measure(speed: float, round_trip: float, burst: int = 0) -> links.Link:
        now = [0.0]

        class Meter:
            def __init__(self, *_: Any) -> None:
                pass

            def exchange(self, number: int, size: int) -> float:
                took = round_trip + max(size - burst, 0) / speed
                now[0] += took
                return took

            def agree(self, value: float) -> float:
                now[0] += round_trip
                return value

        monkeypatch.setattr(links, "_Meter", Meter)
        monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
        return links.measure_links(Network(group=None, rank=0, num_processes=4), seconds=0.5)

    return measure


@pytest.mark.parametrize("speed", [1.25e6, 1.25e7, 1.25e8, 1.25e9])
def test_the_speed_is_that_after_the_burst(timed: Any, speed: float) -> None:
    link = timed(speed, 2e-4, burst=1 << 17)
    assert link.certain and link.bytes_per_second == pytest.approx(speed, rel=0.35)
    plain = timed(speed, 2e-4)
    assert plain.certain and plain.bytes_per_second == pytest.approx(speed)


@pytest.mark.parametrize("round_trip", [0.02, 0.1])
def test_a_long_way_hides_how_fast_a_link_is(timed: Any, round_trip: float) -> None:
    link = timed(1.25e8, round_trip)
    assert not link.certain and link.latency_seconds == pytest.approx(round_trip / 2, rel=1e-3)

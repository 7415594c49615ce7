"""The links of a network measured, and the topology chosen for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import runs
import torch
import torch.distributed as dist

import decentlam
from decentlam.algorithms import DecentLaM, GTDmSGD
from decentlam.analysis.cost import (
    Compute,
    Criteria,
    Job,
    Link,
    automatic,
    candidates,
    choose_topology,
    disagreement,
    measure_links,
)
from decentlam.analysis.cost.messages import fitting_bucket_bytes
from decentlam.exchange.network import ALONE, connect
from decentlam.options import Options
from decentlam.runtime.build import with_fitting_messages
from decentlam.topology import (
    complete,
    one_peer_hypercube,
    resolve,
    ring,
)

GIGABIT = Link(bytes_per_second=1.25e8)
STEP = Compute(0.1, 0.2)
MODEL = Job(40_000_000)


def peers_of(name: str, n: int) -> int:
    return resolve(name, n).max_peers


def test_a_slow_wire_and_many_nodes_choose_one_peer():
    for method in ("decentlam", "dmsgd"):
        name, reason = choose_topology(64, Link(1e-4, 1.25e8), Job(10**8), method, STEP)
        assert peers_of(name, 64) == 1
        assert reason.startswith(f"{name}: ") and "1 Gbit/s" in reason and "\n" not in reason


def test_a_small_model_on_a_fast_wire_chooses_better_mixing():
    name, _ = choose_topology(64, Link(1e-6, 1e10), Job(10**5), "decentlam", STEP)
    assert peers_of(name, 64) > 1
    assert disagreement(resolve(name, 64)) < disagreement(one_peer_hypercube(64)) / 2


def test_two_nodes_one_node_and_methods_that_average_anyway():
    name, _ = choose_topology(2, GIGABIT, MODEL, "decentlam", STEP)
    assert resolve(name, 2).exact_after == 1
    assert choose_topology(1, GIGABIT, MODEL, "decentlam")[0] == "complete"
    assert "everyone" in choose_topology(8, GIGABIT, MODEL, "pmsgd")[1]


def test_what_would_be_refused_or_does_not_fit_is_not_chosen():
    slow = Link(1e-4, 1e6)
    for n in (6, 8):
        chosen = candidates(n, slow, MODEL, "decentlam", criteria=Criteria(stable="refuse"))[0]
        network = resolve(chosen.name, n)
        assert decentlam.growth("decentlam", network, momentum=0.9) < 1 + 1e-9
    names = {c.name for c in candidates(9, slow, MODEL, "decentlam")}
    assert "one-peer-hypercube" not in names and "one-peer-exponential" not in names


def test_disagreement_has_the_closed_form_of_static_weights_also_when_sampled():
    network = ring(8)
    sampled = replace(network, period=2)  # the same weights, no longer known to be static
    for heterogeneous in (False, True):
        exact = disagreement(network, heterogeneous)
        assert disagreement(sampled, heterogeneous, steps=2000) == pytest.approx(exact, rel=0.5)
    # Two nodes that keep 3/4: the difference d has E d^2 = (l^2 / (1 - l^2)) E g^2, l = 1/2.
    lazy = complete(2).lazy(0.5)
    assert disagreement(lazy) == pytest.approx(0.5 * 0.25 / 0.75)


def measure(processes_per_node: int = 1) -> tuple[Link, tuple[str, str]]:
    network = connect(processes_per_node=processes_per_node)
    link = measure_links(network, seconds=0.4)
    mine = replace(link, latency_seconds=0.01 * (1 + dist.get_rank()))  # process 0's decides
    return link, automatic(network, "decentlam", 4_000_000, mine)


def test_links_are_measured_alike_on_every_node():
    results = runs.run_processes(measure, 4, ())
    assert all(result == results[0] for result in results)
    link, (name, reason) = results[0]
    assert 1e-6 < link.latency_seconds < math.inf and 0 < link.bytes_per_second < 1e12
    assert name in decentlam.TOPOLOGIES and reason.startswith(name) and " 10000 us" in reason


def measure_and_leave() -> tuple[Link, str]:
    link = measure_links(connect(), seconds=0.2)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("stopped")  # here, but not answering
        return link, ""
    with pytest.raises(decentlam.ExchangeError) as stopped:
        measure_links(connect(), timeout_seconds=1.0)
    store.set("stopped", "")
    return link, str(stopped.value)


def test_a_node_that_does_not_answer_is_named_and_nobody_hangs():
    (link, error), (same, _) = runs.run_processes(measure_and_leave, 2, ())
    assert link == same and 0 < link.bytes_per_second < 1e12
    assert "measuring the links" in error and "node 1" in error


def test_one_node_alone_has_nothing_to_measure():
    assert measure_links(connect()) == Link()
    assert automatic(connect(), "decentlam", 1000, Link())[0] == "complete"


SLOW, FAST = Link(1e-4, 1e5), Link(0.0, 1e15)  # beyond any doubt about this machine


@pytest.mark.parametrize(
    ("link", "dtype", "asked", "expected"),
    [
        (SLOW, torch.float32, None, torch.float16),
        (FAST, torch.float32, None, None),
        (SLOW, torch.float32, torch.float32, torch.float32),  # whole messages were asked for
        (FAST, torch.float32, torch.bfloat16, torch.bfloat16),
        (SLOW, torch.float64, None, None),  # precision is wanted here
    ],
)
def test_messages_are_rounded_where_the_wire_binds_and_nothing_was_said(
    link: Link, dtype: torch.dtype, asked: torch.dtype | None, expected: torch.dtype | None
):
    groups = [{"params": [torch.zeros(1000, dtype=dtype, requires_grad=True)]}]
    options, method = Options(topology="auto", message_dtype=asked), DecentLaM()
    found = with_fitting_messages(groups, method, options, ALONE, link)
    assert found.message_dtype is expected
    assert found.bucket_bytes == fitting_bucket_bytes(link, 1000 * dtype.itemsize)
    asked_too = replace(options, bucket_bytes=123)
    assert with_fitting_messages(groups, method, asked_too, ALONE, link).bucket_bytes == 123


def test_a_second_payload_is_not_rounded_unasked():
    """It is like a gradient, and float16 has no numbers below 6e-8."""
    groups = [{"params": [torch.zeros(1000, requires_grad=True)]}]
    found = with_fitting_messages(groups, GTDmSGD(), Options(topology="auto"), ALONE, SLOW)
    assert found.message_dtype is None


def test_messages_are_as_long_as_latency_asks_and_a_quarter_of_the_model_at_most():
    model = 100_000_000
    sizes = [fitting_bucket_bytes(Link(1e-4, speed), model) for speed in (1e5, 1.25e8, 1e12)]
    assert sizes == [1 << 18, 1_500_000, model // 4]
    # A way ten times as long asks for messages that are longer, by as much as they wait longer.
    assert fitting_bucket_bytes(Link(1e-3, 1.25e8), model) == 3_750_000
    assert fitting_bucket_bytes(Link(1e-4, 1.25e8), 1000) == 1 << 18


def test_whole_messages_are_those_of_the_parameters_own_type():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"there are some of torch\.float64"):
        decentlam.DecentLaM([p], message_dtype=torch.float32)
    decentlam.DecentLaM([p], message_dtype=torch.float64)

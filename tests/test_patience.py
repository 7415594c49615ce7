"""patience_seconds: late neighbors are left out at both ends, and come back."""

from __future__ import annotations

import os
import re
import tempfile

import pytest
import runs
import runs_patience
import torch

import decentlam

PATIENCE = {"patience_seconds": 0.4}
ALWAYS = 1000.0  # seconds that no machine is late

four = runs.Scenarios(4)
LATE = {
    "ring": ("dmsgd", "ring", "none"),
    "ring, in backward": ("decentlam", "ring", "backward"),
    "one peer": ("qg-dmsgd", "one-peer-symmetric-exponential", "none"),
    "random match": ("da-dmsgd", "bipartite-random-match", "backward"),
}


def add(
    run,
    course,
    method="dmsgd",
    topology="ring",
    lr=runs_patience.LR,
    saves=None,
    grows=False,
    **options,
):
    four.add(
        run,
        runs_patience.train,
        run=run,
        course=course,
        method=method,
        topology=topology,
        options={"bucket_bytes": 200, **options},
        lr=lr,
        directory=saves,
        grows=grows,
    )


for name, (method, topology, overlap) in LATE.items():
    options = {**PATIENCE, "overlap": overlap, "stable": "ignore"}
    add(name, runs_patience.late_once, method, topology, **options)
for name, options in {
    "waits": {"shared_memory": False},
    "very patient": {"patience_seconds": ALWAYS},
}.items():
    for method in ("decentlam", "gt-dmsgd"):
        add(f"{name} {method}", runs_patience.twelve_steps, method, stable="ignore", **options)
    four.add(f"{name} and grows", runs_patience.grow, options=options)
# Who is stopped gives no sign of life, either.
add("stopped", runs_patience.stopped, heartbeat_seconds=ALWAYS, **PATIENCE)
add("gossip", runs_patience.late_once, lr=0.0, **PATIENCE)
saved = tempfile.TemporaryDirectory()
add("counting", runs_patience.count, saves=saved.name, **PATIENCE)
add("always slow", runs_patience.always_slow, grows=True, **PATIENCE)


@pytest.mark.parametrize("name", LATE)
def test_a_run_with_edges_left_out_is_the_simulated_run_without_them(name):
    method, topology, _ = LATE[name]
    everyone = four.outcomes(name)
    late = everyone[1][runs_patience.LATE]
    neighbors = decentlam.topology.resolve(topology, 4).neighbors(1, late.step)
    assert list(late.left_out) == neighbors  # all of them had gone on
    runs_patience.replay(method, topology, everyone)


@pytest.mark.parametrize("name", LATE)
def test_a_node_that_was_late_goes_on_where_the_others_are(name):
    everyone = four.outcomes(name)
    late, back, *others = everyone[1][runs_patience.LATE :]
    steps = [{t.step for t in taken} for taken in everyone]
    passed = [j for j in late.left_out if late.step in steps[j]]  # without it; no step was skipped
    for j in passed:
        assert any(late.step < step < back.step for step in steps[j])
    assert any(t.used for t in (back, *others))


def test_the_average_is_kept_whatever_is_left_out():
    everyone = four.outcomes("gossip")
    last = runs_patience.replay("dmsgd", "ring", everyone, lr=0.0)
    start = torch.stack([runs_patience.flat_targets(i) for i in range(4)])
    real = torch.stack([taken[-1].x for taken in everyone])
    assert everyone[1][runs_patience.LATE].left_out == (0, 2)
    assert (real.mean(0) - start.mean(0)).abs().max() < 1e-12
    assert (last - real).abs().max() < 1e-12


@pytest.mark.parametrize("method", ["decentlam", "gt-dmsgd"])
def test_with_patience_enough_the_run_is_the_usual_one_to_the_bit(method):
    usual, patient = four.outcomes(f"waits {method}"), four.outcomes(f"very patient {method}")
    for a, b in zip(usual, patient, strict=True):
        assert not any(t.left_out for t in b)
        assert runs.same([t.x for t in a], [t.x for t in b])


def test_param_groups_can_be_added():
    usual, patient = four.outcomes("waits and grows"), four.outcomes("very patient and grows")
    assert runs.same(usual, patient)


def test_a_process_that_is_stopped_for_a_while_is_left_out_and_comes_back():
    everyone = four.outcomes("stopped")
    runs_patience.replay("dmsgd", "ring", everyone)
    during = everyone[0][runs_patience.STOPPED.start : runs_patience.STOPPED.stop]
    assert all(1 in t.left_out for t in during[1:])  # one message may have been under way
    assert any(1 not in t.left_out for t in everyone[0][runs_patience.STOPPED.stop :])


def test_who_counts_its_own_steps_takes_them_all_and_the_last_ones_alone():
    everyone = four.outcomes("counting")
    assert [len(taken) for taken in everyone] == [runs_patience.COUNTED] * 4
    assert [t.left_out for t in everyone[1][-3:]] == [(0, 2)] * 3  # they had ended
    runs_patience.replay("dmsgd", "ring", everyone)
    assert os.listdir(saved.name)  # a checkpoint of nodes that were at different steps


def test_a_node_that_is_always_slow_mixes_at_its_own_pace():
    everyone = four.outcomes("always slow")
    runs_patience.replay("dmsgd", "ring", everyone)
    slow = everyone[1][runs_patience.LATE + 1 :]
    mixed = [(k, t.step) for k, t in enumerate(slow, 1) if t.used]
    assert len(mixed) >= 2
    for k, step in mixed[:2]:  # then no more naps
        assert step >= 3 * k - 1  # while its neighbors took three steps for each of its own


def test_a_node_that_dies_while_it_is_left_out_is_named_and_ends_the_run():
    results = runs.run_processes(runs_patience.die, 4, ({"patience_seconds": 0.3},))
    assert results[1] == -9
    for rank in (0, 2, 3):
        assert re.search(r"process 1 \(pid .* died or stopped", str(results[rank])), results


@pytest.mark.parametrize("bad", [0, -1.0, True, "1", float("nan"), float("inf"), 1e300, [1]])
def test_what_is_no_patience_is_refused(bad):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="patience_seconds"):
        decentlam.DmSGD(model.parameters(), patience_seconds=bad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": "forward"}, "overlap"),
        ({"processes_per_node": 2}, "processes_per_node=1"),
        ({"message_dtype": torch.bfloat16, "topology": "ring"}, "leave message_dtype out"),
        ({"elastic": True, "topology": "ring"}, "leave one of them out"),
    ],
)
def test_what_does_not_go_with_patience_is_refused(options, words):
    with pytest.raises(ValueError, match=f"patience_seconds.*{words}"):
        decentlam.options.Options(patience_seconds=1.0, **options)


@pytest.mark.parametrize(
    ("method", "topology", "words"),
    [
        ("pmsgd", "ring", "average with neighbors in every step"),
        ("slowmo", "ring", "average with neighbors in every step"),
        ("awc-dmsgd", "ring", "after the gradient"),
        ("dmsgd", "one-peer-exponential", "same in both directions"),
    ],
)
def test_methods_and_weights_without_edges_to_leave_out_are_refused(method, topology, words):
    from decentlam.exchange.network import Network
    from decentlam.exchange.patience import check_patience

    net = decentlam.topology.resolve(topology, 4)
    with pytest.raises(ValueError, match=f"patience_seconds.*{words}"):
        check_patience(decentlam.ALGORITHMS[method](), Network(None, 0, 4), net)


def test_one_node_alone_needs_no_patience():
    model = torch.nn.Linear(2, 1)
    optimizer = decentlam.DmSGD(model.parameters(), lr=0.1, patience_seconds=1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.statistics.left_out == ()


def test_decentlam_runs_in_its_steady_form_where_edges_come_and_go():
    from decentlam.runtime.build import stable_form

    net = decentlam.topology.ring(4)

    def runs_as(method, stable):
        options = decentlam.options.Options(patience_seconds=1.0, stable=stable)
        return type(stable_form(decentlam.ALGORITHMS[method](), net, options)[0]).__name__

    assert runs_as("decentlam", "auto") == "SteadyDecentLaM"
    assert runs_as("decentlam", "ignore") == "DecentLaM"
    assert runs_as("dmsgd", "auto") == "DmSGD"

"""message_dtype: neighbors are told 16-bit differences, and the recursion stays what it is."""

from __future__ import annotations

import pytest
import runs
import runs_differences as differences
import runs_steps
import torch
from runs import Scenarios
from torch import nn

import decentlam
from decentlam.exchange.differences import check_differences
from decentlam.exchange.network import Network

pytestmark = pytest.mark.timeout(300)

N = 6
METHODS, NETWORKS = ("dmsgd", "decentlam"), ("ring", "one-peer-symmetric-exponential")
OVERLAPS = (False, True, "forward", "auto")

scenarios = Scenarios(N)
for method in METHODS:
    for topology in NETWORKS:
        for overlap in OVERLAPS:
            scenarios.add(
                str((method, topology, overlap)), differences.trajectory,
                method=method, topology=topology, overlap=overlap, stable="ignore",
            )  # fmt: skip
scenarios.add("two payloads", differences.trajectory, method="da-dmsgd", topology="ring")
for dtype in (None, torch.bfloat16):
    scenarios.add(
        f"two per node {dtype}", differences.trajectory,
        method="dmsgd", topology="ring", processes_per_node=2, message_dtype=dtype,
    )  # fmt: skip
scenarios.add("gossip", differences.gossip)
scenarios.add("refused", differences.refused)
scenarios.add("more", differences.more_parameters)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("topology", NETWORKS)
@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_steps_are_those_computed_by_hand(method: str, topology: str, overlap: bool | str) -> None:
    found = scenarios.outcomes(str((method, topology, overlap)))
    assert {kind for _, _, kind in found} == {"DifferenceExchange"}
    runs.assert_equal([t for t, _, _ in found], differences.by_hand(method, topology, N))


def test_the_steps_stay_near_those_of_whole_messages() -> None:
    whole = runs_steps.simulate("decentlam", N, differences.STEPS)
    for step, x in enumerate(differences.by_hand("decentlam", "ring", N)):
        moved = (whole[step] - whole[0]).abs().max() + differences.LR
        assert (x - whole[step]).abs().max() < 0.01 * moved


def test_nodes_of_two_processes_stay_near_too_and_agree_inside() -> None:
    whole = scenarios.outcomes("two per node None")
    rounded = scenarios.outcomes("two per node torch.bfloat16")
    for (expected, _, _), (found, _, kind) in zip(whole, rounded, strict=True):
        assert kind == "DifferenceExchange"
        assert (expected[-1] - found[-1]).abs().max() < 0.01 * (
            expected[-1] - expected[0]
        ).abs().max()
    for one, other in zip(rounded[::2], rounded[1::2], strict=True):
        assert runs.same(one[0], other[0])


def test_half_the_bytes_are_sent() -> None:
    size = 8 * sum(p.numel() for p in runs.Quadratic().parameters())
    for _, sent, _ in scenarios.outcomes(str(("dmsgd", "ring", True))):
        assert sent == 2 * size // 4  # two neighbors; of 8 bytes, 2 are left
    for _, sent, _ in scenarios.outcomes("two payloads"):
        assert sent == 2 * 2 * size // 4


def test_gossip_keeps_the_average_and_ends_in_agreement_beyond_16_bits() -> None:
    for before, after, apart in scenarios.outcomes("gossip"):
        assert (before - after).abs().max() < 1e-14
        assert apart[-1] < 1e-9 * apart[0]


def test_what_cannot_be_sent_so_is_refused_on_all_nodes() -> None:
    for directed, drawn, everyone, dtype in scenarios.outcomes("refused"):
        assert "same in both directions" in directed and "try ring" in directed
        assert "drawn at random" in drawn
        assert "averages over everyone" in everyone
        assert "torch.bfloat16, got torch.float16" in dtype


def test_so_are_more_neighbors_than_memory_is_meant_for() -> None:
    sixteen = Network(None, 0, 16)
    check_differences(sixteen, decentlam.topology.one_peer_symmetric_exponential(16))
    with pytest.raises(ValueError, match="15 different neighbors; 8 are allowed"):
        check_differences(sixteen, decentlam.topology.complete(16))


def test_parameters_added_later_are_told_whole_first() -> None:
    found = torch.stack([more for (more,) in scenarios.outcomes("more")])
    assert (found - found.mean()).abs().max() < 1e-6
    assert abs(found.mean().item() - (N - 1) / 2) < 1e-12


@pytest.mark.parametrize(
    ("option", "why"),
    [({"topology": "auto"}, "topology with a name"), ({"nonfinite": "ignore"}, "for ever")],
)
def test_what_does_not_go_together_is_refused(option: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decentlam.DmSGD(nn.Linear(2, 1).parameters(), message_dtype=torch.bfloat16, **option)


def test_one_node_alone_needs_no_message() -> None:
    layer = nn.Linear(2, 1)
    optimizer = decentlam.DecentLaM(layer.parameters(), lr=0.1, message_dtype=torch.bfloat16)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()

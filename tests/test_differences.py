"""message_dtype: neighbors are told fewer bits, and the recursion stays what it is."""

from __future__ import annotations

import tempfile

import pytest
import runs
import runs_differences as differences
import runs_steps
import torch
from runs import Scenarios
from runs_differences import HALF, INT8
from torch import nn

import decentlam
from decentlam.exchange.codecs import BLOCK, CODECS
from decentlam.exchange.differences import check_differences
from decentlam.exchange.network import Network

N = 4
METHODS = ("dmsgd", "decentlam")
NETWORKS = {
    HALF: ("ring", "bipartite-random-match"),
    torch.bfloat16: ("complete",),
    INT8: ("ring", "one-peer-symmetric-exponential"),
}
KINDS = {HALF: "Rounded", torch.bfloat16: "Rounded", INT8: "Differences"}
CASES = [
    (dtype, method, topology, overlap)
    for dtype, networks in NETWORKS.items()
    for method in METHODS
    for topology in networks
    for overlap in ((True, "forward") if method == "decentlam" else (False, "auto"))
]

saved = tempfile.TemporaryDirectory()
scenarios = Scenarios(N)
for case in CASES:
    scenarios.add(
        str(case), differences.trajectory, message_dtype=case[0], method=case[1],
        topology=case[2], overlap=case[3], stable="ignore",
    )  # fmt: skip
for dtype in (HALF, INT8):
    scenarios.add(
        f"two payloads {dtype}", differences.trajectory,
        method="da-dmsgd", topology="ring", message_dtype=dtype,
    )  # fmt: skip
    scenarios.add(f"gossip {dtype}", differences.gossip, dtype=dtype)
for dtype in (None, HALF, INT8):
    scenarios.add(
        f"two per node {dtype}", differences.trajectory,
        method="dmsgd", topology="ring", processes_per_node=2, message_dtype=dtype,
    )  # fmt: skip
for method in ("decentlam", "awc-dmsgd"):
    scenarios.add(
        f"resumed {method}", differences.resumed, method=method,
        path=f"{saved.name}/{method}", topology="ring", message_dtype=INT8, overlap=True,
    )  # fmt: skip
scenarios.add(
    "in batches", differences.in_batches,
    method="dmsgd", topology="bipartite-random-match", message_dtype=HALF,
)  # fmt: skip
scenarios.add("refused", differences.refused)
scenarios.add("more", differences.more_parameters)
scenarios.add("equal data", differences.equal_data, own=False, lr=differences.LR)
scenarios.add("own data", differences.equal_data, own=True, lr=differences.LR)
scenarios.add("tiny steps", differences.equal_data, own=True, lr=1e-6)
scenarios.add("large", differences.large)
scenarios.add("automatic", differences.automatic)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_computed_by_hand(case: tuple[torch.dtype, str, str, bool | str]) -> None:
    dtype, method, topology, _ = case
    found = scenarios.outcomes(str(case))
    assert {kind for _, _, kind in found} == {KINDS[dtype]}
    expected = differences.by_hand(method, topology, N, dtype)
    runs.assert_equal([t for t, _, _ in found], expected)


def test_so_are_those_in_16_bits_through_the_branch_for_nccl() -> None:
    found = scenarios.outcomes("in batches")
    assert all("batch" in posted for _, posted in found)
    expected = differences.by_hand("dmsgd", "bipartite-random-match", N, HALF)
    runs.assert_equal([steps for steps, _ in found], expected)


@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_the_steps_stay_near_those_of_whole_messages(dtype: torch.dtype) -> None:
    whole = runs_steps.simulate("decentlam", N, differences.STEPS)
    for step, x in enumerate(differences.by_hand("decentlam", "ring", N, dtype)):
        moved = (whole[step] - whole[0]).abs().max() + differences.LR
        assert (x - whole[step]).abs().max() < 0.02 * moved


@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_nodes_of_two_processes_stay_near_too_and_agree_inside(dtype: torch.dtype) -> None:
    whole = scenarios.outcomes("two per node None")
    rounded = scenarios.outcomes(f"two per node {dtype}")
    for (expected, _, _), (found, _, kind) in zip(whole, rounded, strict=True):
        assert kind == KINDS[dtype]
        moved = (expected[-1] - expected[0]).abs().max()
        assert (expected[-1] - found[-1]).abs().max() < 0.02 * moved
    for one, other in zip(rounded[::2], rounded[1::2], strict=True):
        assert runs.same(one[0], other[0])


def test_half_and_a_quarter_of_the_bytes_are_sent() -> None:
    """To two neighbors; the first message of 8 bits is whole, the others have a scale a block."""
    later = differences.STEPS - 1
    for payloads, name in ((1, (HALF, "dmsgd", "ring", False)), (2, f"two payloads {HALF}")):
        for _, (last, total, sizes), _ in scenarios.outcomes(str(name)):
            assert last == 2 * payloads * 2 * sum(sizes)
            assert total == differences.STEPS * last
    for payloads, name in ((1, (INT8, "dmsgd", "ring", False)), (2, f"two payloads {INT8}")):
        for _, (last, total, sizes), _ in scenarios.outcomes(str(name)):
            assert last == 2 * sum(-(-payloads * d // BLOCK) * (BLOCK + 4) for d in sizes)
            assert total == 2 * payloads * 8 * sum(sizes) + later * last


def test_gossip_keeps_the_average_and_ends_in_agreement() -> None:
    for dtype, left in ((HALF, 1e-3), (INT8, 1e-9)):  # 8 bits of a difference are of ever less
        for before, after, apart in scenarios.outcomes(f"gossip {dtype}"):
            assert (before - after).abs().max() < 1e-13
            assert apart[-1] < left * apart[0]


@pytest.mark.parametrize("method", ["decentlam", "awc-dmsgd"])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(method: str) -> None:
    for through, again in scenarios.outcomes(f"resumed {method}"):
        assert torch.equal(through, again)


def test_what_cannot_be_sent_so_is_refused_on_all_nodes() -> None:
    for directed, drawn, everyone, dtype in scenarios.outcomes("refused"):
        assert "same in both directions" in directed and "try base-2" in directed
        assert "draws them at random" in drawn and "use torch.float16" in drawn
        assert "averages over everyone" in everyone
        assert "torch.bfloat16, torch.int8, got torch.int32" in dtype


def test_so_are_more_neighbors_than_memory_is_meant_for() -> None:
    sixteen = Network(None, 0, 16)
    check_differences(sixteen, decentlam.topology.one_peer_symmetric_exponential(16))
    check_differences(sixteen, decentlam.topology.base_2(16))
    with pytest.raises(ValueError, match=r"at most 8 here; .* has 15 different ones"):
        check_differences(sixteen, decentlam.topology.complete(16))


@pytest.mark.parametrize("nodes", [3, 7, 12, 31, 33, 100, 255])
def test_base_2_has_few_enough_for_any_number_of_nodes(nodes: int) -> None:
    check_differences(Network(None, 0, nodes), decentlam.topology.base_2(nodes))


def test_parameters_added_later_are_told_whole_first() -> None:
    found = torch.stack([more for (more,) in scenarios.outcomes("more")])
    assert (found - found.mean()).abs().max() < 1e-6
    assert abs(found.mean().item() - (N - 1) / 2) < 1e-12


def test_nodes_that_train_on_the_same_data_are_noticed_in_16_bits() -> None:
    assert scenarios.outcomes("equal data") == [2] * N
    assert scenarios.outcomes("own data") == [0] * N
    assert scenarios.outcomes("tiny steps") == [0] * N  # of which 16 bits show nothing


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 10 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_8_bits_are_a_127th_of_the_largest_of_their_block(size: int, dtype: torch.dtype) -> None:
    codec = CODECS[INT8]
    change = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    change[: size // 2] *= 1e-6
    packet = torch.empty(codec.packet_bytes(size), dtype=torch.uint8)
    codec.encode(change, packet)
    assert torch.equal(codec.decode(packet, size).double(), differences.eighths(change))
    codec.encode(torch.zeros(size), packet)
    assert not codec.decode(packet, size).any()


def test_what_float16_cannot_hold_stays_finite_and_keeps_the_average() -> None:
    """All beyond 65504 are told as that, so that such nodes do not mix."""
    for before, after in scenarios.outcomes("large"):
        assert (before - after).abs().max() < 1e-8


def test_an_automatic_topology_is_one_that_16_bits_can_use() -> None:
    assert scenarios.outcomes("automatic") == [(True, "Rounded")] * N


@pytest.mark.parametrize(
    ("option", "why"),
    [({"topology": "auto"}, "choose a topology such as"), ({"nonfinite": "ignore"}, "for ever")],
)
def test_what_does_not_go_together_is_refused(option: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decentlam.DmSGD(nn.Linear(2, 1).parameters(), message_dtype=INT8, **option)


def test_one_node_alone_needs_no_message() -> None:
    layer = nn.Linear(2, 1)
    optimizer = decentlam.DecentLaM(layer.parameters(), lr=0.1, message_dtype=INT8)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()

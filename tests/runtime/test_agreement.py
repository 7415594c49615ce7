"""Nodes that mean different runs are told so, all alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import decentlam
from decentlam.runtime.agreement import describe_run
from tests.helpers.processes import Group, Scenarios, every, message_of, warnings_of
from tests.helpers.quadratic import Quadratic, build

scenarios = Scenarios(4)


PAIRS = [decentlam.topology.bipartite_random_match(4, seed=seed) for seed in (0, 1)]
# What process 2 has that the others have not, and what the error says of it.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 0.7}, "0.7"),
    "momentum": ({"momentum": 0.123}, "0.123"),
    "topology": ({"topology": "star"}, "star"),
    "seed": ({"topology": PAIRS[1]}, "bipartite-random-match"),
    "algorithm": ({"method": "da-dmsgd"}, "DADmSGD"),
    "bucket_bytes": ({"bucket_bytes": 10**6}, "1000000"),
    "overlap": ({"overlap": False}, "overlap = 'none'"),
    "processes_per_node": ({"processes_per_node": 2}, "processes_per_node = 2"),
}
WEIGHTS: dict[str, tuple[int, nn.Parameter, str]] = {
    "shape": (1, nn.Parameter(torch.zeros(4, dtype=torch.float64)), "(4,)"),
    "dtype": (1, nn.Parameter(torch.zeros(5)), "torch.float32"),
    "frozen": (1, nn.Parameter(torch.zeros(5).double(), requires_grad=False), ""),
    "frozen shape": (5, nn.Parameter(torch.zeros(300), requires_grad=False), "(300,)"),
}


def disagree(process_group: Group, what: str) -> str:
    """Process 2 means another run."""
    model: Any = Quadratic(seed=0)
    model.weights.append(nn.Parameter(torch.zeros(3), requires_grad=False))
    options = {"method": "dmsgd", "topology": PAIRS[0] if what == "seed" else "ring"}
    if dist.get_rank(process_group) == 2:
        if what in WEIGHTS:
            place, model.weights[place], _ = WEIGHTS[what]
        elif what == "name":
            model = nn.ModuleDict({"extra": model})
        elif what == "one more":
            model.weights.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        else:
            options |= OPTIONS[what][0]
    return message_of(lambda: build(model=model, process_group=process_group, **options))


DISAGREEMENTS = {name: said for name, (*_, said) in {**OPTIONS, **WEIGHTS}.items()}
DISAGREEMENTS |= {"name": "extra", "one more": ""}


@scenarios.run(disagree, every(what=DISAGREEMENTS))
def test_disagreement_is_the_same_clear_error_everywhere(errors: list[str], what: str) -> None:
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: the nodes do not agree on the run: process 2 has")
    assert DISAGREEMENTS[what] in errors[0]
    assert "process 1 has" not in errors[0] and "process 3 has" not in errors[0]


def reorder(process_group: Group, seeded: bool, named: bool) -> str:
    """Process 2 gives two parameters of equal shape in another order."""
    rank = dist.get_rank(process_group)
    torch.manual_seed(0 if seeded else rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    params = [*model.parameters()]
    if rank == 2:
        params[0], params[2] = params[2], params[0]
    options = {"model": model} if named else {}
    return message_of(
        lambda: decentlam.DmSGD(params, lr=0.1, process_group=process_group, **options)
    )


for seeded in (True, False):
    scenarios.add(f"reorder, seeded {seeded}", reorder, seeded=seeded, named=not seeded)


def test_parameters_in_another_order_are_refused_if_names_or_values_tell() -> None:
    for rank, error in enumerate(scenarios.outcomes("reorder, seeded True")):
        assert "of process 2 have the values of process 0's in another order" in error, (
            rank,
            error,
        )
    for error in scenarios.outcomes("reorder, seeded False"):
        assert "process 2 has parameter 0 of group 0 = '1.weight (3, 3)" in error, error


def change_rate(process_group: Group, rank: int | None) -> list[str]:
    """One process changes its rate, as a scheduler that looks at its own loss may: what is said."""
    model = Quadratic(seed=0)
    optimizer = build("dmsgd", model, process_group)
    if dist.get_rank(process_group) == rank:
        optimizer.param_groups[0]["lr"] = 0.007
    with warnings_of("decentlam.network.network") as said:
        for _ in range(2):
            optimizer.consensus_distance()
            with optimizer.averaged(model):
                pass
    return said


for changed in (None, 2):
    scenarios.add(f"rate changed on {changed}", change_rate, rank=changed)


def test_a_rate_that_one_process_has_changed_is_mentioned_once() -> None:
    assert scenarios.outcomes("rate changed on None") == [[]] * 4
    (said,), *others = scenarios.outcomes("rate changed on 2")
    assert "[0.007] on process 2" in said and others == [[]] * 3


def test_processes_compare_versions_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = decentlam.DecentLaM([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    given = (optimizer.method, decentlam.options.Options(), optimizer.param_groups)
    before = describe_run(*given)
    monkeypatch.setattr(decentlam, "__version__", "0.0.7")
    monkeypatch.setattr(torch, "__version__", "1.0")
    after = describe_run(*given)
    assert {name for name in before if before[name] != after[name]} == {
        "decentlam version",
        "torch version",
    }
    assert "unknown" not in str(before["code of the algorithm"])

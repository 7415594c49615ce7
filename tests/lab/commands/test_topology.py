"""One topology in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.commands.running import PNG, run, run_json


def test_topology_shows_weights_spectrum_and_messages(tmp_path: Path):
    picture = tmp_path / "new" / "mesh.png"
    facts = run_json("topology", "mesh", "-n", "8", "--out", str(picture))
    assert facts["rho"] == pytest.approx(0.8535534)
    assert facts["symmetric"] and facts["doubly_stochastic"] and not facts["positive_definite"]
    step = facts["steps"][0]
    assert step["messages"] == 3 and step["eigenvalues"][0] == pytest.approx(1)
    assert sum(step["weights"][0]) == pytest.approx(1)
    assert picture.read_bytes().startswith(PNG)
    text = run("topology", "mesh", "-n", "8").output
    assert "0.8536" in text and "0.417" in text


@pytest.mark.system
def test_topology_lazy_large_and_changing():
    lazy = run_json("topology", "ring", "-n", "8", "--lazy", "0.5")
    assert lazy["rho"] == pytest.approx(0.9023689) and lazy["positive_definite"]
    assert " ..." in run("topology", "ring", "-n", "130").output
    changing = run_json("topology", "bipartite-random-match", "-n", "4", "--steps", "3")
    assert len(changing["steps"]) == 3 and changing["period"] is None

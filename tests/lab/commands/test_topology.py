"""One topology in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.commands.running import PNG, run, run_json


def test_topology_shows_weights_spectrum_and_bytes(tmp_path: Path):
    picture = tmp_path / "new" / "mesh.png"
    facts = run_json(
        "topology", "mesh", "-n", "8", "--message-bytes", "1000", "--out", str(picture)
    )
    assert facts["rho"] == pytest.approx(0.8535534)
    assert facts["symmetric"] and facts["doubly_stochastic"] and not facts["positive_definite"]
    step = facts["steps"][0]
    assert step["bytes_per_node"] == {"fewest": 2000, "most": 3000}
    assert step["eigenvalues"][0] == pytest.approx(1)
    assert sum(step["weights"][0]) == pytest.approx(1)
    assert picture.read_bytes().startswith(PNG)
    text = run("topology", "mesh", "-n", "8").output
    assert "0.853553" in text and "0.417" in text


@pytest.mark.system
def test_topology_lazy_large_and_changing():
    lazy = run_json("topology", "ring", "-n", "8", "--lazy", "0.5")
    assert lazy["rho"] == pytest.approx(0.9023689) and lazy["positive_definite"]
    large = run("topology", "ring", "-n", "130").output
    assert "from 0.3333 to 0.3333" in large and "..." in large
    changing = run_json("topology", "bipartite-random-match", "-n", "4", "--steps", "3")
    assert len(changing["steps"]) == 3 and changing["period"] is None

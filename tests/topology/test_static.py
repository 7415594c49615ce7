"""Static networks by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decentlam import topology
from tests.helpers.networks import edges_of


def test_mesh_of_8_by_hand() -> None:
    # 0 1 2 3   corners have degree 2, the others 3. An edge of two corners weighs 1/3 (0-4, 3-7),
    # 4 5 6 7   any other 1/4. A corner keeps 1 - 1/3 - 1/4 = 5/12, the others 1 - 3/4 = 1/4.
    net = topology.mesh(8)
    assert edges_of(net) == {
        (0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (0, 4), (1, 5), (2, 6), (3, 7),
    }  # fmt: skip
    corner, edge, other = 5 / 12, 1 / 3, 1 / 4
    expected = [
        [corner, other, 0, 0, edge, 0, 0, 0],
        [other, 1 / 4, other, 0, 0, other, 0, 0],
        [0, other, 1 / 4, other, 0, 0, other, 0],
        [0, 0, other, corner, 0, 0, 0, edge],
        [edge, 0, 0, 0, corner, other, 0, 0],
        [0, other, 0, 0, other, 1 / 4, other, 0],
        [0, 0, other, 0, 0, other, 1 / 4, other],
        [0, 0, 0, edge, 0, 0, other, corner],
    ]
    np.testing.assert_allclose(net.weights(), expected, rtol=0, atol=1e-15)
    assert net.eigenvalues()[-1].item() == pytest.approx(-0.384, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "shape"), [(1, "1 x 1"), (2, "1 x 2"), (7, "1 x 7"), (9, "3 x 3"), (12, "3 x 4")]
)
def test_mesh_takes_the_two_closest_factors(n: int, shape: str) -> None:
    assert topology.mesh(n).description == f"{shape} grid"


def test_torus_by_hand() -> None:
    # 3 x 3: everybody has 4 neighbors, weights 1/5
    net = topology.torus(9)
    assert net.neighbors(0) == [1, 2, 3, 6]
    np.testing.assert_allclose(5 * net.weights()[0], [1, 1, 1, 1, 0, 0, 1, 0, 0])
    # 2 x 2: opposite borders are the same edge, taken once
    assert edges_of(topology.torus(4)) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    # a prime is a ring
    assert torch.equal(topology.torus(5).weights(), topology.ring(5).weights())


def test_star_of_4_by_hand() -> None:
    # The middle has degree 3, so every edge weighs 1/4; the middle keeps 1/4, the leaves 3/4.
    expected = [[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]
    assert (4 * topology.star(4).weights()).tolist() == expected


def test_ring_by_hand() -> None:
    # Two nodes share one edge: degree 1, weights 1/2. Three are complete: weights 1/3.
    assert topology.ring(2).weights().tolist() == [[0.5, 0.5], [0.5, 0.5]]
    np.testing.assert_allclose(topology.ring(3).weights(), np.full((3, 3), 1 / 3))
    assert topology.ring(5).neighbors(0) == [1, 4]
    for n in (5, 8):
        assert topology.ring(n).rho == pytest.approx((1 + 2 * math.cos(2 * math.pi / n)) / 3)


def test_exponential_by_hand() -> None:
    # 6 nodes hear i - 1, i - 2, i - 4 and themselves, 1/4 each
    net = topology.exponential(6)
    assert net.row(0) == {0: 0.25, 2: 0.25, 4: 0.25, 5: 0.25}
    assert net.listeners(0) == [1, 2, 4]


def test_hypercube_by_hand() -> None:
    assert topology.hypercube(8).neighbors(5) == [1, 4, 7]  # 101: 001, 100, 111
    assert topology.hypercube(8).row(5) == {1: 0.25, 4: 0.25, 5: 0.25, 7: 0.25}
    assert [topology.one_peer_hypercube(8).neighbors(5, k) for k in range(3)] == [[4], [7], [1]]


def test_symmetric_exponential_of_8_by_hand() -> None:
    # floor(log2 7) = 2: odd i with i + 1 and i + 3
    assert edges_of(topology.symmetric_exponential(8)) == {
        (1, 2), (3, 4), (5, 6), (0, 7),
        (1, 4), (3, 6), (0, 5), (2, 7),
    }  # fmt: skip
    # degree 2 everywhere: a ring in another order
    assert topology.symmetric_exponential(8).row(1) == {
        1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3), 4: pytest.approx(1 / 3),
    }  # fmt: skip


def test_symmetric_exponential_of_small_and_odd_numbers_by_hand() -> None:
    assert edges_of(topology.symmetric_exponential(2)) == {(0, 1)}
    # 4: hops 1 and 3 (hop 1 alone would leave two separate pairs) make a ring
    assert edges_of(topology.symmetric_exponential(4)) == {(1, 2), (0, 3), (0, 1), (2, 3)}
    # 6: odd i with i + 1, i + 3
    assert edges_of(topology.symmetric_exponential(6)) == {
        (1, 2), (3, 4), (0, 5), (1, 4), (0, 3), (2, 5),
    }  # fmt: skip
    # odd n: every i with i +- 1 and i +- 3, and from 9 on i +- 7
    assert topology.symmetric_exponential(7).neighbors(0) == [1, 3, 4, 6]
    assert topology.symmetric_exponential(11).neighbors(0) == [1, 3, 4, 7, 8, 10]
    # 5: +- 3 is +- 2, so this is complete; 3 is a ring
    assert topology.symmetric_exponential(5).rho < 1e-15
    assert edges_of(topology.symmetric_exponential(3)) == {(0, 1), (0, 2), (1, 2)}

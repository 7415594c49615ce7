"""One or two steps of every method for two nodes, worked out by hand."""

from __future__ import annotations

import torch

import decentlam
from decentlam import topology
from decentlam.simulation.simulate import Nodes

# Two nodes that keep 3/4 and take 1/4, gradients (4, 0) at every step, lr 1/2, momentum 1/2.
# Started at (0, 8) unless stated. All numbers below are exact in binary.
LOPSIDED = topology.from_weights([[0.75, 0.25], [0.25, 0.75]])


def by_hand(name: str, steps: int, start: tuple[float, float] = (0.0, 8.0), **hyper) -> list[float]:
    x0 = torch.tensor(start, dtype=torch.float64).reshape(2, 1)
    g = torch.tensor(hyper.pop("g", (4.0, 0.0)), dtype=torch.float64).reshape(2, 1)
    hyper = {"lr": 0.5, "momentum": 0.5, **hyper}
    x = decentlam.simulate(name, LOPSIDED, x0, lambda x, k: g, steps=steps, **hyper)
    return x.flatten().tolist()


def test_dsgd_by_hand() -> None:
    # x - lr g = (0 - 2, 8) = (-2, 8); W: (-1.5 + 2, -0.5 + 6)
    assert by_hand("dsgd", 1) == [0.5, 5.5]


def test_dmsgd_by_hand() -> None:
    # step 1: m = (4, 0), as DSGD: (0.5, 5.5)
    # step 2: m = (6, 0); x - lr m = (-2.5, 5.5); W: (-1.875 + 1.375, -0.625 + 4.125)
    assert by_hand("dmsgd", 1) == [0.5, 5.5]
    assert by_hand("dmsgd", 2) == [-0.5, 3.5]


def test_dmsgd_with_nesterov_by_hand() -> None:
    # m = (4, 0); direction g + m / 2 = (6, 0); x - lr (6, 0) = (-3, 8); W: (-2.25 + 2, -0.75 + 6)
    assert by_hand("dmsgd", 1, nesterov=True) == [-0.25, 5.25]


def test_weight_decay_by_hand() -> None:
    # g = (4, 0) + x / 4 = (4, 2); x - lr g = (-2, 7); W: (-1.5 + 1.75, -0.5 + 5.25)
    assert by_hand("dsgd", 1, weight_decay=0.25) == [0.25, 4.75]


def test_da_dmsgd_by_hand() -> None:
    # step 1: h = (4, 0), x = (0.5, 5.5) as DSGD; m = W h = (3, 1)
    # step 2: h = (1.5, 0.5) + (4, 0) = (5.5, 0.5); x - lr h = (-2.25, 5.25)
    #         W: (-1.6875 + 1.3125, -0.5625 + 3.9375)
    assert by_hand("da-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("da-dmsgd", 2) == [-0.375, 3.375]


def test_awc_dmsgd_by_hand() -> None:
    # step 1: W x = (2, 6); m = (4, 0); x = (2 - 2, 6)
    # step 2: W x = (1.5, 4.5); m = (6, 0); x = (1.5 - 3, 4.5)
    assert by_hand("awc-dmsgd", 1) == [0.0, 6.0]
    assert by_hand("awc-dmsgd", 2) == [-1.5, 4.5]


def test_awc_dmsgd_heavy_ball_by_hand() -> None:
    # step 2: W x - lr g + (x - x-) / 2 = (1.5 - 2, 4.5) + ((0, 6) - (0, 8)) / 2
    assert by_hand("awc-dmsgd", 1, heavy_ball=True) == [0.0, 6.0]
    assert by_hand("awc-dmsgd", 2, heavy_ball=True) == [-0.5, 3.5]


def test_qg_dmsgd_by_hand() -> None:
    # step 1: (0.5, 5.5) as DSGD; q = ((0, 8) - (0.5, 5.5)) / lr / 2 = (-0.5, 2.5)
    # step 2: q / 2 + g = (3.75, 1.25); x - lr of it = (-1.375, 4.875)
    #         W: (-1.03125 + 1.21875, -0.34375 + 3.65625)
    assert by_hand("qg-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("qg-dmsgd", 2) == [0.1875, 3.3125]


def test_qg_dmsgd_with_another_mu_by_hand() -> None:
    # mu = 1/4: q = 3/4 ((0, 8) - (0.5, 5.5)) / lr = (-0.75, 3.75)
    # q / 2 + g = (3.625, 1.875); x - lr of it = (-1.3125, 4.5625)
    # W: (-0.984375 + 1.140625, -0.328125 + 3.421875)
    assert by_hand("qg-dmsgd", 2, mu=0.25) == [0.15625, 3.09375]


def test_d2_dmsgd_by_hand() -> None:
    # (I + W) / 2 keeps 7/8 and takes 1/8.
    # step 1: p = (-2, 8); x = (-1.75 + 1, -0.25 + 7)
    # step 2: m = (6, 0); p+ = (-3.75, 6.75); p+ + x - p = (-3.75 + 1.25, 6.75 - 1.25) = (-2.5, 5.5)
    #         x = (-2.1875 + 0.6875, -0.3125 + 4.8125)
    assert by_hand("d2-dmsgd", 1) == [-0.75, 6.75]
    assert by_hand("d2-dmsgd", 2) == [-1.5, 4.5]


def test_decentlam_by_hand() -> None:
    # step 1: v = x - W(x - lr g) = (0, 8) - (0.5, 5.5) = (-0.5, 2.5); x = (0.5, 5.5)
    # step 2: x - lr g = (-1.5, 5.5), W of it (0.25, 3.75); x - that = (0.25, 1.75)
    #         v = (-0.25, 1.25) + (0.25, 1.75) = (0, 3); x = (0.5, 2.5)
    assert by_hand("decentlam", 1) == [0.5, 5.5]
    assert by_hand("decentlam", 2) == [0.5, 2.5]


def test_decentlam_rescales_its_velocity_when_lr_changes_by_hand() -> None:
    # Step 2 at lr 1/4 after 1/2: x - lr g = (-0.5, 5.5), W of it (1, 4); x - that = (-0.5, 1.5)
    # v = 1/2 * 1/2 * (-0.5, 2.5) + (-0.5, 1.5) = (-0.625, 2.125); x = (0.5, 5.5) - v
    assert by_hand("decentlam", 2, lr=lambda k: [0.5, 0.25][k]) == [1.125, 3.375]


def test_decentlam_around_lr_zero_by_hand() -> None:
    # step 1, lr 1/2: v = (-0.5, 2.5), x = (0.5, 5.5)
    # step 2, lr 0: plain gossip, x = W (0.5, 5.5) = (1.75, 4.25); v = (0.5, 5.5) - that
    # step 3, lr 1/2: x - lr g = (-0.25, 4.25), W of it (0.875, 3.125); x - that = (0.875, 1.125)
    #         v = (-0.625, 0.625) + (0.875, 1.125) = (0.25, 1.75); x = (1.5, 2.5)
    def lr(k: int) -> float:
        return [0.5, 0.0, 0.5][k]

    assert by_hand("decentlam", 2, lr=lr) == [1.75, 4.25]
    assert by_hand("decentlam", 3, lr=lr) == [1.5, 2.5]


def test_exact_decentlam_by_hand() -> None:
    # step 1: u = (2, 0), v = y = 0; z = (-2, 8); x = (0.5, 5.5); t = z - x = (-2.5, 2.5)
    #         v = (2, 0) + t / 2 = (0.75, 1.25); y = -t / 20 = (0.125, -0.125)
    # step 2: u = (1.875, 0.125); z = (0.5 - 1.875 - 0.375, 5.5 - 0.125 - 0.625) = (-1.75, 4.75)
    #         x = (-1.3125 + 1.1875, -0.4375 + 3.5625); t = (-1.625, 1.625)
    # The mean takes the steps of momentum SGD: 4 - 1 = 3, then 3 - 1.5.
    assert by_hand("decentlam-exact", 1) == [0.5, 5.5]
    assert by_hand("decentlam-exact", 2) == [-0.125, 3.125]


def test_steady_decentlam_by_hand() -> None:
    # step 1: v = (2, 0), z = (-2, 8), x = W z = (0.5, 5.5) as DSGD, d = z - x = (-2.5, 2.5)
    #         s = d / 4 = (-0.625, 0.625); v + s / 2 + d / 2 = (0.4375, 1.5625)
    # step 2: v = (2.21875, 0.78125), z = (-1.71875, 4.71875); W: (-1.2890625 + 1.1796875, ...)
    #         d = (-1.609375, 1.609375), s = 3/4 s + d / 4 = (-0.87109375, 0.87109375)
    #         v + s / 2 + d / 2 = (0.978515625, 2.021484375)
    # step 3: v = (2.4892578125, 1.0107421875), z = (-2.5986328125, 2.0986328125)
    hyper = {"mu": 0.75, "share": 0.5}
    assert by_hand("decentlam-steady", 1, **hyper) == [0.5, 5.5]
    assert by_hand("decentlam-steady", 2, **hyper) == [-0.109375, 3.109375]
    assert by_hand("decentlam-steady", 3, **hyper) == [-1.42431640625, 0.92431640625]


def test_gt_dmsgd_by_hand() -> None:
    # step 1: y = m = (4, 0), x = W (-2, 8) = (0.5, 5.5), W y = (3, 1)
    # step 2: g did not change, y = (3, 1), m = (5, 1), x = W (0.5 - 2.5, 5.5 - 0.5)
    assert by_hand("gt-dmsgd", 1) == [0.5, 5.5]
    assert by_hand("gt-dmsgd", 2) == [-0.25, 3.25]


def test_decentlam_with_nesterov_at_lr_zero_is_plain_gossip_by_hand() -> None:
    # W (0, 8) = (2, 6), not (0, 8) - 1.5 ((0, 8) - (2, 6)) = (3, 5)
    assert by_hand("decentlam", 1, lr=0.0, nesterov=True) == [2.0, 6.0]
    assert by_hand("awc-dmsgd", 1, lr=0.0, nesterov=True, heavy_ball=True) == [2.0, 6.0]


def test_pmsgd_by_hand() -> None:
    # step 1: m = mean(4, 0) = 2, x = (-1, 7); step 2: m = 3, x = (-2.5, 5.5)
    assert by_hand("pmsgd", 1) == [-1.0, 7.0]
    assert by_hand("pmsgd", 2) == [-2.5, 5.5]


def test_pmsgd_lars_by_hand() -> None:
    # start (8, 8), trust 1/2: rate = 8 / 2 / |mean g| = 4 / 2 = 2; m = 4; x = 8 - 2 = 6
    # step 2: rate = 6 / 2 / 2 = 1.5; m = 2 + 3 = 5; x = 6 - 2.5
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5) == [6.0, 6.0]
    assert by_hand("pmsgd-lars", 2, (8.0, 8.0), trust=0.5) == [3.5, 3.5]
    # weight decay 1/4: rate = 4 / (2 + 2) = 1 on g + x / 4 = 2 + 2; x = 8 - 2
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5, weight_decay=0.25) == [6.0, 6.0]
    # a layer of zeros has no scale to go by and takes the plain step: x = 0 - 1
    assert by_hand("pmsgd-lars", 1, (0.0, 0.0), trust=0.5) == [-1.0, -1.0]
    # without a gradient there is no rate either (it would be 4 / 0), and nothing moves
    assert by_hand("pmsgd-lars", 1, (8.0, 8.0), trust=0.5, g=(0.0, 0.0)) == [8.0, 8.0]


def test_slowmo_by_hand() -> None:
    # start (4, 4), tau 1, slow momentum 1/2
    # step 1: (4 - 2, 4), average 3; u lr = 4 - 3 = 1; x = 4 - 1
    # step 2: m = (6, 0); (3 - 3, 3), average 1.5; u lr = 1/2 + 1.5 = 2; x = 3 - 2
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=1) == [3.0, 3.0]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1) == [1.0, 1.0]
    # alpha 1/2: step 1 x = 4 - 1/2
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=1, alpha=0.5) == [3.5, 3.5]
    # tau 2: DmSGD goes (4 - 2, 4) -> W (2.5, 3.5); m = (6, 0): (-0.5, 3.5), average 1.5
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=2) == [2.5, 3.5]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=2) == [1.5, 1.5]
    # local SGD in between: (2, 4), then (2 - 3, 4), average 1.5
    assert by_hand("slowmo", 1, (4.0, 4.0), tau=2, base="local") == [2.0, 4.0]
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=2, base="local") == [1.5, 1.5]


def test_slowmo_inner_momentum_by_hand() -> None:
    # After one step with tau 1: x = (3, 3), u lr = 1, and m is (4, 0), (0, 0) or the mean (2, 2).
    # reset: m = (4, 0), average 3 - 1 = 2, u lr = 1/2 + 1, x = 3 - 1.5
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1, inner_momentum="reset") == [1.5, 1.5]
    # average: m = (1, 1) + (4, 0) = (5, 1), average 3 - 1.5, u lr = 1/2 + 1.5, x = 3 - 2
    assert by_hand("slowmo", 2, (4.0, 4.0), tau=1, inner_momentum="average") == [1.0, 1.0]
    # That is where keep arrives too; m tells them apart: (2, 0) + (4, 0), or the mean of (5, 1).
    for inner, m in (("keep", [6.0, 0.0]), ("average", [3.0, 3.0])):
        nodes = Nodes("slowmo", LOPSIDED, torch.full((2, 1), 4.0), 0.5, tau=1, inner_momentum=inner)
        for _ in range(2):
            nodes.step(torch.tensor([[4.0], [0.0]]), 0.5)
        assert nodes.state_dict()["state"]["m"].flatten().tolist() == m


def test_consensus_distance_by_hand() -> None:
    # rows (0, 0) and (6, 8): 5 from their average (3, 4) each
    nodes = Nodes("dsgd", LOPSIDED, torch.tensor([[0.0, 0.0], [6.0, 8.0]]))
    assert nodes.consensus_distance() == 5.0

"""Compiled loops do what torch's operations do, and where they cannot be built, nothing fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentlam.algorithms import Algorithm, DecentLaM, SteadyDecentLaM, Step, compiled
from decentlam.exchange.network import ALONE
from decentlam.runtime.bucket import build_buckets
from decentlam.runtime.shard import Plan, Shard

ROOT = Path(__file__).parent.parent
DEMANDED = os.environ.get("DECENTLAM_LOOPS") == "1"  # as in .ci/run, where nothing is left out
needs_loops = pytest.mark.skipif(
    not compiled.available() and not DEMANDED, reason="built where no C compiler worked"
)
LAYERS = (40_000, 1, 999, 1025, 33_000, 7)  # large ones keep their gradient where it is
WEIGHTS = {
    "alone": (1.0,),
    "pair": (0.5, 0.5),
    "near": (0.75, 0.25),
    "far": (0.25, 0.75),
    "three": (0.5, 0.3, 0.2),
}
METHODS = [DecentLaM(0.9), DecentLaM(0.0), SteadyDecentLaM(0.9), SteadyDecentLaM(0.0)]


@pytest.fixture(autouse=True)
def one_thread():
    """With many of them, torch's operations are used."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(seed: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


class Node:
    """The shard of one bucket, as a process has it, with a state as in the midst of a run."""

    def __init__(self, algorithm: Algorithm, dtype: torch.dtype) -> None:
        params = [torch.nn.Parameter(drawn(i, n, dtype)) for i, n in enumerate(LAYERS)]
        for i, p in enumerate(params):
            p.grad = drawn(50 + i, p.numel(), dtype)
        (self.bucket,) = build_buckets([{"params": params}], 1 << 30)
        self.shard = Shard(self.bucket, algorithm, ALONE)
        self.bucket.gather_gradients()
        self.size = len(self.shard.x)
        self.message = torch.empty(1, self.size, dtype=dtype)
        for seed, value in enumerate(self.shard.state.values()):
            value.copy_(drawn(100 + seed, self.size, dtype)).mul_(0.01)

    def step(
        self, plan: Plan, weights: tuple[float, ...], rounded: torch.dtype | None = None
    ) -> list[Tensor]:
        """Everything that one step writes; with messages rounded to that precision."""
        gradients = self.shard.cut(self.bucket.gradients())
        assert self.shard.form(self.message, gradients, plan, look=True)
        others = [drawn(200 + k, self.size, self.message.dtype)[None] for k in range(4)]
        terms = list(zip(weights, [self.message, *others], strict=False))
        if rounded is not None:
            own = self.message.to(rounded)
            terms = [(1.0, self.message), (0.5, others[0].to(rounded)), (-0.5, own)]
        self.shard.update(terms, gradients, plan, self.message)
        return [self.message, self.shard.x, *self.shard.state.values()]


def both_ways(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: Algorithm,
    dtype: torch.dtype,
    step: Step,
    weights: tuple[float, ...],
    rounded: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """What a step writes with loops, and with torch's operations."""
    plan = Plan(algorithm, step)
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "_rows", None)  # all of it is done by loops
        with_loops = Node(algorithm, dtype).step(plan, weights, rounded)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_loops", {})
        return with_loops, Node(algorithm, dtype).step(plan, weights, rounded)


@needs_loops
def test_a_checkout_beside_a_compiler_has_the_loops():
    """`make` builds them; after a change of loops.c it does so again."""
    assert set(compiled._loops) == {torch.float32, torch.float64}


@needs_loops
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("lr", "decay"), [(0.0, 0.1), (1e-12, 0.0), (0.1, 0.1)])
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_loops_compute_what_torch_does(monkeypatch, algorithm, lr, decay, weights):
    step = Step(3, lr, lr_ratio=0.5 if lr else 0.0, weight_decay=decay)
    for dtype, error in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        loops, torchs = both_ways(monkeypatch, algorithm, dtype, step, WEIGHTS[weights])
        for a, b in zip(loops, torchs, strict=True):
            torch.testing.assert_close(a, b, rtol=error, atol=4 * error)


@needs_loops
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_messages_of_16_bits_are_mixed(monkeypatch, algorithm, rounded):
    """Each as what it is, and not as the other."""
    for dtype, error in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        step = Step(3, 0.1, weight_decay=0.01)
        loops, torchs = both_ways(monkeypatch, algorithm, dtype, step, (), rounded)
        for a, b in zip(loops, torchs, strict=True):
            torch.testing.assert_close(a, b, rtol=error, atol=4 * error)


@needs_loops
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_16_bits_is_read_as_it_is(rounded, flushed):
    """Zeros of both signs, the smallest, infinities; what is no number stays none. By vectors, and
    one by one. Where denormals are flushed, those of float16 are none."""
    values = torch.arange(1 << 16).to(torch.uint16).view(rounded)
    wanted = values.float()
    if flushed:
        wanted[wanted.abs() < torch.finfo(torch.float32).tiny] = 0.0
    for size in (1 << 16, 7):
        for here, expected in zip(values.split(size), wanted.split(size), strict=True):
            x, g, v = torch.zeros(3, len(here))
            torch.set_flush_denormal(flushed)
            step, state = Step(0, 0.1), {"v": v}
            assert compiled.update(DecentLaM(0.0), [(-1.0, here[None])], x, [g], state, step)
            torch.set_flush_denormal(False)
            assert torch.equal(v.isnan(), expected.isnan())  # v = x - mix
            assert torch.equal(v[~v.isnan()], expected[~v.isnan()])


@needs_loops
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
def test_equal_messages_of_16_bits_leave_the_whole_one_as_it_is(rounded):
    node, plan = Node(DecentLaM(0.9), torch.float32), Plan(DecentLaM(0.9), Step(0, 0.1))
    gradients, before = node.shard.cut(node.bucket.gradients()), node.shard.x.clone()
    node.shard.state["v"].zero_()
    node.shard.form(node.message, gradients, plan, look=True)
    packet = node.message.to(rounded)
    terms = [(1.0, node.message), (0.3, packet), (-0.3, packet.clone())]
    node.shard.update(terms, gradients, plan, node.message)
    assert torch.equal(node.shard.x, before - (before - node.message[0]))


@needs_loops
@pytest.mark.parametrize("algorithm", [DecentLaM(0.9), SteadyDecentLaM(0.9)], ids=repr)
def test_equal_messages_are_their_own_mix_to_the_last_digit(algorithm):
    """So nodes that are equal stay so, and the steady form takes nothing for disagreement."""
    node = Node(algorithm, torch.float32)
    gradients = node.shard.cut(node.bucket.gradients())
    plan, before = Plan(algorithm, Step(0, 0.1)), node.shard.x.clone()
    for value in node.shard.state.values():
        value.zero_()
    node.shard.form(node.message, gradients, plan, look=True)
    terms = [(2 / 3, node.message), (1 / 3, node.message.clone())]
    assert compiled.update(
        algorithm, terms, node.shard.x, gradients, node.shard.state, plan.step.at(sent=node.message)
    )
    if isinstance(algorithm, SteadyDecentLaM):
        assert torch.equal(node.shard.x, node.message[0])
        assert not node.shard.state["s"].any()
    else:
        assert torch.equal(node.shard.x, before - (before - node.message[0]))


@needs_loops
@pytest.mark.parametrize("algorithm", [DecentLaM(0.9), SteadyDecentLaM(0.9)], ids=repr)
def test_bits_do_not_depend_on_where_memory_is_cut(algorithm):
    """In vectors of whatever width, and in blocks: a node of several processes cuts elsewhere."""
    whole = Node(algorithm, torch.float32)
    cut = Node(algorithm, torch.float32)
    step = Step(3, 0.1, lr_ratio=0.7, weight_decay=0.01)
    wanted = whole.step(Plan(algorithm, step), WEIGHTS["three"])
    others = [drawn(200 + k, cut.size, torch.float32) for k in range(4)]
    g = torch.cat(cut.shard.cut(cut.bucket.gradients()))
    place = 0
    for size in (1, 3, 1024, 1029, 16, cut.size - 2073):
        here = slice(place, place + size)
        x, message = cut.shard.x[here], cut.message[:, here]
        state = {name: value[here] for name, value in cut.shard.state.items()}
        assert compiled.form(algorithm, message, x, [g[here]], state, step)
        received = [t[None, here] for t in others]
        terms = list(zip(WEIGHTS["three"], [message, *received], strict=False))
        assert compiled.update(algorithm, terms, x, [g[here]], state, step.at(sent=message))
        place += size
    assert place == cut.size
    for a, b in zip(wanted, [cut.message, cut.shard.x, *cut.shard.state.values()], strict=True):
        assert torch.equal(a, b)


@needs_loops
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("algorithm", [DecentLaM(0.9), SteadyDecentLaM(0.9)], ids=repr)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(algorithm, value):
    for place in (0, 39_999, 40_000, 41_030, 75_031):
        node = Node(algorithm, torch.float32)
        gradients = node.shard.cut(node.bucket.gradients())
        start = 0
        for g in gradients:
            if start <= place < start + len(g):
                g[place - start] = value
            start += len(g)
        plan = Plan(algorithm, Step(0, 0.1))
        assert not node.shard.form(node.message, gradients, plan, look=True)
        assert node.shard.form(node.message, gradients, plan, look=False)
        assert (~node.message.isfinite()).sum() == 1


@needs_loops
def test_what_is_not_as_it_lies_in_memory_is_left_to_torch():
    node, algorithm = Node(DecentLaM(0.9), torch.float32), DecentLaM(0.9)
    g = torch._neg_view(torch.ones(node.size))
    x, step = node.shard.x, Step(0, 0.1)
    assert compiled.form(algorithm, node.message, x, [g], node.shard.state, step) is None


@needs_loops
def test_with_many_threads_the_message_is_left_to_torch():
    node, algorithm = Node(DecentLaM(0.9), torch.float32), DecentLaM(0.9)
    gradients = node.shard.cut(node.bucket.gradients())
    x, step = node.shard.x, Step(0, 0.1)
    for threads, left in ((1, False), (8, True)):
        torch.set_num_threads(threads)
        found = compiled.form(algorithm, node.message, x, gradients, node.shard.state, step)
        assert (found is None) == left


class Own(DecentLaM):
    """A user's variant."""

    def message(self, x, g, state, step):
        return x - 2 * step.lr * g


@needs_loops
@pytest.mark.parametrize("algorithm", [DecentLaM(0.9, nesterov=True), Own(0.9)], ids=repr)
def test_other_recursions_have_no_loops(algorithm):
    node = Node(algorithm, torch.float32)
    before = node.shard.x.clone()
    gradients, step = node.shard.cut(node.bucket.gradients()), Step(0, 0.1)
    x, state = node.shard.x, node.shard.state
    assert compiled.form(algorithm, node.message, x, gradients, state, step) is None
    assert not compiled.update(algorithm, [(1.0, node.message)], x, gradients, state, step)
    assert torch.equal(x, before)


@needs_loops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions_have_no_loops(dtype):
    node = Node(DecentLaM(0.9), dtype)
    gradients = node.shard.cut(node.bucket.gradients())
    found = compiled.form(
        DecentLaM(0.9), node.message, node.shard.x, gradients, node.shard.state, Step(0, 0.1)
    )
    assert found is None


# How the library is found, and built -----------------------------------------------------------


@needs_loops
def test_a_library_of_other_sources_is_not_used(tmp_path: Path):
    for place, change in ((tmp_path / "same", ""), (tmp_path / "changed", "\n")):
        place.mkdir()
        for name in compiled.SOURCES:
            (place / name).write_text((compiled.HERE / name).read_text() + change)
        build(place)
        assert bool(compiled.load(place)) == (change == "")


def test_what_is_no_library_is_not_used(tmp_path: Path):
    assert not compiled.load(tmp_path)
    (tmp_path / compiled.LIBRARY).write_bytes(b"for another machine")
    assert not compiled.load(tmp_path)


def build(sources: Path) -> None:
    code = f"import hatch_build; from pathlib import Path; p = Path({str(sources)!r}); "
    code += f"hatch_build.build(p, p / {compiled.LIBRARY!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a wheel is built of, with the library of another build, which must be in none."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    ignored = shutil.ignore_patterns("__pycache__", compiled.LIBRARY)
    shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
    (place / "src" / "decentlam" / "algorithms" / compiled.LIBRARY).write_bytes(b"older")
    return place


def wheel(checkout: Path, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)],
        cwd=checkout,
        env={**os.environ, "DECENTLAM_LOOPS": "", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "variables", [{"DECENTLAM_LOOPS": "0"}, {"CC": "/no/compiler"}, {"CC": "false"}]
)
def test_without_a_compiler_a_wheel_is_for_any_machine(checkout, tmp_path, variables):
    done = wheel(checkout, tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.iterdir()
    assert built.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(built).namelist()
    assert "decentlam/algorithms/loops.c" in names
    assert not any(name.endswith(compiled.LIBRARY) for name in names)


@needs_loops
def test_with_a_compiler_a_wheel_has_the_library_and_fits_every_python(checkout, tmp_path):
    done = wheel(checkout, tmp_path, DECENTLAM_LOOPS="1")
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.iterdir()
    assert "-py3-none-" in built.name and not built.name.endswith("-any.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extract(f"decentlam/algorithms/{compiled.LIBRARY}", tmp_path)
    assert compiled.load(tmp_path / "decentlam" / "algorithms")


@needs_loops
def test_flags_that_would_let_nan_pass_build_nothing(checkout, tmp_path):
    done = wheel(checkout, tmp_path, DECENTLAM_LOOPS="1", CC="cc -D__FAST_MATH__")
    assert done.returncode and "would let NaN pass" in done.stderr


def test_a_compiler_that_was_asked_for_and_fails_is_an_error(checkout, tmp_path):
    done = wheel(checkout, tmp_path, DECENTLAM_LOOPS="1", CC="/no/compiler")
    assert done.returncode and "DECENTLAM_LOOPS=1 was asked for" in done.stderr
    done = wheel(checkout, tmp_path, DECENTLAM_LOOPS="yes")
    assert done.returncode and "DECENTLAM_LOOPS is 'yes'; allowed are 0 and 1" in done.stderr
    assert not list(tmp_path.iterdir())

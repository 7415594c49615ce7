"""Builds wheel and sdist, and tries them in fresh environments: Python 3.11 to 3.14, the oldest and
the newest torch.

    python scripts/try_versions.py                  # what is here; absent Pythons are named
    python scripts/try_versions.py --python 3.13    # one of them
    python scripts/try_versions.py --extras         # also each extra, in an environment of its own
    python scripts/try_versions.py --tests          # also the tests of the core, on each

A Python that this system does not have can be tried in a chroot of one that has it (Debian's
`debootstrap --include=python3.14,python3.14-venv`): install uv there and run this script inside.

Needs uv, and packages for the environments; each torch is several gigabytes, kept in uv's cache.
The environments are built in out/versions and deleted one by one. Only wheels are installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "out" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
UV = [shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"]
# What needs no lab: the recursions, torch's contract, real processes against the simulator.
TESTS = (
    *("algorithms", "topology", "simulation", "exchange", "runtime", "checkpoint"),
    *("test_optimizer.py", "test_optimizer_in_processes.py"),
)

# Trains on two real processes and in the simulator, as a user would, and prints versions.
SMOKE = """
import os, platform, torch, decentlam

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, topology="ring")
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 3) * (1 + optimizer.network.rank)).square().mean().backward()
        optimizer.step()
    with optimizer.averaged(model):
        return model.weight.detach().numpy().tolist()

if __name__ == "__main__" and "RANK" in os.environ:  # `python -m decentlam.launch` started this
    train()
elif __name__ == "__main__":
    first, second = decentlam.launch(train, nodes=2)
    assert first == second, (first, second)
    target = torch.arange(4.0)[:, None]
    x = decentlam.simulate("decentlam", "ring", torch.zeros(4, 1), lambda x, k: x - target, 0.1, 50)
    assert x.isfinite().all()
    print("Python", platform.python_version(), "torch", torch.__version__)
"""
# How each extra shows that it is there.
EXTRAS = {
    "lab": ["-m", "decentlam", "topology", "ring", "-n", "4"],
    "lightning": ["-c", "import decentlam.integrations.lightning"],
    "huggingface": ["-c", "import decentlam.integrations.huggingface"],
    "ray": ["-c", "import decentlam.integrations.ray"],
}


@dataclass(frozen=True)
class Trial:
    python: str
    torch: str  # "newest", or a version
    package: Path
    extra: str | None = None

    @property
    def name(self) -> str:
        kind = "sdist" if self.package.suffix == ".gz" else "wheel"
        extra = f"[{self.extra}]" if self.extra else ""
        return f"Python {self.python}, torch {self.torch}, {kind}{extra}"


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        **options,
    )  # type: ignore[call-overload, no-any-return]


def oldest_torch() -> str:
    """The lower bound that pyproject.toml claims."""
    claimed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (each.partition(">=")[2] for each in claimed if each.startswith("torch"))
    return f"{bound}.0"


def build() -> tuple[Path, Path]:
    done = run(*UV, "build", "--out-dir", PLACE, ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    (wheel,), (sdist,) = PLACE.glob("*.whl"), PLACE.glob("*.tar.gz")
    return wheel, sdist


def attempt(trial: Trial, interpreter: str, tests: bool) -> str:
    """ "ok" with what ran, or the end of what went wrong."""
    place = PLACE / "environment"
    shutil.rmtree(place, ignore_errors=True)
    python = place / "bin" / "python"
    extra = f"[{trial.extra}]" if trial.extra else ""
    wanted = [f"decentlam{extra} @ {trial.package.as_uri()}"]
    if trial.torch != "newest":
        wanted.append(f"torch=={trial.torch}")
    wanted += ["pytest", "pytest-timeout"] if tests else []
    own = ["--no-binary", "decentlam"] if trial.package.suffix == ".gz" else []
    script = PLACE / "smoke.py"
    script.write_text(SMOKE)
    steps: list[list[str | Path]] = [
        [*UV, "venv", "--python", interpreter, place],
        [*UV, "pip", "install", "--python", python, "--only-binary", ":all:", *own, *wanted],
        [python, script],
        [python, "-m", "decentlam.launch", "-n", "2", script],
    ]  # fmt: skip
    if trial.extra in EXTRAS:
        steps.append([python, *EXTRAS[trial.extra]])
    if tests:
        steps.append([python, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                      *(ROOT / "tests" / name for name in TESTS)])  # fmt: skip
    said = ""
    for step in steps:
        done = run(*step, cwd=PLACE)
        if done.returncode:
            return f"FAILED: {' '.join(map(str, step[:4]))}\n{(done.stdout + done.stderr)[-3000:]}"
        said = done.stdout.strip().splitlines()[-1] if step[1] == script else said
    return f"ok ({said}{', tests' if tests else ''})"


def find(python: str) -> str:
    """The path of this Python, or nothing if it is not here.

    pyenv's shims are in the PATH for every version, and work for the chosen one alone. So the
    directories that they stand for go first.
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [*map(str, sorted(root.glob(f"versions/{python}.*/bin"))), os.environ["PATH"]]
    env = {**os.environ, "PATH": ":".join(places)}
    return run(*UV, "python", "find", "--no-project", python, env=env).stdout.strip()


def trials(python: str, wheel: Path, sdist: Path, extras: bool) -> list[Trial]:
    found = [Trial(python, "newest", wheel)]
    if python == PYTHONS[0]:  # the oldest with the oldest; and what needs to be tried once
        found += [Trial(python, oldest_torch(), wheel), Trial(python, "newest", sdist)]
        if extras:
            names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            found += [
                Trial(python, "newest", wheel, each) for each in names["optional-dependencies"]
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", choices=PYTHONS)
    parser.add_argument("--extras", action="store_true", help="try each extra, too")
    parser.add_argument("--tests", action="store_true", help="run the tests of the core, too")
    options = parser.parse_args()
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    wheel, sdist = build()
    failed = False
    for python in options.python or PYTHONS:
        interpreter = find(python)
        if not interpreter:
            print(f"Python {python}: absent, not tried; `uv python install {python}` brings it")
            continue
        for trial in trials(python, wheel, sdist, options.extras):
            result = attempt(trial, interpreter, options.tests)
            failed |= not result.startswith("ok")
            print(f"{trial.name}: {result}", flush=True)
    shutil.rmtree(PLACE / "environment", ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Thousands of inputs that nobody meant: each is taken, or refused in a sentence; none crashes.

    python -m tests.fuzzing --inputs 2000 --seed 0

Every input is made from the seed and its number, so that one that fails can be tried again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import math
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

import decentlam
from decentlam.lab.commands.app import app
from decentlam.lab.data import load
from decentlam.lab.detection import load_boxes
from tests.helpers.checkpoints import build_run, same_tensors, tensors, trained_run
from tests.helpers.quadratic import CLASSES
from tests.lab.data import images
from tests.lab.detection import boxes
from tests.lab.report import written_runs
from tests.lab.report.test_nodes import record, write_nodes

REFUSALS = (ValueError, TypeError, OSError, decentlam.CheckpointError, decentlam.LaunchError)
LARGE = 10**30
WORDS = ["", "x", "nan", "-inf", "1e400", "-1", "0", "1", "2", "3", "0.5", "1.5", "1e-300", "٣",
         "0x10", "True", "none", "9" * 30, "ring", "decentlam", "--", "mu=0.5"]  # fmt: skip
VALUES = [None, True, False, 0, 1, 2, -1, LARGE, 10**400, 0.5, -0.5, 1e308, math.nan, math.inf, "",
          "x", "none", "auto", "no", b"x", [], [1], {}, (), object(), 1j, torch.tensor(0.5),
          torch.tensor([1.0, 2.0]), torch.float16, torch.bfloat16, int]  # fmt: skip


class Fuzz:
    """A kind of input each; True: taken, False: refused. Anything raised is a find."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sound = place / "sound"
        decentlam.save_checkpoint(self.sound, **trained_run().parts())
        self.saved = tensors(trained_run())
        self.run = written_runs.write_run(place / "run")
        write_nodes(
            self.run, *(record(k, step, time=2e9 + step) for k in (0, 1) for step in (1, 2))
        )
        self.voc = boxes.write_voc(place / "voc").parent.parent
        self.coco = boxes.write_coco(place / "coco")
        self.folder = images.write_image_folder(place / "folder")
        self.kinds: dict[str, Callable[[random.Random], bool]] = {
            "command line": self.command,
            "options of an optimizer": self.options,
            "arguments of simulate": self.simulate,
            "topologies": self.topologies,
            "damaged checkpoints": self.checkpoint,
            "damaged run directories": self.directory,
            "damaged data": self.data,
        }

    # The command line ---------------------------------------------------------------------------

    def command(self, rng: random.Random) -> bool:
        name, *given = rng.choice(
            [
                ["topologies"],
                ["topology", "ring"],
                ["topology"],
                ["simulate", "decentlam", "ring", "--steps", "2"],
                ["predict", "--parameters", "1000", "--compute-ms", "10"],
                ["train", "--simulate", "--epochs", "0.01", "-n", "2", "--quiet"],
                ["report"],
                ["recipes"],
                ["nothing"],
                [],
            ]
        ) or [""]
        known = typer.main.get_command(app).commands.get(name)  # type: ignore[attr-defined]
        options = [o for p in known.params for o in p.opts if o[0] == "-"] if known else ["--json"]
        options = [o for o in options if o not in ("--watch", "--elastic")]  # these take long
        for _ in range(rng.randrange(3)):
            given += [rng.choice(options), rng.choice(WORDS)][: rng.choice([1, 2, 2, 2])]
        out = ["--out", str(self.place / "out")] if name in ("train", "report") else []
        return self.call([name, *given, *out])

    def call(self, arguments: list[str]) -> bool:
        """What `decentlam` does with them; it must end by itself, in a line if it refuses."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                app(arguments, prog_name="decentlam")
        except SystemExit as end:
            assert end.code in (None, 0) or err.getvalue().strip(), "refused without a word"
            return end.code in (None, 0)
        finally:
            shutil.rmtree(self.place / "out", ignore_errors=True)
        return True

    # The library --------------------------------------------------------------------------------

    def options(self, rng: random.Random) -> bool:
        names = ["lr", "momentum", "weight_decay", *decentlam.options.Options.__annotations__]
        names += ["nesterov", "process_group"]
        given = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(1, 2))}
        group = {rng.choice(names[:3]): rng.choice(VALUES)} if rng.random() < 0.3 else {}
        kind = rng.choice([*CLASSES.values()])
        model = torch.nn.Linear(2, 1)

        def build() -> None:
            params = [{"params": list(model.parameters()), **group}]
            optimizer = kind(params, **{"lr": 0.1, **given})
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            for p in model.parameters():
                assert p.isfinite().all() or "lr" in given or group, "taken, and the model is NaN"

        return taken(build)

    def simulate(self, rng: random.Random) -> bool:
        given: dict[str, Any] = {"algorithm": rng.choice(list(decentlam.ALGORITHMS))}
        given |= {"topology": "ring", "x0": torch.zeros(4, 3), "gradient": lambda x, k: x}
        given |= {"lr": 0.1, "steps": 2}
        names = [*given, "momentum", "weight_decay", "nesterov", "tau", "trust", "layers"]
        given |= {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(1, 2))}
        if isinstance(given["steps"], int) and given["steps"] > 9:  # as long as it was asked for
            given["steps"] = 9
        return taken(lambda: decentlam.simulate(**given))

    def topologies(self, rng: random.Random) -> bool:
        def build() -> None:
            if rng.random() < 0.3:
                rows = [[rng.choice([0, 0.5, 1, *VALUES]) for _ in range(2)] for _ in range(2)]
                decentlam.topology.from_weights(rows, directed=rng.choice([True, False, "x"]))
            elif rng.random() < 0.5:
                edges = [tuple(rng.choice([0, 1, 2, *VALUES]) for _ in range(2)) for _ in range(3)]
                decentlam.topology.from_edges(rng.choice([3, *VALUES]), edges)
            else:
                made = rng.choice([*decentlam.TOPOLOGIES.values()])(rng.choice([*VALUES, 7, 8]))
                made.weights(rng.choice([0, 1, *VALUES]))

        return taken(build)

    # Files --------------------------------------------------------------------------------------

    def checkpoint(self, rng: random.Random) -> bool:
        copy = self.copied(self.sound)
        damage(rng, [file for file in copy.rglob("*") if file.is_file()])
        run = build_run("decentlam")

        def build() -> None:
            found = decentlam.load_checkpoint(copy, **run.parts())
            assert found.step == 3, "a damaged file changed the step"
            same = same_tensors(tensors(run), self.saved)
            assert same, "a damaged file changed the run"

        return taken(build)

    def directory(self, rng: random.Random) -> bool:
        copy = self.copied(self.run)
        files = ("run.json", "records.jsonl", "nodes/0.jsonl", "nodes/1.jsonl")
        damage(rng, [copy / name for name in files if rng.random() < 0.7])
        if rng.random() < 0.5:
            return self.call(["report", str(copy), "--out", str(self.place / "out")])
        wrong = ["--resume", "--simulate", "--quiet", "--lr", "0.123"]  # not to train for long
        return self.call(["train", *wrong, "--out", str(copy)])

    def data(self, rng: random.Random) -> bool:
        name, source = rng.choice(
            [("voc", self.voc), ("coco", self.coco), ("imagenet", self.folder)]
        )
        copy = self.copied(source)
        damage(rng, sorted(file for file in copy.rglob("*") if file.is_file()))

        def read() -> None:
            if name == "imagenet":
                data = load(name, copy)
                data.train_batch(torch.arange(len(data.labels)), torch.Generator())
            else:
                data = load_boxes(name, copy, 32)
                for _ in data.test_batches(0):
                    pass

        return taken(read)

    def copied(self, source: Path) -> Path:
        copy = self.place / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(source, copy))


def taken(work: Callable[[], object]) -> bool:
    try:
        work()
    except REFUSALS as error:
        assert len(str(error).split()) > 3, f"refused with {error!r}, which says nothing"
        return False
    return True


def damage(rng: random.Random, files: list[Path]) -> None:
    """Flips, cuts, repeats, empties or removes bytes of one of the files."""
    if not files:
        return
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(7)
    if how == 0:
        file.unlink()
        return
    if how == 1:
        del data[at:]
    elif how == 2:
        data[at:at] = rng.randbytes(rng.randint(1, 9))
    elif how == 3:
        data = bytearray(rng.choice([b"", b"{}", b"[]", b"null", b"\x80\x04.", b"[" * 5000, b"3"]))
    elif how == 4:
        data += data[at:]
    else:
        for _ in range(rng.choice([1, 1, 1, 8])):
            data[rng.randrange(max(1, len(data)))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def fuzz(inputs: int, seed: int = 0) -> tuple[dict[str, collections.Counter[str]], list[str]]:
    """How many inputs of each kind were taken and refused, and what went wrong."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    finds: list[str] = []
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),  # some of them write where they are
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        fuzzer = Fuzz(Path(place))
        for number in range(inputs):
            kind = list(fuzzer.kinds)[number % len(fuzzer.kinds)]
            try:
                found = fuzzer.kinds[kind](random.Random(f"{seed} {number}"))
                counts[kind]["taken" if found else "refused"] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                counts[kind]["crashed"] += 1
                finds.append(f"input {number} of seed {seed}, {kind}:\n{traceback.format_exc()}")
    return counts, finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts, finds = fuzz(given.inputs, given.seed)
    print(*finds, sep="\n")
    columns = ("inputs", "taken", "refused", "crashed")
    print(f"{'kind of input':<26}" + "".join(f"{name:>9}" for name in columns))
    total = collections.Counter[str]()
    for kind, found in [*counts.items(), ("all", total)]:
        total += found if kind != "all" else collections.Counter()
        row = [found.total(), *(found[name] for name in columns[1:])]
        print(f"{kind:<26}" + "".join(f"{value:>9}" for value in row))
    print(json.dumps({"seed": given.seed, "torch": torch.__version__}))
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())

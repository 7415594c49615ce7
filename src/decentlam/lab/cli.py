"""The command line: look at methods and topologies, reproduce the paper's studies, try one run.

Commands import what they need when they run: help and typos must not take as long as torch does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import decentlam
from decentlam.lab.names import ALGORITHMS, STUDIES, TOPOLOGIES
from decentlam.lab.predict import predict
from decentlam.lab.terminal import Commands, console, one_of, print_json, print_table, progress
from decentlam.lab.train_command import recipes, train

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Nodes = Annotated[int, typer.Option("-n", "--nodes", help="Number of nodes.")]
Seed = Annotated[int, typer.Option(help="Equal seeds give equal results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"decentlam {decentlam.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decentralized training: each node averages with a few neighbors every step.

    \b
    New here? In this order:
      decentlam reproduce regression     ten methods on one problem, with tables and plots
      decentlam algorithms               what each method computes
      decentlam topology mesh -n 8       who talks to whom, and how fast they agree
      decentlam reproduce bias           why momentum hurts DmSGD and not DecentLaM
      decentlam reproduce speedup        what more nodes buy
      decentlam simulate decentlam ring  one run with your own numbers
      decentlam recipes                  what can be trained
      decentlam train --recipe digits    a model on 4 processes of this machine
      decentlam report out/train/digits  its page
      decentlam predict --compute-ms 90  the time of an iteration on your cluster

    --help after a command lists its options. To train your own model, see the README: the
    optimizers are drop-in replacements for torch.optim.SGD.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the methods and their recursions."""
    from decentlam.lab import catalogue

    rows = catalogue.algorithms()
    if as_json:
        return print_json(rows)
    for row in rows:
        console().print(f"{row['name']:<12}{row['summary']}\n{'':<12}{row['recursion']}")
    console().print("\nx: model, g: gradient, W: weights of the topology, +: after the step")


@app.command()
def topologies(nodes: Nodes = 8, as_json: Json = False) -> None:
    """List the topologies, with rho and messages for so many nodes."""
    from decentlam.lab import catalogue

    rows = catalogue.topologies(nodes)
    if as_json:
        return print_json(rows)
    keys = ("name", "rho", "messages", "symmetric", "summary")
    print_table([{key: row[key] for key in keys} for row in rows])
    console().print(
        f"\nWith {nodes} nodes. rho: the share of the disagreement that a step keeps, smaller is "
        "faster; messages: the most that a node sends in a step."
    )


@app.command()
def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TOPOLOGY", help="One of `decentlam topologies`.", callback=one_of(TOPOLOGIES)
        ),
    ],
    nodes: Nodes = 8,
    steps: Annotated[int, typer.Option(help="Show this many steps; weights may change.")] = 1,
    lazy: Annotated[
        float | None, typer.Option(metavar="T", help="Mix at rate T: (1-T) I + T W.")
    ] = None,
    message_bytes: Annotated[int, typer.Option(help="Size of the model.")] = 100_000_000,
    out: Annotated[Path | None, typer.Option(help="Draw the graph to this PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Show a topology: weights, spectrum, messages; draw it with --out."""
    from decentlam.lab import catalogue
    from decentlam.topology import resolve

    network = resolve(name, nodes)
    network = network if lazy is None else network.lazy(lazy)
    facts = catalogue.topology(network, steps, message_bytes)
    if out is not None:
        from decentlam.lab import draw
        from decentlam.lab.study import save

        facts["drawing"] = str(save(draw.draw(network, steps if steps > 1 else None), out))
    if as_json:
        return print_json(facts)
    console().print(catalogue.describe(facts))


@app.command()
def reproduce(
    study: Annotated[
        str, typer.Argument(help=f"One of {', '.join(STUDIES)}.", callback=one_of(STUDIES))
    ],
    out: Annotated[Path | None, typer.Option(help="Run directory; default out/STUDY.")] = None,
    seed: Seed = 0,
    nodes: Annotated[
        int | None, typer.Option("-n", "--nodes", help="Nodes; in speedup, the most.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and points.")] = False,
    data: Annotated[
        str | None, typer.Option(help="Train on this instead of Fashion-MNIST.")
    ] = None,
    data_path: Annotated[
        str | None, typer.Option(help="Where it is; Fashion-MNIST has a usual place.")
    ] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="runtime without emulated links; needs no root.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a study of the paper: a table here, records and plots in the run directory."""
    from decentlam.lab import studies
    from decentlam.lab.study import perform

    chosen = studies.STUDIES[study]
    given = {"data": data, "data_path": data_path}
    where: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if where and (quick or not chosen.resumable):
        why = (
            "--quick makes do with data of its own"
            if chosen.resumable
            else f"{study} reads no data"
        )
        raise ValueError(f"{why}; leave --data and --data-path out")
    if loopback and study != "runtime":
        raise ValueError(f"--loopback is for runtime; {study} emulates no network, leave it out")
    where |= {"loopback": True} if loopback else {}
    recipe = chosen.recipe(nodes=nodes, seed=seed, quick=quick, **where)
    with progress(study) as tick:
        result = perform(chosen, recipe, out or Path("out") / study, tick)
    files = [str(path) for path in result.files]
    if as_json:
        return print_json(
            {"study": study, "table": result.table, "notes": result.notes, "files": files}
        )
    console().print(f"{study}: {chosen.summary}\n")
    print_table(result.table)
    console().print("\n" + "\n".join([*result.notes, "", "Wrote:", *(f"  {f}" for f in files)]))


app.command()(recipes)
app.command()(train)
app.command()(predict)


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIRECTORY...", help="Runs of `train`, or studies.")
    ],
    out: Annotated[Path | None, typer.Option(help="Default DIRECTORY/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page about one or more training runs."""
    from decentlam.lab.report import write

    page = write(directories, out or directories[0] / "report.html")
    if as_json:
        return print_json({"report": str(page)})
    console().print(f"Wrote {page}")


@app.command()
def simulate(
    method: Annotated[
        str, typer.Argument(help="One of `decentlam algorithms`.", callback=one_of(ALGORITHMS))
    ],
    network: Annotated[
        str,
        typer.Argument(
            metavar="TOPOLOGY", help="One of `decentlam topologies`.", callback=one_of(TOPOLOGIES)
        ),
    ],
    nodes: Nodes = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.001,
    momentum: Annotated[float, typer.Option(help="beta of the method.")] = 0.8,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 600,
    sigma: Annotated[float, typer.Option(help="Gradient noise, E|noise|^2 = sigma^2.")] = 0.0,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Plot the error to this PNG or SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Run one method on the paper's linear regression, with your own numbers."""
    from decentlam.analysis.stability import growth
    from decentlam.lab.problems import linear_regression
    from decentlam.lab.studies.regression import TARGET, closed_form_error, steps_to, trace
    from decentlam.topology import resolve

    problem = linear_regression(nodes, seed=seed)
    topology = resolve(network, nodes)
    gradient = problem.noisy(sigma, seed) if sigma else None
    errors, x = trace(problem, method, topology, lr, momentum, steps, gradient)
    facts: dict[str, Any] = {
        "method": method,
        "topology": topology.name,
        "final_error": errors[-1],
        "closed_form": closed_form_error(problem, method, topology, lr, momentum),
        f"steps_to_{TARGET:g}": steps_to(errors, TARGET),
        "disagreement": (x - x.mean(0)).square().sum(1).mean().sqrt().item(),
    }
    warning = None
    rate = 0.0 if topology.static else growth(method, topology, momentum)
    if rate > 1:
        warning = (
            f"{method} with momentum {momentum:g} multiplies the disagreement by {rate:.3f} per "
            "step on these changing weights. Try less momentum, a static topology, or qg-dmsgd."
        )
    elif not errors[-1] <= errors[0]:
        warning = "The error grew. Try a smaller --lr or --momentum."
    if out is not None:
        from decentlam.lab import plots
        from decentlam.lab.study import save

        curve = [
            {"kind": "curve", "method": method, "step": step, "error": error}
            for step, error in enumerate(errors)
        ]
        save(plots.convergence(curve, f"{topology!r}, lr {lr:g}, momentum {momentum:g}"), out)
    if as_json:
        return print_json(facts | {"plot": out and str(out), "warning": warning})
    print_table([facts])
    if warning:
        console().print(f"\n{warning}")
    if out is not None:
        console().print(f"\nWrote {out}")

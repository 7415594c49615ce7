"""The command line: look at methods and topologies, reproduce the paper's studies, train.

Commands import what they need when they run: help and typos must not take as long as torch does.
"""

from __future__ import annotations

from typing import Annotated

import typer

import decentlam
from decentlam.lab.commands.lists import algorithms, recipes, topologies
from decentlam.lab.commands.predict import predict
from decentlam.lab.commands.report import report
from decentlam.lab.commands.reproduce import reproduce
from decentlam.lab.commands.simulate import simulate
from decentlam.lab.commands.topology import topology
from decentlam.lab.commands.train import train
from decentlam.lab.commands.watch import watch
from decentlam.lab.terminal import Commands

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
      decentlam reproduce regression     twelve methods on one problem, with tables and plots
      decentlam algorithms               what each method computes
      decentlam topology mesh -n 8       who talks to whom, and how fast they agree
      decentlam reproduce bias           why momentum hurts DmSGD and not DecentLaM
      decentlam simulate decentlam ring  one run with your own numbers
      decentlam recipes                  what can be trained
      decentlam train --recipe digits    a model on 4 processes of this machine
      decentlam watch                    the newest run while it trains, as a page
      decentlam report                   the page of the newest run, afterwards
      decentlam predict --compute-ms 90  the time of an iteration on your cluster

    --help after a command lists its options. To train your own model, see the README: the
    optimizers are drop-in replacements for torch.optim.SGD.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (
    *(algorithms, topologies, topology, reproduce, recipes),
    *(train, watch, report, predict, simulate),
):
    app.command()(command)

"""``python -m paro_advise.runtime.lab``: runs a command on every node of an emulated cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paro_advise.errors import ParoAdviseError
from paro_advise.runtime.lab import Isolation, Lab, LabSpec


@click.command(context_settings={"ignore_unknown_options": False, "max_content_width": 100})
@click.option("--nodes", default=2, show_default=True, help="Nodes.")
@click.option("--ranks-per-node", default=2, show_default=True, help="Processes per node (torchrun).")
@click.option("--port-mbit", default=400.0, show_default=True, help="Rate of each node's port, 1e6 bits/s.")
@click.option("--slow-node", type=int, help="Node with a slower port.")
@click.option("--slow-port-mbit", type=float, help="Its rate.")
@click.option("--slow-rank", type=int, help="Global rank that is slowed.")
@click.option("--slow-factor", default=1.3, show_default=True, help="How many times longer its work takes.")
@click.option(
    "--isolation", type=click.Choice([item.value for item in Isolation]), help="Demand it.  [default: the best]"
)
@click.option(
    "--logs", type=click.Path(path_type=Path), default=Path("lab-logs"), show_default=True, help="Log folder."
)
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds until everything is ended.")
@click.argument("command", nargs=-1, required=True)
def main(
    *, command: tuple[str, ...], isolation: str | None, logs: Path, timeout_s: float, **spec: float | None
) -> None:
    """Run COMMAND on every node of an emulated cluster.

    \b
    Examples:
      python -m paro_advise.runtime.lab --nodes 4 --port-mbit 400 -- torchrun train.py
      python -m paro_advise.runtime.lab --nodes 2 -- ip address
    """
    try:
        with Lab(LabSpec(**spec), Isolation(isolation) if isolation else None) as lab:  # type: ignore[arg-type]  # click checks
            if lab.isolation == Isolation.LOOPBACK:
                click.echo(
                    f"lab: the ports are NOT limited, all ranks share loopback ({lab.reason or 'as asked'})", err=True
                )
            result = lab.run(command, logs, timeout_s=timeout_s)
    except ParoAdviseError as error:
        click.echo("\n".join(error.lines()), err=True)
        sys.exit(error.exit_code)
    for node in result.nodes:
        click.echo(f"lab: node {node.node}: exit {node.returncode}, log {node.log}", err=True)
    if result.timed_out:
        click.echo(f"lab: ended after {timeout_s:g} s", err=True)
    codes = [node.returncode for node in result.nodes if node.returncode]
    # Like a shell: 128 and the signal's number for a node that a signal ended.
    sys.exit(0 if result.ok else next((code if code > 0 else 128 - code for code in codes), 1))


if __name__ == "__main__":
    main()

"""``paro-advise demo``: the whole loop on this machine."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.errors import TrainingError, UsageError, WouldOverwriteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paro_advise.runtime.lab import Lab

_NODES, _RANKS_PER_NODE, _PORT_MBIT = 4, 2, 400.0
_MODEL = {"width": 160, "layers": 6, "vocabulary": 1024, "sequence": 32, "batch": 1}
_WORK = {"micro-batches": 4, "steps": 14}
_FIRST, _END = 6, 8  # profiled steps
_STEPS = f"{_FIRST}:{_END}"
_TIMEOUT_S = 600.0


@click.command("demo", short_help="The whole loop on this machine: capture, recommend, run, compare.")
@click.option("-o", "--output", "folder", default="paro-demo", show_default=True, metavar="DIR", help="Output folder.")
@click.option("--script", metavar="FILE", help="A training script.  [default: a small transformer]")
@click.option("--force", is_flag=True, help="Replace an earlier demo.")
def command(*, folder: str, script: str | None, force: bool) -> int:
    """Train a small transformer with FSDP2 on an emulated cluster of 4 nodes, find out what limits it, run the
    unchanged script under the recommended plan, and compare.

    Takes some minutes on two cores. The ports of the nodes are limited to 400 Mbit/s where the machine allows
    it; where it does not, everything goes over loopback, and it is said.

    \b
    Example:
      paro-advise demo -o demo
    """
    from paro_advise.runtime.capture.request import CaptureRequest
    from paro_advise.runtime.job import PLAN_VARIABLE
    from paro_advise.runtime.lab import Lab, LabSpec
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    refuse_remote_folder(folder, "-o")
    root = Path(folder)
    if root.exists() and any(root.iterdir()) and not force:
        raise WouldOverwriteError("a demo needs a folder of its own, this one holds files", where=folder,
                                  hint="name another one with -o, or pass --force")  # fmt: skip
    training = Path(script) if script else _example()
    if not training.is_file():
        raise UsageError("--script must name a file", where=str(training))
    plan = root / "plan.json"
    spec = LabSpec(nodes=_NODES, ranks_per_node=_RANKS_PER_NODE, port_mbit=_PORT_MBIT)
    with Lab(spec) as lab:
        limits = f"ports of {_PORT_MBIT:g} Mbit/s" if not lab.reason else f"NO limited ports ({lab.reason})"
        _say(f"a cluster of {_NODES} nodes with {_RANKS_PER_NODE} ranks each on this machine, {limits}")
        work = f"{_WORK['steps']} steps, {_END - _FIRST} of them profiled"
        _say(f"training {training.name} with unmodified FSDP2, {work} ...")
        before = CaptureRequest.of(root / "before", _STEPS).to_environment()
        _train(lab, training, root / "before", before)
        _verb("analyze", root / "before", "-o", root / "before.html", "--force", "-q")
        _verb("recommend", root / "before", "-o", plan, "--redundancy-budget", _budget(), "--force", "-q")
        _say("training the same script under the plan ...")
        after = CaptureRequest.of(root / "after", _STEPS).to_environment()
        _train(lab, training, root / "after", {**after, PLAN_VARIABLE: str(plan.absolute())})
    report = root / "report.html"
    code = _verb(
        *("compare", root / "before", root / "after", "--plan", plan, "-o", report),
        *("--json", root / "comparison.json", "--markdown", root / "ticket.md", "--force", "-q"),
    )
    _say(f"report: {report}")
    click.echo(
        "\nOn your own cluster:\n"
        "  paro-advise capture -o before -- torchrun ... train.py\n"
        "  paro-advise recommend before -o plan.json --device-memory 80GiB\n"
        "  paro-advise run --plan plan.json --capture after -- torchrun ... train.py\n"
        "  paro-advise compare before after --plan plan.json -o report.html"
    )
    return code


def _budget() -> str:
    """Return half of what plain data parallelism would hold beyond GGG, by the example's parameters."""
    width, layers, vocabulary = _MODEL["width"], _MODEL["layers"], _MODEL["vocabulary"]
    norm = 2 * width
    block = 2 * norm + (3 * width * width + 3 * width) + (width * width + width) + (8 * width * width + 5 * width)
    parameters = 2 * vocabulary * width + layers * block + norm
    # fp32 parameters, gradients and two moments, of which GGG keeps one share in all ranks.
    return f"{16 * parameters * (1 - 1 / (_NODES * _RANKS_PER_NODE)) / 2:.0f}B"


def _example() -> Path:
    """Return the training script that ships with the package."""
    from paro_advise.runtime import lab

    return Path(lab.__file__).parent / "train.py"


def _train(lab: Lab, script: Path, traces: Path, environment: Mapping[str, str]) -> None:
    """Train once on all nodes.

    Raises:
        TrainingError: a node failed.
    """
    from paro_advise.advisor.commands.jobs.capture_folder import replacing_capture
    from paro_advise.runtime.job import job_environment

    changed = job_environment({}, environment)
    arguments = [word for name, value in (_MODEL | _WORK).items() for word in (f"--{name}", str(value))]
    begin = time.monotonic()
    with replacing_capture(traces, force=True):
        result = lab.run(
            ["torchrun", str(script.resolve()), *arguments],
            traces / "logs",
            timeout_s=_TIMEOUT_S,
            environment=changed,
        )
    if not result.ok:
        log = result.nodes[0].log
        tail = log.read_text(errors="replace").strip().splitlines()[-12:]
        raise TrainingError("training failed on a node:\n" + "\n".join(tail), where=str(log))
    _say(f"done in {time.monotonic() - begin:.0f} s")


def _verb(*words: object) -> int:
    """Run a verb as a user would, and show it."""
    from paro_advise.advisor.cli import cli

    texts = [str(word) for word in words]
    click.secho(f"\n$ paro-advise {shlex.join(texts)}", bold=True)
    found = cli.main(texts, prog_name="paro-advise", standalone_mode=False)
    return found if isinstance(found, int) else 0


def _say(text: str) -> None:
    click.echo(f". {text}", err=True)

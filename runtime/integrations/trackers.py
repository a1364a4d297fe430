"""Experiment trackers that a script uses already: what came of a run is kept there as well.

A tracker is found by its module being imported and a run being open; none is imported or started here.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.runtime.messages import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Writer: TypeAlias = Callable[[Mapping[str, float]], object]  # takes figures by name


def keep(files: Sequence[Path], figures: Mapping[str, float], writers: Sequence[Writer] = ()) -> list[str]:
    """Give files and figures to Weights & Biases and MLflow where a run is open, and figures to ``writers``.

    A tracker that fails is told on stderr; the others still get theirs.

    Returns:
        Names of the trackers that took them.
    """
    kept = []
    ways: list[tuple[str, Callable[[], bool]]] = [
        ("Weights & Biases", partial(_to_wandb, files, figures)),
        ("MLflow", partial(_to_mlflow, files, figures)),
        *((_name_of(writer), partial(_to_writer, writer, figures)) for writer in writers),
    ]
    for name, give in ways:
        try:
            if give():
                kept.append(name)
        except Exception as error:  # noqa: BLE001 - a tracker must never end a training job
            tell(f"{name} took no report: {type(error).__name__}: {error}")
    return kept


def to_tensorboard(writer: object, step: int = 0) -> Writer:
    """Return what writes figures to a ``SummaryWriter``.

    Args:
        writer: torch's or tensorboardX's.
        step: that the figures stand at.
    """

    def write(figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)  # type: ignore[attr-defined]  # both classes have it, neither has a type

    write.__qualname__ = "TensorBoard"
    return write


def _name_of(writer: Writer) -> str:
    return str(getattr(writer, "__qualname__", type(writer).__name__))


def _to_writer(writer: Writer, figures: Mapping[str, float]) -> bool:
    writer(figures)
    return True


def _to_wandb(files: Sequence[Path], figures: Mapping[str, float]) -> bool:
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if wandb is None or run is None:
        return False
    artefact = wandb.Artifact(f"paro-advise-{run.id}", type="report")
    for file in files:
        artefact.add_file(str(file))
    run.log_artifact(artefact)
    run.summary.update(dict(figures))
    return True


def _to_mlflow(files: Sequence[Path], figures: Mapping[str, float]) -> bool:
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or mlflow.active_run() is None:
        return False
    for file in files:
        mlflow.log_artifact(str(file), artifact_path="paro-advise")
    mlflow.log_metrics(dict(figures))
    return True

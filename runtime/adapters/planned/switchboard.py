"""How a running job takes a new plan: through a folder that it and ``paro-advise switch`` share.

Rank 0 looks for a request when a step ends, and tells the others through the job's store after which
step all take it. No rank can end the following step before rank 0 has passed its gradients on, and
thereby written to the store; a few steps of notice are left for hosts that run ahead of their devices.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from paro_advise.core.documents import to_json
from paro_advise.errors import OutputError, ParoAdviseError, SwitchError, TrainingError
from paro_advise.policies.plan import check_runnable, plan_from_json
from paro_advise.runtime.adapters.constants import NOTICE_STEPS
from paro_advise.runtime.adapters.planned.planned import check_like
from paro_advise.runtime.job import ANSWER, CURRENT, REQUEST, STATE
from paro_advise.runtime.messages import tell
from paro_advise.runtime.sharding.module import engine_of
from paro_advise.runtime.sharding.switching import switch
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from paro_advise.policies.plan import Plan


class Switchboard:
    """The running job's side.

    Args:
        folder: shared with ``paro-advise switch``; it need only be on rank 0's node, but all ranks must be given one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_taken = 0
        self._is_announced = False
        self._waiting: tuple[int, bytes] | None = None
        self._steps = 0

    def open(self, plan: Plan) -> None:
        """Announce that the job runs, and under which plan.

        Raises:
            OutputError: the folder cannot be written.
        """
        if dist.get_rank() != 0:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / REQUEST).unlink(missing_ok=True)
            (self._folder / ANSWER).unlink(missing_ok=True)
            self._keep(to_json(plan))
            self._write(STATE, {"pid": os.getpid(), "plan_id": plan.plan_id, "world_size": dist.get_world_size()})
        except OSError as error:
            raise OutputError(
                f"the folder of --job must be writable, got: {error.strerror or error}",
                where=str(self._folder),
                hint="make room there or give another folder; without --job the job runs and cannot be switched",
            ) from error

    def look(self) -> None:
        """Look for a request, or for one that rank 0 has announced, at the end of a step."""
        self._steps += 1
        store, key = job_store(), f"paro_switch_{self._num_taken}"
        if store.check([key]):
            step, _, plan = store.get(key).partition(b" ")
            self._waiting = (int(step), plan)
            self._num_taken += 1
            self._is_announced = False
        elif dist.get_rank() == 0 and not self._is_announced and (asked := self._request()) is not None:
            message = b"%d %s" % (self._steps + NOTICE_STEPS, asked)
            store.set(key, message)  # type: ignore[arg-type]  # torch takes bytes, its stub names str only
            self._is_announced = True

    def _request(self) -> bytes | None:
        """Take what `switch` has left, so that it is not met again; None for nothing that can be taken."""
        path = self._folder / REQUEST
        with suppress(OSError):  # training goes on whatever becomes of the folder; `switch` waits for an answer
            data = path.read_bytes()
            path.unlink()
            return data
        return None

    def take(self, model: nn.Module, before: Plan, *, is_alone: bool = True) -> Plan | None:
        """Switch if a request waits; a plan that cannot be used is answered with the reason and changes nothing.

        Args:
            model: sharded, between two steps.
            before: the plan in force.
            is_alone: no other model of the job is sharded.

        Raises:
            SwitchError: the switch failed half way; the job cannot go on.
        """
        if self._waiting is None or self._steps < self._waiting[0]:
            return None
        (_, data), self._waiting = self._waiting, None
        try:
            if not is_alone:
                raise TrainingError("a switch takes one model, this job trains several", hint="start it with the plan")
            plan = plan_from_json(data, REQUEST)
            check_like(plan, before)
            check_runnable(plan)
            chosen = plan.chosen
            size = chosen.group_size or engine_of(model).grid.group_size
            report = switch(model, chosen.triple, group_size=size)
        except SwitchError:
            raise
        except ParoAdviseError as error:
            reason = "\n".join(error.lines())
            self._answer({"error": reason}, reason)
            return None
        body = {
            "plan_id": plan.plan_id,
            "before": report.before,
            "after": report.after,
            "seconds": report.seconds,
            "peak_bytes": report.peak_bytes,
            "step": self._steps,  # the first under it, counted from 0
        }
        self._answer(body, f"switched {report.before} -> {report.after} in {report.seconds:.2f} s", in_force=data)
        return plan

    def _answer(self, body: Mapping[str, object], text: str, in_force: bytes | None = None) -> None:
        if dist.get_rank() != 0:
            return
        tell(text)
        try:
            if in_force is not None:
                self._keep(in_force)
            self._write(ANSWER, body)
        except OSError as error:
            tell(f"`switch` gets no answer, {self._folder} cannot be written: {error.strerror or error}")

    def _keep(self, plan: bytes) -> None:
        """Leave the plan that is in force, so that whoever gives the job another one can go back."""
        temporary = self._folder / f"{CURRENT}.part"
        temporary.write_bytes(plan)
        temporary.replace(self._folder / CURRENT)

    def _write(self, name: str, body: Mapping[str, object]) -> None:
        temporary = self._folder / f"{name}.part"
        temporary.write_text(json.dumps(body, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(self._folder / name)

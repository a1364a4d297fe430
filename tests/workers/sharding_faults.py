"""Trains, saves a checkpoint, and then loses a rank at a chosen point."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sharding_worker import Model, data, loss_of, optimizer_of, train_sharded, whole_parameters
from torch.distributed.checkpoint import FileSystemWriter

from paro_advise.runtime import latest_checkpoint, load_checkpoint, save_checkpoint, shard, switch
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure
from paro_advise.runtime.sharding.states import states

VICTIM = 2
# gloo's own. A rank that hangs shows by nothing but a timeout, so there it is shorter.
TIMEOUT, TIMEOUT_OF_HANG = timedelta(minutes=30), timedelta(seconds=30)


def die(*_):
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def stop(*_):
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)


def dying(function):
    def wrapped(*arguments, **options):
        die()
        return function(*arguments, **options)

    return wrapped


def arm(point, model):
    """Let the victim die when it comes to a point of the next step."""
    match point:
        case "forward":
            model.blocks[1].register_forward_pre_hook(die)
        case "backward":
            model.blocks[1].register_full_backward_hook(die)
        case "boundary":
            UnitProcedure.finish = dying(UnitProcedure.finish)
        case "step":
            UnitProcedure.publish = dying(UnitProcedure.publish)
        case "save":
            FileSystemWriter.write_data = dying(FileSystemWriter.write_data)
        case "switch":
            states.whole = dying(states.whole)
        case "hang":
            model.blocks[1].register_forward_pre_hook(stop)
        case "diverge":
            pass


def make():
    torch.manual_seed(0)
    model = Model()
    return shard(model, optimizer_of("adamw", model), "IIG", group_size=min(2, dist.get_world_size()))


def lose_a_rank(point, folder):
    model, optimizer = make()
    train_sharded(model, optimizer, range(2))
    save_checkpoint(folder / "good", model, extra={"whole": whole_parameters(model)})
    print("saved", flush=True)
    arm(point, model)
    if point == "save":
        save_checkpoint(folder / "lost", model)
    elif point == "switch":
        switch(model, "NIG")
    elif point == "diverge":
        switch(model, "NIG" if dist.get_rank() == VICTIM else "III")
    else:
        for step in range(2):  # not every rank exchanges something with the victim in the first one
            loss_of(model, data(step, 0, dist.get_rank())).backward()
            optimizer.step()
    print("went on", flush=True)


def load_all(folders):
    for folder in folders:
        torch.manual_seed(7)
        model = Model()
        model, optimizer = shard(model, optimizer_of("adamw", model), "NNG")
        path = latest_checkpoint(folder)
        empty = {name: torch.empty_like(value) for name, value in whole_parameters(model).items()}
        wanted = load_checkpoint(path, model, extra={"whole": empty})["whole"]
        assert path.name == "good"
        assert all(torch.equal(value, wanted[name]) for name, value in whole_parameters(model).items())
        train_sharded(model, optimizer, range(2, 3))
        print("loaded", flush=True)


def meet(folder):
    """Wait until every rank has started: on a busy machine that takes longer than any timeout."""
    (folder / f"started{os.environ['RANK']}").touch()
    while len(list(folder.glob("started*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


def main():
    point, *folders = sys.argv[1:]
    log = os.open(Path(folders[0]) / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    meet(Path(folders[0]))
    dist.init_process_group("gloo", timeout=TIMEOUT_OF_HANG if point == "hang" else TIMEOUT)
    torch.set_num_threads(1)
    if point == "load":
        load_all([Path(folder) for folder in folders])
    else:
        lose_a_rank(point, Path(folders[0]))


if __name__ == "__main__":
    main()

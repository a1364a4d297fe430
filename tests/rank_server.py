"""Forks the ranks of jobs from a process that has imported torch already: a job of four starts in a tenth of a second.

Started by ``ranks.py``. Each line of the input asks for a job in JSON; each line of the output answers with the exit
codes of its ranks.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import warnings

import numpy as np
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor  # noqa: F401 - what workers import

from paro_advise.runtime.launch.activation import activate

POLL_S = 0.01


def rank_of(job, rank, port):
    """Be a rank: run the script as Python would."""
    for number, (path, flags) in enumerate(
        (
            (os.devnull, os.O_RDONLY),
            (job["stdout"], os.O_WRONLY | os.O_APPEND),
            (job["stderr"], os.O_WRONLY | os.O_APPEND),
        )
    ):
        os.dup2(os.open(path, flags), number)
    count = str(job["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **job["environment"])
    random.seed()
    np.random.seed()
    for setting in filter(None, job["warnings"].split(",")):
        action, _, category = setting.partition("::")
        warnings.simplefilter(action, getattr(__builtins__, category) if category else Warning)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["script"])  # noqa: PTH120 - as Python sets it
    if job["environment"]:
        activate()  # what Python does at its start in a job of `paro-advise run`, when torch has been imported
    runpy.run_path(job["script"], run_name="__main__")
    sys.exit()


def finished(children, deadline):
    """Wait for all ranks; end the others when one fails or time is up. Return the exit codes."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            codes[ended] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(POLL_S)
        is_over = time.monotonic() > deadline
        if is_over or any(codes.values()):
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL if is_over else signal.SIGTERM)
    return [codes[child] for child in children]


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if not child:
                rank_of(job, rank, port)
            children.append(child)
        print(json.dumps(finished(children, time.monotonic() + job["timeout_s"])), flush=True)


if __name__ == "__main__":
    main()

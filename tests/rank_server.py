"""Forks the ranks of jobs from a process that has imported torch already: a job of four starts in a tenth of a second.

Started by ``ranks.py`` with the path of a socket. Whoever connects asks for a job in a line of JSON, and is answered
with the exit codes of its ranks; who leaves before ends it. The process ends when its input does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import runpy
import select
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

import paro_advise.runtime.adapters.session
import paro_advise.runtime.capture.recorder  # noqa: F401 - what plans need
from paro_advise.runtime.lab.ports import reserved_port
from paro_advise.runtime.launch.activation import activate

OF_A_JOB = re.compile("PARO_(?!ADVISE_)")  # variables by which `paro-advise` has a rank captured or planned
POLL_S = 0.01
GRACE_S = 30.0  # for ranks to end by themselves after one has failed


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
    os.setsid()  # so that what it starts ends with it
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"], OMP_NUM_THREADS="1")
    count = str(job["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    random.seed()
    np.random.seed()
    for setting in filter(None, job["warnings"].split(",")):
        action, _, category = setting.partition("::")
        warnings.simplefilter(action, getattr(__builtins__, category) if category else Warning)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["script"])  # noqa: PTH120 - as Python sets it
    if any(OF_A_JOB.match(name) for name in os.environ):
        activate()  # what Python does at its start in a job of `paro-advise run`, when torch has been imported
    runpy.run_path(job["script"], run_name="__main__")
    sys.exit()


def finished(children, deadline, asker, survivors):
    """Wait for all ranks; end the others when one fails, time is up or nobody waits. Return the exit codes.

    Where the job names survivors, these end by themselves, whatever others do, and who is left is ended after them.
    """
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            codes[ended] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(POLL_S)
        if survivors is not None and all(children[rank] in codes for rank in survivors):
            end(children, codes, signal.SIGKILL)
        if (survivors is None and any(codes.values())) or select.select([asker], [], [], 0)[0]:
            deadline = min(deadline, time.monotonic() + GRACE_S)
            end(children, codes, signal.SIGTERM)
        if time.monotonic() > deadline:
            end(children, codes, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return [codes[child] for child in children]


def end(children, codes, how):
    """Send the ranks that are left a signal."""
    for child in children:
        if child not in codes:
            os.kill(child, how)


def serve(asker):
    """Run one job, in a process between the server and its ranks."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job = json.loads(asker.makefile().readline())
    children = []
    with reserved_port() as port:
        for rank in range(job["ranks"]):
            child = os.fork()
            if not child:
                asker.close()
                rank_of(job, rank, port)
            children.append(child)
        codes = finished(children, time.monotonic() + job["timeout_s"], asker, job.get("survivors"))
    with contextlib.suppress(OSError):
        asker.sendall(json.dumps(codes).encode() + b"\n")
    os._exit(0)


def main():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what serves a job ends by itself
    gc.collect()
    gc.freeze()  # or each rank's collector walks through all that torch has loaded, and copies its pages
    print("ready", flush=True)
    while sys.stdin not in (ready := select.select([sys.stdin, listener], [], [])[0]):
        assert ready == [listener]
        asker, _ = listener.accept()
        if not os.fork():
            listener.close()
            serve(asker)
        asker.close()


if __name__ == "__main__":
    main()

"""A command that has ranks forked by ``rank_server.py``: python forked.py SOCKET RANKS SCRIPT [ARGUMENT ...].

It passes on what `paro-advise` has put into the environment, prints what the ranks print, and ends as they do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def ask(path, job):
    """Have a job run; return the exit codes of its ranks."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(path))
        server.sendall(json.dumps(job).encode() + b"\n")
        answer = server.makefile().readline()
    if not answer:
        raise RuntimeError("the process that forks ranks has ended")
    return json.loads(answer)


def code_of(codes):
    """Return the code of the first rank that failed; one that was ended because another had failed is not the cause."""
    own = [code for code in codes if code not in (0, -signal.SIGTERM)]
    return next((code for code in own if code > 0), next(iter(own), min(codes, default=0)))


def main():
    path, ranks, script, *arguments = sys.argv[1:]
    here = f"/proc/{os.getpid()}/fd"
    job = {
        "script": script,
        "arguments": arguments,
        "ranks": int(ranks),
        "warnings": "",
        "timeout_s": 540,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109 - without pathlib this starts at once
        "stdout": f"{here}/1",
        "stderr": f"{here}/2",
    }
    sys.exit(code_of(ask(path, job)))


if __name__ == "__main__":
    main()

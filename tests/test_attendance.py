"""The end of a job whose store lives in rank 0's process, as with ``env://`` outside torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from paro_advise.runtime.lab.ports import reserved_port

# Rank 1 is slow to ask what rank 0 said last; rank 0 ends at once, and the store with it.
JOB = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from paro_advise.runtime.adapters.planned.attendance import Attendance
from paro_advise.runtime.adapters.planned.script_collectives import ScriptCollectives
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(60))
collectives = ScriptCollectives()
collectives.install()
attendance = Attendance(collectives.sum_unattended)
collectives.attended = attendance.call
hear = attendance._hear
def late():
    time.sleep(2.0)
    return hear()
attendance._hear = late
dist.destroy_process_group()
"""


def test_rank_0_ends_after_all_have_heard_that_it_went_on():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    with reserved_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, str(rank), str(port)], env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said

"""Ranks on hosts, a letter each in the first argument: what `shard` finds a node to be, or why it refuses."""

from __future__ import annotations

import os
import socket
import sys

import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.shard import grid_of

hosts, local = sys.argv[1], sys.argv[2]
os.environ.pop("LOCAL_WORLD_SIZE")
if local != "unsaid":
    os.environ["LOCAL_WORLD_SIZE"] = local
dist.init_process_group("gloo")
socket.gethostname = lambda: hosts[dist.get_rank()]
try:
    found = grid_of(None, None, None).ranks_per_node
except UsageError as error:
    found = str(error)
print(found if dist.get_rank() == 0 else "", flush=True)
dist.destroy_process_group()

"""The store through which the ranks of a job meet, beside its collectives."""

from __future__ import annotations

import os

import torch.distributed as dist


def job_store() -> dist.distributed_c10d.Store:
    """Return it with keys of this attempt only: torchrun keeps one store when it restarts a job's ranks."""
    whole = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - has no public name
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.distributed_c10d.PrefixStore(f"paro_{attempt}", whole)

"""What ranks tell each other by keys of the job's store is heard in that attempt of the job only."""

from __future__ import annotations

import pytest


def test_a_restarted_job_does_not_hear_its_first_attempt(monkeypatch):
    """torchrun counts restarts in TORCHELASTIC_RESTART_COUNT, and keeps the store."""
    dist = pytest.importorskip("torch.distributed")
    from paro_advise.runtime.store import job_store

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job_store().set("point", "gather")
        assert job_store().get("point") == b"gather"
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert not job_store().check(["point"])
    finally:
        dist.destroy_process_group()

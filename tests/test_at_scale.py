"""What a strategy costs a rank of a large world: process groups, and where they come from.

No run here has 1,024 ranks: torch's fake backend stands for all others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = "NNN,NIG,IIG,GGG"


def groups_made(*words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/workers/at_scale.py"), STRATEGIES, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 2 * 2 * len(STRATEGIES.split(","))
    return found


def test_a_rank_makes_at_most_eight_groups_and_all_are_its_own():
    """Nothing grows with the 1,024 ranks: groups that others are of are not named here."""
    for name, calls in groups_made().items():
        assert 0 < len(calls) <= 8, name
        assert all(num_groups == 1 for num_groups, _ in calls), name


@pytest.mark.variant
def test_communicators_are_split_where_the_backend_can():
    """Each call then names all groups of a kind, which together hold every rank once."""
    for name, calls in groups_made("split").items():
        assert 0 < len(calls) <= 8, name
        assert all(holds_everyone for _, holds_everyone in calls), name

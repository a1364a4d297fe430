"""Whatever a training script does: equal to one process, or refused with a clear error; never a third outcome.

Programs are drawn from seeds; a failing one is run again by its seed, as the message says, and shrunk.
"""

from __future__ import annotations

import pytest
from conftest import ROOT
from loop import torchrun
from ranks import run_ranks

pytestmark = pytest.mark.distributed
OPERATIONS_EACH = 12
LAST_RESORT_S = 3600
KEPT: dict[int, list[str]] = {}  # by number of ranks
for line in (ROOT / "tests/data/third_outcomes.txt").read_text().splitlines():
    KEPT.setdefault(int(line.split()[0]), []).append(line.partition(" ")[2])


def run_programs(first, count, ranks):
    worker, numbers = ROOT / "tests/workers/differential.py", (first, count, OPERATIONS_EACH)
    done = run_ranks(worker, *numbers, ranks=ranks, timeout_s=LAST_RESORT_S)
    third = [line for line in done.stdout.splitlines() if " THIRD " in line or line.startswith("shrunk: ")]
    again = f"\nrun it again: {' '.join(torchrun(worker, *numbers, ranks=ranks)[1:])}"
    assert not third, "\n".join(third) + again
    assert done.returncode == 0, done.stderr[-3000:] + again
    outcomes = [line.split()[1] for line in done.stdout.splitlines() if line[:1].isdecimal()]
    assert len(outcomes) == count
    return outcomes


@pytest.mark.parametrize(
    ("first", "count", "ranks"), [pytest.param(0, 40, 2, marks=pytest.mark.variant), (100_000, 20, 4)]
)
def test_random_programs_train_equally_or_are_refused(first, count, ranks):
    outcomes = run_programs(first, count, ranks)
    assert outcomes.count("equal") > count / 2  # refusing everything is no way out


@pytest.mark.parametrize("ranks", sorted(KEPT))
def test_programs_that_once_had_a_third_outcome(ranks, tmp_path):
    """Shrunk: without any of its operations each of them was equal."""
    kept = KEPT[ranks]
    programs = tmp_path / "programs.txt"
    programs.write_text("\n".join(kept) + "\n")
    done = run_ranks(ROOT / "tests/workers/differential.py", programs, ranks=ranks, timeout_s=LAST_RESORT_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["equal"] * len(kept)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_programs(part):
    run_programs(1_000_000 + 100 * part, 100, 4 if part % 4 == 3 else 2)

"""What public scripts do around and inside their models trains as in their own framework, or is refused."""

from __future__ import annotations

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks

WORKER = ROOT / "tests/workers/script_habits.py"
# Changes of weights while FSDP2 has them gathered are lost in plain FSDP2, and count in plain DDP.
CHANGES = {
    "changes itself in forward",
    "changes itself plainly",
    "changes the root in forward",
    "changes the root before backward",
    "limits its embedding",
}
REFUSED = {
    ("ddp", "NNG"): {"sparse", "deals parameters out"},
    ("ddp", "IIG"): {*CHANGES, "sparse", "pickled", "deals parameters out", "penalizes gradients"},
    ("ddp", "GGG"): {*CHANGES, "sparse", "pickled", "deals parameters out", "penalizes gradients"},
    # FSDP1 gives zeros for what no rank used.
    ("fsdp1", "NNG"): {"changes itself in forward", "changes the root before backward", "trains while whole"},
    ("fsdp1", "IIG"): {"changes itself in forward", "changes the root before backward", "trains while whole"},
    ("fsdp2", "NNG"): CHANGES,
    ("fsdp2", "IIG"): set(),
}


def jobs_of(framework, plan=None):
    done = run_ranks(WORKER, framework, plan=plan, drift="parameter_count")
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    refused = {name for name, text in told.items() if text.startswith("refused")}
    numbers = {name: [float(word) for word in text.split()] for name, text in told.items() if name not in refused}
    return numbers, refused, done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("framework", ["ddp", "fsdp1", "fsdp2"])
def test_jobs_are_those_of_the_plain_framework_or_refused(framework, a_plan, tmp_path):
    plain, refused, _ = jobs_of(framework)
    assert refused == ({"sparse"} if framework == "ddp" else set())  # AdamW takes no sparse gradients either
    assert len(plain) >= 6
    for (of, strategy), expected in REFUSED.items():
        if of == framework:
            found, refused, told = jobs_of(framework, plan_for(a_plan, tmp_path / f"{strategy}.json", strategy))
            assert refused == expected, strategy
            assert ("gradients must be dense" in told) is ("sparse" in expected)
            for name, numbers in found.items():
                assert numbers == pytest.approx(plain[name], rel=2e-6), (strategy, name)

"""What frameworks do on the host beside a model's own operators: one process, no network.

    python benchmarks/bench_host.py [--repeats N]

Each framework, and our runtime under three strategies, trains the same small model in a process of its
own, in turn; counted is what the training thread is on a core for. The last column is our runtime's own
part (mean of the three) over the framework's: what is left of the host's gaps when it takes its place.
The plain model's own gaps count to both, a third of its time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).resolve().parent.parent / "examples/frameworks"
FRAMEWORKS = ("fsdp2", "fsdp1", "ddp", "deepspeed")
OURS = ("ours_GGG", "ours_NNG", "ours_NIG")
STEPS, WARM_UP, MICRO_BATCHES = 24, 4, 4
GAPS = 1 / 3  # of a plain model's thread: Python between operators


def train(kind: str) -> float:
    """Return the median milliseconds of CPU time of a step of this thread."""
    sys.path.insert(0, str(FOLDER))
    import torch
    import torch.distributed as dist
    from common import batch, loss_of, make_model

    args = argparse.Namespace(width=160, layers=6, vocabulary=1024, sequence=32, batch=1)
    dist.init_process_group("gloo")
    model: Any = make_model(args)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(model.blocks[0])})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "deepspeed":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    elif kind.startswith("ours"):
        from paro_advise.runtime import shard

        model, optimizer = shard(model, optimizer, kind.removeprefix("ours_"), group_size=1)
    times = []
    for step in range(STEPS):
        begin = time.thread_time()
        for micro in range(MICRO_BATCHES):
            loss = loss_of(engine or model, batch(args, step, micro, 0)) / MICRO_BATCHES
            if engine is not None:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times[WARM_UP:])


def measure(kind: str) -> float:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29771"}
    return cpu_ms(kind, [sys.executable, __file__, "--train", kind], environment)


def cpu_ms(kind: str, command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a job that prints "cpu_ms" and a number; return that."""
    environment = {**environment, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("cpu_ms ")]
    if not lines:
        sys.exit(f"{kind} failed:\n{done.stderr[-2000:]}")
    return float(lines[-1].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(f"cpu_ms {train(options.train)}", flush=True)
        os._exit(0)  # gloo's and DeepSpeed's threads need no goodbye
    found: dict[str, list[float]] = {kind: [] for kind in ("plain", *FRAMEWORKS, *OURS)}
    for _ in range(options.repeats):
        for kind, times in found.items():
            times.append(measure(kind))
    median = {kind: statistics.median(times) for kind, times in found.items()}
    operators = (1 - GAPS) * median["plain"]
    ours = statistics.mean(median[kind] for kind in OURS) - operators
    print(f"{'':<12}{'CPU ms a step':>14}{'beside operators':>18}{'ours over it':>14}")
    for kind, value in median.items():
        share = f"{ours / (value - operators):.2f}" if kind in FRAMEWORKS else ""
        print(f"{kind:<12}{value:>14.1f}{value - operators:>18.1f}{share:>14}")


if __name__ == "__main__":
    main()

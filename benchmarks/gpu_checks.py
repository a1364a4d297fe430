"""The checks of `make gpu`, one after the other: each prints one line of JSON for the table.

    python benchmarks/gpu_checks.py NAME ... [--device cuda|cpu]

What is expected comes from a plain model in one process. With ``--device cpu`` the same code runs without a GPU,
which tests the checks, not the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpu_copies import cost_of_copies, synchronize
from gpu_jobs import worst_difference
from torch import nn
from torch.nn.functional import cross_entropy

from paro_advise.advisor.cli import run
from paro_advise.policies.strategy import KEPT
from paro_advise.runtime import load_checkpoint, save_checkpoint, shard, switch
from paro_advise.runtime.lab.train import Transformer
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY, WIDTH, LAYERS, SEQUENCE, BATCH = 97, 64, 3, 16, 2
STEPS, MICRO_BATCHES, CLIP = 6, 2, 0.5
DEEP = 40  # layers of the model whose steps are timed
UNKNOWN = 0.05  # share of communication whose state a trace may leave open
SLEEP_CYCLES = 2_000_000  # of the GPU's clock, about a millisecond: longer than a unit's work here
FP32, BF16 = 2e-5, 4e-2  # largest relative difference of a loss; bf16 keeps 8 bits, and Adam grows differences
# As profiles name them.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")

device = torch.device("cpu")


def _model() -> Any:
    torch.manual_seed(0)
    return Transformer(VOCABULARY, WIDTH, LAYERS, heads=4).to(device)


def _by_fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(device)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()) / MICRO_BATCHES


def _clip(model: nn.Module) -> float:
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def plain(model: Any, world: int, *, computes_in: torch.dtype | None = None, around: Any = None) -> list[float]:
    """Train in one process on the data of all ranks; return losses and norms in turn.

    Args:
        model: whole.
        world: ranks whose data it sees.
        computes_in: type of a copy that computes, while the model itself is updated.
        around: a context of each forward pass.
    """
    optimizer, found = _optimizer(model), []
    working = copy.deepcopy(model).to(computes_in) if computes_in else model
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            for rank in range(world):
                with around() if around else contextlib.nullcontext():
                    loss = _loss(working, _tokens(step, micro, rank)) / world
                loss.backward()
                total += loss.item()
        if working is not model:
            for ours, theirs in zip(model.parameters(), working.parameters(), strict=True):
                ours.grad, theirs.grad = theirs.grad.to(ours.dtype), None
        found += [total, _clip(model)]
        optimizer.step()
        optimizer.zero_grad()
        if working is not model:
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), working.parameters(), strict=True):
                    theirs.copy_(ours)
    return found


def sharded(model: Any, optimizer: Any, *, around: Any = None, steps: range = range(STEPS)) -> list[float]:
    """Train a sharded model on this rank's data; return losses and norms in turn."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            with around() if around else contextlib.nullcontext():
                loss = _loss(model, _tokens(step, micro, rank))
            loss.backward()
            total += loss.detach() / world
        norm = _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        found += [total.item(), norm]
    return found


def _groups() -> int:
    return 2 if dist.get_world_size() > 2 else 1


def _all_strategies(tolerance: float, around: Any = None, **options: Any) -> dict[str, Any]:
    wanted = plain(_model(), dist.get_world_size(), computes_in=options.get("param_dtype"))
    worst = {}
    for strategy in KEPT:
        model = _model()
        model, optimizer = shard(model, _optimizer(model), strategy, group_size=_groups(), **options)
        with around() if around else contextlib.nullcontext():
            worst[str(strategy)] = worst_difference(sharded(model, optimizer), wanted)
    name, value = max(worst.items(), key=lambda item: item[1])
    return {"strategies": len(worst), "worst": value, "of": name, "asked": tolerance, "holds": value <= tolerance}


def parity_fp32() -> dict[str, Any]:
    """All strategies equal a plain model in fp32."""
    return _all_strategies(FP32)


def parity_bf16() -> dict[str, Any]:
    """All strategies equal a plain model that computes in bf16 beside fp32 parameters."""
    return _all_strategies(BF16, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextlib.contextmanager
def _late_on_a_side_stream() -> Iterator[None]:
    """Work on a stream of the script's own, while gradients and updates come late on the device."""
    if device.type == "cpu":
        yield
        return
    publish, add = UnitProcedure.publish, UnitProcedure.add

    def late(plain_one: Callable[..., None]) -> Callable[..., None]:
        def later(*arguments: Any, **options: Any) -> None:
            torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - torch's own tests make a device late by it
            plain_one(*arguments, **options)

        return later

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    UnitProcedure.publish, UnitProcedure.add = late(publish), late(add)  # type: ignore[method-assign]
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        UnitProcedure.publish, UnitProcedure.add = publish, add  # type: ignore[method-assign]
        torch.cuda.current_stream().wait_stream(side)


def side_stream() -> dict[str, Any]:
    """The same where the script works on a stream of its own and communication is late."""
    return _all_strategies(FP32, around=_late_on_a_side_stream, overlap_updates=True)


def repeatable() -> dict[str, Any]:
    """200 steps under a nearly full allocator, twice, give the same bits."""
    runs = []
    for _ in range(2):
        model = _model()
        model, optimizer = shard(model, _optimizer(model), "IIG", group_size=_groups())
        # What is left is enough for one pass, so that memory is given away as soon as it may be.
        if device.type == "cuda":
            sharded(model, optimizer, steps=range(2))
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, 1.2 * torch.cuda.max_memory_reserved() / total))
        runs.append(sharded(model, optimizer, steps=range(200)))
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        del model, optimizer
        gc.collect()
    return {"steps": 200, "holds": runs[0] == runs[1]}


def _peak_of(action: Callable[[], object]) -> float | None:
    """Return the MiB that an action takes beside what is there; None on a CPU."""
    if device.type == "cpu":
        action()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def memory() -> dict[str, Any]:
    """Peak memory of a save, a switch, and a step with the optimizer on the host."""
    model = _model()
    model, optimizer = shard(model, _optimizer(model), "IIG", group_size=_groups())
    sharded(model, optimizer, steps=range(1))
    held = sum(p.numel() * p.element_size() for p in _model().parameters()) / 2**20
    found: dict[str, Any] = {"model MiB": held}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        found["save MiB"] = _peak_of(lambda: save_checkpoint(Path(shared[0]) / "saved", model))
        dist.barrier()
    found["switch MiB"] = _peak_of(lambda: switch(model, "GGG"))
    other = _model()
    other, theirs = shard(other, _optimizer(other), "IIG", group_size=_groups(), offload_optimizer=True)
    found["offloaded step MiB"] = _peak_of(lambda: sharded(other, theirs, steps=range(1)))
    # A switch holds one unit whole beside the model; a save of shards needs no second model.
    found["holds"] = device.type == "cpu" or (found["save MiB"] <= held and found["switch MiB"] <= 2 * held)
    return found


def offloaded() -> dict[str, Any]:
    """The optimizer on the host, its state saved halfway and loaded into a new model, equals a plain model."""
    wanted, worst = plain(_model(), dist.get_world_size()), {}
    half = STEPS // 2
    for strategy in ("NNN", "NNG", "IIG", "GGG"):
        model = _model()
        model, optimizer = shard(model, _optimizer(model), strategy, group_size=_groups(), offload_optimizer=True)
        got = sharded(model, optimizer, steps=range(half))
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            save_checkpoint(Path(shared[0]) / "saved", model)
            dist.barrier()
            del model, optimizer
            again = _model()
            again, theirs = shard(again, _optimizer(again), strategy, group_size=_groups(), offload_optimizer=True)
            load_checkpoint(Path(shared[0]) / "saved", again)
            dist.barrier()
        got += sharded(again, theirs, steps=range(half, STEPS))
        worst[strategy] = worst_difference(got, wanted)
    return {**worst, "asked": FP32, "holds": max(worst.values()) <= FP32}


def out_of_memory() -> dict[str, Any]:
    """A pass that runs out of memory is caught, forgotten and run again; the result is as if it had not been."""
    wanted = plain(_model(), dist.get_world_size())
    model = _model()
    model, optimizer = shard(model, _optimizer(model), "IIG", group_size=_groups())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
            if device.type == "cuda":
                torch.empty(1 << 50, device=device)  # more than any has
            raise torch.OutOfMemoryError("as a CPU would say it")

    caught = 0
    try:
        Fails.apply(_loss(model, _tokens(0, 0, dist.get_rank()))).backward()
    except torch.OutOfMemoryError:
        caught = 1
        optimizer.zero_grad()
    worst = worst_difference(sharded(model, optimizer), wanted)
    return {"caught": caught, "worst": worst, "asked": FP32, "holds": caught == 1 and worst <= FP32}


def compiled() -> dict[str, Any]:
    """Units that torch.compile compiles."""
    model = _model()
    for block in model.blocks:
        block.compile()
    wanted = plain(_model(), dist.get_world_size())
    model, optimizer = shard(model, _optimizer(model), "IIG", group_size=_groups())
    worst = worst_difference(sharded(model, optimizer), wanted)
    return {"worst": worst, "asked": 10 * FP32, "holds": worst <= 10 * FP32}


def checkpointing() -> dict[str, Any]:
    """Activations computed again in backward, by the kind that re-enters autograd and the other one."""
    wanted = plain(_model(), dist.get_world_size())
    worst = {}
    for reentrant in (True, False):
        model = _model()
        model, optimizer = shard(model, _optimizer(model), "III", group_size=_groups())
        for block in model.blocks:
            inner = block.forward

            def again(hidden: torch.Tensor, inner: Any = inner, reentrant: bool = reentrant) -> Any:
                return torch.utils.checkpoint.checkpoint(inner, hidden, use_reentrant=reentrant)

            block.forward = again
        worst["reentrant" if reentrant else "not reentrant"] = worst_difference(sharded(model, optimizer), wanted)
    return {**worst, "asked": FP32, "holds": max(worst.values()) <= FP32}


def grad_scaler() -> dict[str, Any]:
    """Autocast to fp16 with scaled losses."""

    def train(model: Any, optimizer: Any, ranks: list[int]) -> list[float]:
        scaler, found = torch.amp.GradScaler(device.type, init_scale=1024.0), []
        for step in range(STEPS):
            total = torch.zeros((), device=device)
            for rank in ranks:
                with torch.autocast(device.type, torch.float16):
                    loss = _loss(model, _tokens(step, 0, rank)) / len(ranks)
                scaler.scale(loss).backward()
                total += loss.detach()
            scaler.unscale_(optimizer)
            _clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if len(ranks) == 1 and dist.get_world_size() > 1:
                dist.all_reduce(total)
                total /= dist.get_world_size()
            found.append(total.item())
        return found

    model = _model()
    wanted = train(model, _optimizer(model), list(range(dist.get_world_size())))
    model = _model()
    model, optimizer = shard(model, _optimizer(model), "IIG", group_size=_groups())
    worst = worst_difference(train(model, optimizer, [dist.get_rank()]), wanted)
    return {"worst": worst, "asked": BF16, "holds": worst <= BF16}


def layouts() -> dict[str, Any]:
    """Host time and kernels of ``fill`` and ``spread`` for a block of a 7-billion model, at 8 to 1,024 ranks."""
    return cost_of_copies(device)


def traces() -> dict[str, Any]:
    """A profile of each strategy is read by ``analyze``: how much of its communication it knows the state of."""
    unknown = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in KEPT:
            model = _model()
            model, optimizer = shard(model, _optimizer(model), strategy, group_size=_groups())
            waits = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
            with torch.profiler.profile(schedule=waits, record_shapes=True) as profile:
                for step in range(5):
                    sharded(model, optimizer, steps=range(step, step + 1))
                    profile.step()
            if dist.get_rank() == 0:
                trace, report = Path(folder) / f"{strategy}.json", Path(folder) / f"{strategy}.report.json"
                profile.export_chrome_trace(str(trace))
                with contextlib.redirect_stdout(io.StringIO()):
                    assert run(["analyze", str(trace), "-q", "--json", str(report)]) == 0
                states = json.loads(report.read_text(encoding="utf-8"))["states"]
                times = {name: state["total_us"] for name, state in states.items()}
                unknown[str(strategy)] = times.get("unknown", 0.0) / max(1.0, sum(times.values()))
            dist.barrier()
    worst = max(unknown.values(), default=0.0)
    return {"read": len(unknown), "most unknown": worst, "asked": UNKNOWN, "holds": worst <= UNKNOWN}


def step_times() -> dict[str, Any]:
    """Time of a step, and of this process's threads in it, in torch's frameworks and under three strategies, in turn."""

    def deep() -> Any:
        torch.manual_seed(0)
        return Transformer(VOCABULARY, WIDTH, DEEP, heads=4).to(device)

    sharded_by_torch = _by_fsdp2(deep())
    replicated = nn.parallel.DistributedDataParallel(
        deep(), device_ids=[device.index] if device.index is not None else None
    )
    runs: dict[str, Any] = {
        name: (one, _optimizer(one)) for name, one in (("DDP", replicated), ("FSDP2", sharded_by_torch))
    }
    for strategy in ("NNG", "IIG", "GGG"):
        model = deep()
        runs[strategy] = shard(model, _optimizer(model), strategy, group_size=_groups())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(12):
        for name, (one, optimizer) in runs.items():
            synchronize(device)
            dist.barrier()
            begun, of_host = time.perf_counter(), time.process_time()
            _loss(one, _tokens(0, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            of_host = time.process_time() - of_host
            synchronize(device)
            times[name].append((time.perf_counter() - begun, of_host))
    found: dict[str, Any] = {"parameters": len(list(deep().parameters()))}
    for name, pairs in times.items():
        step, host = (1e3 * statistics.median(values) for values in zip(*pairs[2:], strict=True))
        found[f"{name} ms"] = f"{step:.1f} ({host:.1f} host)"
    return {**found, "holds": True}


def host_waits() -> dict[str, Any]:
    """How often a step lets its host wait: for what was exchanged in the step before, else no oftener than in FSDP2."""
    tokens = [_tokens(0, micro, dist.get_rank()) for micro in range(MICRO_BATCHES)]  # a copy from plain memory waits

    def waits_of(model: Any, optimizer: Any) -> float:
        def step() -> None:
            for micro, of_micro in enumerate(tokens):
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
                _loss(model, of_micro).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        synchronize(device)
        with torch.profiler.profile() as profile:
            step()
            step()
        return sum(event.count for event in profile.key_averages() if event.key in WAITS) / 2

    by_torch, found = _by_fsdp2(_model()), {}
    allowed = waits_of(by_torch, _optimizer(by_torch))
    for strategy in ("NNN", "NNG", "IIG", "GGG"):  # profiles take their time
        model = _model()
        found[strategy] = waits_of(*shard(model, _optimizer(model), strategy, group_size=_groups()))
    name, value = max(found.items(), key=lambda item: item[1])
    return {"FSDP2 a step": allowed, "most": value, "of": name, "holds": value <= allowed + 1}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        parity_fp32, parity_bf16, side_stream, repeatable, memory, offloaded, out_of_memory, compiled, checkpointing,
        grad_scaler, layouts, traces, step_times, host_waits,
    )
}  # fmt: skip


def main() -> None:
    """Run checks on this rank; rank 0 prints what each found."""
    global device
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=sorted(CHECKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Fused attention adds up in another order each time; what is judged here is ours.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same for its matrix products
    torch.set_num_threads(1)
    dist.init_process_group(args.backend, device_id=device if args.backend == "nccl" else None)
    for name in args.names:
        begun = time.perf_counter()
        found = CHECKS[name]()
        gc.collect()  # what its model held is free before the next one looks at memory
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found["holds"])
        told = {"name": name, "seconds": round(time.perf_counter() - begun, 1), **found, "holds": all(everyone)}
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

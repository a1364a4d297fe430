"""A DeepSpeed script that saves and resumes with the engine's own checkpoints; with "plain" the same by DDP.

Arguments before those of ``common``: the folder of checkpoints, and words: "resume" loads the latest checkpoint before the
first step, "weights" only the weights of it; "theirs" finds one of DeepSpeed's own. "default" leaves clipping to DeepSpeed's
default, 1.0; "skips" leaves a layer out in every second step; "module" calls the module by itself; "amid" loads between micro-batches;
"own" is ZeRO-3, of which each rank finds its own values and buffers again.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "stand_ins"))
from common import batch, loss_of, make_model, parse_args

SAVED_AFTER, STEPS, MICRO_BATCHES = 2, 4, 2
SCALE = 10.0  # of the loss, so that its gradients are long enough to be clipped


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def made(args):
    model = make_model(args)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def leave_out(model, step):
    """Let a layer be left out, or not; its parameters are none's then."""
    part = model.blocks[1].mlp
    part.forward = (lambda hidden: hidden) if step % 2 else type(part).forward.__get__(part)


def plain(args, rank, clipping, skips):
    raw, optimizer = made(args)
    model = torch.nn.parallel.DistributedDataParallel(raw, find_unused_parameters=skips)
    schedule = schedule_of(optimizer)
    for step in range(STEPS):
        if skips:
            leave_out(raw, step)
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = SCALE * loss_of(model, batch(args, step, micro, rank))
                (loss / MICRO_BATCHES).backward()
        for parameter in raw.parameters():  # what DeepSpeed does in each of its reductions
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        report(step, loss.detach(), norm, optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    report("end", sum(float(value.double().sum()) for value in raw.state_dict().values()))


def planned(args, rank, folder, words):
    import deepspeed

    model, optimizer = made(args)
    model.register_buffer("seen", torch.tensor(float(rank)))
    stage = 3 if "own" in words else 2
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": MICRO_BATCHES,
        **({} if "default" in words else {"gradient_clipping": 0.5}),
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule_of, config=config)
    assert (engine.global_rank, engine.world_size) == (rank, dist.get_world_size())
    assert (engine.zero_optimization_stage(), engine.bfloat16_enabled()) == (stage, False)
    assert not hasattr(engine, "curriculum_scheduler")
    assert engine.blocks is model.blocks  # of the model, as DeepSpeed gives it
    first = 0
    assert engine.load_checkpoint(folder / "nothing") == (None, None)
    if "theirs" in words:
        engine.load_checkpoint(folder / "theirs", tag="global_step1")
    if "resume" in words or "weights" in words:
        model.seen.fill_(-1)
        path, state = engine.load_checkpoint(folder, load_module_only="weights" in words)
        assert path == str(folder / f"global_step{SAVED_AFTER}")
        saved_by = rank if "own" in words else 0
        assert state == {"epoch": 7, "seen": torch.Size([3]), "rank": saved_by}
        assert model.seen == saved_by
        first = engine.global_steps
        assert first == (0 if "weights" in words else SAVED_AFTER)
        assert engine.micro_steps == 0  # DeepSpeed's load_checkpoint restores none (deepspeed/runtime/engine.py)
    for step in range(first, STEPS):
        if "skips" in words:
            leave_out(model, step)
        for micro in range(MICRO_BATCHES):
            loss = SCALE * loss_of(model if "module" in words else engine, batch(args, step, micro, rank))
            engine.backward(loss)
            rate = engine.get_lr()[0]
            engine.step()
            assert engine.was_step_applied() is (micro == MICRO_BATCHES - 1)
            if "amid" in words:
                engine.load_checkpoint(folder)
        report(step, loss.detach(), engine.get_global_grad_norm(), rate)
        if step + 1 == SAVED_AFTER and set(words) <= {"own"}:
            engine.save_checkpoint(folder, client_state={"epoch": 7, "seen": torch.Size([3]), "rank": rank})
    if "own" in words:
        report("values", float(model.seen))
        return
    engine.save_16bit_model(folder)
    if rank == 0:
        whole = torch.load(folder / "pytorch_model.bin", weights_only=True)
        alone = engine.module.state_dict()  # whole under ZeRO-2, which rank 0 saves by itself
        assert {name: (type(value), value.shape) for name, value in alone.items()} == {
            name: (torch.Tensor, value.shape) for name, value in whole.items()
        }
        assert all(torch.equal(value, whole[name]) for name, value in alone.items())
        assert deepspeed.comm.backends == ["gloo"]  # set up once, on torch's own groups
        report("end", sum(float(value.double().sum()) for value in whole.values()))
    del engine, optimizer, loss, model


def report(*parts):
    if dist.get_rank() == 0:
        print(
            *(f"{float(part):.9e}" if isinstance(part, (float, torch.Tensor)) else part for part in parts), flush=True
        )


def main():
    folder, words = Path(sys.argv[1]), [word for word in sys.argv[2].split(",") if word]
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    if "plain" in words:
        plain(args, dist.get_rank(), 1.0 if "default" in words else 0.5, skips="skips" in words)
    else:
        planned(args, dist.get_rank(), folder, words)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

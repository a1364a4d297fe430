"""Unchanged training scripts on GPUs, one for each framework: what `make gpu` trains plain and under plans.

    torchrun ... benchmarks/gpu_scripts.py FRAMEWORK [--steps N] [--width N] [--layers N]

Each rank trains on data of its own; rank 0 prints the mean loss and the gradients' norm of each step. Nothing here knows
of this project. Without a GPU they train on the CPU, which tests the scripts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, SEQUENCE, BATCH = 512, 64, 4
MICRO_BATCHES, CLIP, RATE = 2, 1.0, 1e-3

WARM = 5  # steps
width, layers = 128, 3
until: Until | None = None


class Until(NamedTuple):
    """Files of a job that trains until it's asked to end.

    Attributes:
        begun: it makes it when it trains.
        end: whoever makes it ends it.
    """

    begun: Path
    end: Path


class Block(nn.Module):
    """A block of a transformer without attention that adds up in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(SEQUENCE, SEQUENCE)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states, [batch, sequence, width]."""
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        mixed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + mixed


class Model(nn.Module):
    """Tokens in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, [batch, sequence, vocabulary]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def model_on(device: torch.device) -> Model:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Model().to(device)


def tokens_of(step: int, micro: int, rank: int) -> torch.Tensor:
    """Return a micro-batch in pinned memory, as data loaders give it."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return tokens.pin_memory() if torch.cuda.is_available() else tokens


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tell(step: int, loss: torch.Tensor, norm: Any) -> None:
    """Print the mean loss of all ranks, and the norm."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if dist.get_rank() == 0:
        print(f"R {step} {mean.item():.7f} {float(whole):.7f}", flush=True)


def _loop(model: Any, steps: int, device: torch.device, *, clip: Callable[[], Any] | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(steps):
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            tokens = tokens_of(step, micro, dist.get_rank()).to(device, non_blocking=True)
            loss = loss_of(model, tokens) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = clip() if clip else nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        tell(step, total, norm)
        if until is not None and _is_enough(step, until, device):
            return


def _is_enough(step: int, until: Until, device: torch.device) -> bool:
    """Say that it trains, and tell whether any rank was asked to end."""
    if step == WARM:
        until.begun.touch()
    ends = torch.tensor(float(until.end.exists()), device=device)
    dist.all_reduce(ends)
    return bool(ends)


def _replicated(device: torch.device) -> nn.parallel.DistributedDataParallel:
    places = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model_on(device), device_ids=places)


def ddp(steps: int, device: torch.device) -> None:
    """DistributedDataParallel."""
    _loop(_replicated(device), steps, device)


def ddp_amp(steps: int, device: torch.device) -> None:
    """DistributedDataParallel under autocast to fp16, with scaled losses and accumulation in no_sync."""
    model = _replicated(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for step in range(steps):
        total = torch.zeros((), device=device)
        with model.no_sync(), torch.autocast(device.type, torch.float16):
            loss = loss_of(model, tokens_of(step, 0, dist.get_rank()).to(device, non_blocking=True)) / 2
            scaler.scale(loss).backward()
        total += loss.detach()
        with torch.autocast(device.type, torch.float16):
            loss = loss_of(model, tokens_of(step, 1, dist.get_rank()).to(device, non_blocking=True)) / 2
        scaler.scale(loss).backward()
        total += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tell(step, total, norm)


def fsdp2(steps: int, device: torch.device) -> None:
    """fully_shard over blocks."""
    from torch.distributed.fsdp import fully_shard

    model = model_on(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    _loop(model, steps, device)


def fsdp2_bf16(steps: int, device: torch.device) -> None:
    """fully_shard with bf16 parameters and fp32 reductions, units compiled."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_on(device)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    _loop(model, steps, device)


def fsdp1(steps: int, device: torch.device) -> None:
    """FullyShardedDataParallel, its own clipping."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        model_on(device), auto_wrap_policy=policy, device_id=device, use_orig_params=True, limit_all_gathers=True
    )
    _loop(model, steps, device, clip=lambda: model.clip_grad_norm_(CLIP))


class _Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        row = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": row}


class _WithLoss(Model):
    def forward(self, tokens: torch.Tensor) -> Any:
        logits = super().forward(tokens[:, :-1])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())}


def accelerate(steps: int, _: torch.device) -> None:
    """Accelerate with bf16 autocast and accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(0)
    model: Any = _WithLoss()
    loader = torch.utils.data.DataLoader(_Data(), batch_size=BATCH, num_workers=1, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE), loader)
    for number, batch in enumerate(loader):
        if number == steps * MICRO_BATCHES:
            break
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP) if accelerator.sync_gradients else 0.0
            optimizer.step()
            optimizer.zero_grad()
        tell(number, loss, norm)


def trainer(steps: int, _: torch.device) -> None:
    """Hugging Face's Trainer in bf16, with its own saving."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tell(TrainerCallback):
        def on_log(self, args: Any, state: Any, _: Any, logs: Any = None, **__: Any) -> None:
            if args.process_index == 0 and "loss" in logs:
                print(f"R {state.global_step} {logs['loss']:.7f} {logs['grad_norm']:.7f}", flush=True)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, bf16=True, learning_rate=RATE,
            logging_steps=1, save_strategy="steps", save_steps=steps // 2, disable_tqdm=True, report_to="none",
            gradient_accumulation_steps=MICRO_BATCHES, remove_unused_columns=False, ddp_find_unused_parameters=False,
            lr_scheduler_type="constant", dataloader_num_workers=1,
        )  # fmt: skip
        Trainer(model=_WithLoss(), args=settings, train_dataset=_Data(), callbacks=[Tell()]).train()


def lightning(steps: int, _: torch.device) -> None:
    """Lightning's Trainer in bf16 over DDP."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = _WithLoss()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            tell(number, loss, 0.0)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    hosts = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=hosts, strategy="ddp",
            max_steps=steps, precision="bf16-mixed", gradient_clip_val=CLIP, accumulate_grad_batches=MICRO_BATCHES,
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        ).fit(Module(), torch.utils.data.DataLoader(_Data(), batch_size=BATCH, pin_memory=True))  # fmt: skip


FRAMEWORKS: dict[str, Callable[[int, torch.device], None]] = {
    one.__name__: one for one in (ddp, ddp_amp, fsdp2, fsdp2_bf16, fsdp1, accelerate, trainer, lightning)
}
STARTS_ITSELF = {"accelerate", "trainer", "lightning"}


def main() -> None:
    """Train."""
    global width, layers, until
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--begun", type=Path, help="made after some steps of a job that has --until")
    parser.add_argument("--until", type=Path, help="ends a job of ddp, fsdp1 or fsdp2 once it's there")
    args = parser.parse_args()
    until = Until(args.begun, args.until) if args.until else None
    width, layers = args.width, args.layers
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if args.framework not in STARTS_ITSELF:
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=bound)
    FRAMEWORKS[args.framework](args.steps, device)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()

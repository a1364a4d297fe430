"""DeepSpeed ZeRO with its config as a dictionary."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    model = make_model(args)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    for step in range(args.steps):
        for micro in range(args.micro_batches):
            loss = loss_of(engine, batch(args, step, micro, rank))
            engine.backward(loss)
            engine.step()
        if rank == 0:
            print(f"step {step} norm {float(engine.get_global_grad_norm()):.6f}", flush=True)


if __name__ == "__main__":
    main()

"""What training libraries do around a model that DDP wraps, a small job each, one after the other.

Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist
from framework_habits import steps
from script_habits import STEPS, Blocks, CheckpointedBlocks, adamw, main, mean, squares, train, values_of, wrapped
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.utils import prune as torch_prune

SMOOTHED = ("Blocks", "Linear")  # classes that a library knows by name


def smooths_by_name(job, values):
    """Choose a loss by the name of the model's class and of its layers, as transformers' Trainer does."""
    model = job.module
    names = [type(part).__name__ for part in (model, model.last)]
    loss = squares(job, values)
    return loss + 0.1 * job(values).abs().mean() if names == [*SMOOTHED] else loss


def loads_names_without_prefix(job):
    given = {name.removeprefix("module."): torch.zeros_like(value) for name, value in job.state_dict().items()}
    found = job.load_state_dict(given, strict=False)
    assert all(name.startswith("module.") for name in found.missing_keys)
    return 1000.0 * len(found.missing_keys) + len(found.unexpected_keys)


def names_of(job):
    model = job.module
    shown = [f"{type(part).__module__}.{type(part).__qualname__}" for part in model.modules()]
    return float(sum(map(len, shown)))


def parts_in_turn(hook=None):
    """Train the halves of a model in turn, as Lightning's toggle_optimizer freezes them: by an optimizer's groups."""
    torch.manual_seed(0)
    model = Blocks()
    job = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    first = [*model.first.parameters()]
    optimizer = torch.optim.SGD(
        [{"params": first}, {"params": [p for p in model.parameters() if all(p is not other for other in first)]}],
        lr=0.1,
    )
    found = []
    for step in range(2 * STEPS):
        if hook is None:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    parameter.requires_grad_(step == 0 or step % 2 == number)
            found.append(float(sum(p.requires_grad for g in optimizer.param_groups for p in g["params"])))
        elif step == 1:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_hook(hook)
        loss = squares(job, values_of(step, same=False))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [mean(loss.item()), float(sum(p.detach().double().abs().sum() for p in model.parameters()))]
    return found


def freezes_between_passes():
    """Freeze a layer after the first of two passes: it keeps the gradient of that one for the step."""
    torch.manual_seed(0)
    model = Blocks()
    job = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, found = torch.optim.SGD([{"params": model.parameters()}], lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        for number in range(2):
            squares(job, values_of(2 * step + number, same=False)).backward()
            for parameter in optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad = number == 1
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(sum(p.detach().double().abs().sum() for p in model.parameters())))
    return found


def accumulates_later(passes):
    """Lightning's order: forward, zero_grad, backward, all of it inside no_sync but for the last pass."""
    torch.manual_seed(0)
    model = Blocks()
    job = wrapped(model, "ddp")
    optimizer, found, drawn = adamw(job.parameters()), [], 0
    for count in passes:
        for number in range(count):
            with job.no_sync() if number < count - 1 else contextlib.nullcontext():
                loss = squares(job, values_of(drawn, same=False))
                if number == 0:
                    optimizer.zero_grad()
                (loss / count).backward()
                drawn += 1
        found.append(float(nn.utils.clip_grad_norm_(job.parameters(), 1.0)))
        optimizer.step()
        found.append(mean(loss.item()))
    return found


def changes_gradients_of_each_pass(change, number_of_pass=0):
    """Two passes a step; as SAM does, work after one on the gradients that the optimizer's groups lead to."""
    torch.manual_seed(0)
    job = wrapped(Blocks(), "ddp")
    optimizer, found = adamw(job.parameters()), []
    for step in range(STEPS):
        for number in range(2):
            loss = squares(job, values_of(2 * step + number, same=False))
            loss.backward()
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found.append(float(sum(p.grad.square().sum() for p in trained if p.grad is not None)))
            for parameter in trained if number == number_of_pass else ():
                change(parameter)
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss))
    return found


def shrinks_lists_of_weights():
    """Weight decay by hand, on the lists that the optimizer's groups hold."""
    torch.manual_seed(0)
    job = wrapped(Blocks(), "ddp")
    optimizer, found = adamw(job.parameters()), []
    for step in range(STEPS):
        loss = squares(job, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for group in optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.9)
                torch._foreach_mul_(self=group["params"], scalar=0.9)
        found.append(mean(loss))
    return found


def halves(parameter):
    parameter.grad.mul_(0.5)


def forgets(parameter):
    parameter.grad = None


def sets_again(parameter):
    halved = parameter.grad * 0.5
    parameter.grad = None
    parameter.grad = halved


class TrainsInside(Blocks):
    """Goes backward and steps inside its forward pass, as Lightning's manual optimization does inside DDP's."""

    job: nn.Module
    optimizer: torch.optim.Optimizer
    drops_first = False

    def forward(self, values):
        if self.drops_first:
            self.optimizer.zero_grad()
        loss = super().forward(values).square().mean()
        self.job.reducer._rebuild_buckets()
        self.job.reducer.prepare_for_backward([])
        loss.backward()
        self.job.require_backward_grad_sync = False  # DDP itself shall prepare no backward pass at its end
        return loss.detach()


def trains_inside(*, drops_first=False):
    """Step after each second pass; with gradients dropped first, inside the forward pass, after each."""
    torch.manual_seed(0)
    model = TrainsInside()
    model.drops_first = drops_first
    job = nn.parallel.DistributedDataParallel(model)
    TrainsInside.job, TrainsInside.optimizer = job, adamw(job.parameters())
    found = []
    for step in range(2 * STEPS):
        loss = job(values_of(step, same=False))
        job.require_backward_grad_sync = True
        if step % 2 or drops_first:
            found.append(float(nn.utils.clip_grad_norm_(job.parameters(), 1.0)))
            model.optimizer.step()
            if not drops_first:
                model.optimizer.zero_grad()
        found.append(mean(loss))
    return found


def penalty_before_a_pass(job, values):
    """The usual order of a Wasserstein GAN: a penalty on gradients, another forward pass, one backward pass."""
    inputs = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(job(inputs).sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean() + squares(job, values)


def logs_after_rank_0(first):
    """Log norms of weights, a row and a product on all ranks, after rank 0 alone has saved or evaluated."""

    def log(job):
        model = job.module
        if dist.get_rank() == 0:
            if first == "saves":
                model.state_dict()
            else:
                with torch.no_grad():
                    model(values_of(9, same=True))
        weights = [parameter.detach() for parameter in model.parameters()]
        norms = torch.stack([weight.norm() for weight in weights])
        square = weights[0].T @ weights[0]
        return float(norms.norm()) + float(weights[0][3].sum()) + float(square.trace())

    return train(Blocks(), "ddp", after_step=log)


class ByRows(torch.optim.Optimizer):
    """Keeps a mean of each row's gradients, as optimizers do whose states are smaller than parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, rows = self.state[parameter], parameter.grad.reshape(parameter.shape[0], -1).mean(1)
                state["mean"] = state["mean"].mul(0.9).add(rows) if "mean" in state else rows.clone()
                mean = state["mean"]
                parameter.sub_((mean[:, None] if parameter.ndim == 2 else mean) * group["lr"])


def reloads_states_of_their_own_shape():
    made = []

    def reload(_):
        buffer = io.BytesIO()
        torch.save(made[0].state_dict(), buffer)
        buffer.seek(0)
        made[0].load_state_dict(torch.load(buffer))
        return 0.0

    def optimizer_of(parameters):
        made.append(ByRows(parameters))
        return made[0]

    return train(Blocks(), "ddp", after_step=reload, optimizer_of=optimizer_of)


class Converts(nn.Linear):
    """Converts itself to the type that it has, as routers of mixtures do."""

    def forward(self, values):
        return super(Converts, self.to(self.weight.dtype)).forward(values)


def prunes(job):
    torch_prune.l1_unstructured(job.module.blocks[0], "weight", 0.3)
    return 0.0


class Answer:
    """What a model returns where a library wants more than tensors; nothing that torch could look into."""

    def __init__(self, logits):
        self.logits = logits


class AnsweringBlocks(CheckpointedBlocks):
    """A model that runs its blocks again in backward and whose output shows no tensor."""

    def forward(self, values):
        return Answer(super().forward(values))


class AnsweringLayer(nn.Linear):
    """A model of one unit whose output shows no tensor, as a policy that returns a distribution."""

    def __init__(self):
        super().__init__(16, 8)

    def forward(self, values):
        return Answer(super().forward(values))


def answers_from_one_unit():
    return train(AnsweringLayer(), "ddp", loss_of=lambda job, values: job(values).logits.square().mean())


def answers_after_checkpoints():
    return train(AnsweringBlocks(), "ddp", loss_of=lambda job, values: job(values).logits.square().mean())


def norms_as_tensors(model):
    """Put norms into tensors in all the ways that loggers do."""
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    table = torch.zeros(len(norms))
    for place, norm in enumerate(norms):
        table[place] = norm
    rows = torch.zeros(16, 25)
    rows[:, 1:] = model.first.weight.grad.T
    made = [
        torch.tensor(norms), torch.as_tensor(norms), table.new_tensor(norms), torch.FloatTensor(norms), table,
        torch.full((2,), norms[0]), rows.abs().sum(), torch.stack(norms).sum(),
        torch.cat([norm.reshape(1) for norm in norms]).nansum(), model.first.weight.grad.norm(dim=0).sum(),
    ]  # fmt: skip
    NORMS.append(float(sum(part.double().sum() for part in made)))


NORMS: list[float] = []


def logs_norms():
    NORMS.clear()
    return train(Blocks(), "ddp", after_backward=norms_as_tensors) + NORMS


def works_on_lists():
    """Count what is done to lists of parameters where torch does that by default: on a GPU, whose part a CPU plays."""
    calls = []

    def counted(module, name):
        function = getattr(module, name)
        return mock.patch.object(module, name, lambda *args, **names: (calls.append(name), function(*args, **names))[1])

    kinds = "_get_foreach_kernels_supported_devices"
    with contextlib.ExitStack() as patches:
        for module in map(import_module, ("torch.utils._foreach_utils", "torch.optim.optimizer")):
            patches.enter_context(mock.patch.object(module, kinds, lambda: ["cpu"]))
        patches.enter_context(counted(import_module("torch.optim.adam"), "_multi_tensor_adam"))
        patches.enter_context(counted(torch, "_foreach_norm"))
        found = train(Blocks(), "ddp", after_backward=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    return [*found, calls.count("_multi_tensor_adam"), calls.count("_foreach_norm")]


def syncs_states(job):
    """Make the ranks' states equal, as Lightning does before it tests."""
    _sync_module_states(job.module, dist.group.WORLD, 250 << 20, 0, params_and_buffers_to_ignore=())
    return mean(float(sum(value.double().abs().sum() for value in job.module.state_dict().values())))


def compiled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def compiles_its_step():
    """PyTorch's recipe for compiled optimizers; a schedule would wrap the step itself."""
    torch.manual_seed(0)
    job = wrapped(Blocks(), "ddp")
    return steps(job, compiled(job.parameters()))


class ByOneNorm(torch.optim.SGD):
    """Adds the squares of all gradients up in a plain tensor, by whose root it divides them, as timm's LAMB does."""

    @torch.no_grad()
    def step(self):
        square = torch.zeros(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                square.add_(parameter.grad.pow(2).sum())
            for parameter in group["params"]:
                parameter.add_(parameter.grad / square.sqrt(), alpha=-group["lr"])


class Cautious(torch.optim.SGD):
    """Follows gradients whose sign has not turned, scaled by the mean of a mask; and clips each by norms of its rows."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                before = state.setdefault("before", torch.zeros_like(parameter))
                mask = (before * gradient >= 0).to(gradient.dtype)
                mask.div_(mask.mean().clamp_(min=1e-3))
                rows = gradient.flatten(1).norm(dim=1) if gradient.ndim > 1 else gradient.norm()
                most = rows.clamp_(min=1e-6).sqrt_().reciprocal_()
                parameter.add_(gradient * mask * most.mean(), alpha=-group["lr"])
                before.copy_(gradient)


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self):
        if self.fails:
            raise RuntimeError("as when memory is short")
        super().step()


class Adapted(nn.Module):
    """A layer inside another module, as peft has it until its adapters are merged."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(24, 24)

    def forward(self, values):
        return self.base_layer(values)


def takes_layers_out_of_their_wrappers():
    """Move layers after training, as merge_and_unload() does, and save a part of the model."""
    torch.manual_seed(0)
    job = wrapped(Blocks([Adapted() for _ in range(3)]), "ddp")
    found = steps(job, adamw(job.parameters()))
    part = job.module.blocks
    for place in range(3):
        part[place] = part[place].base_layer
    state = part.state_dict()
    assert not any(hasattr(value, "full_tensor") for value in state.values())
    return [*found, len(state), sum(float(value.double().abs().sum()) for value in state.values())]


class FrozenAtTheEnd(Blocks):
    """A frozen layer whose rows no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(24, 5).requires_grad_(requires_grad=False)


def reads_whole_states(job):
    """What safetensors wants to load a model: each tensor in memory of its own size."""
    state = job.module.state_dict()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    return sum(float(value.double().abs().sum()) for value in state.values())


def goes_on_after_a_step_that_failed():
    """Catch what ended a step, send round a tensor, and train another model."""
    torch.manual_seed(0)
    job = wrapped(Blocks(), "ddp")
    optimizer = FailsOnce(job.parameters(), lr=0.05)
    found = steps(job, optimizer)
    optimizer.fails = True
    squares(job, values_of(9, same=False)).backward()
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    values = torch.full((4,), 1.0 + dist.get_rank())
    dist.broadcast(values, 0)
    return [*found, float(values.sum()), *train(Blocks(), "ddp")]


def jobs(_):
    yield "chooses by name", lambda: train(Blocks(), "ddp", loss_of=smooths_by_name, after_step=names_of)
    yield "trains parts in turn", parts_in_turn
    yield "loads names without prefix", lambda: train(Blocks(), "ddp", after_step=loads_names_without_prefix)
    yield "hooks by groups", lambda: parts_in_turn(hook=lambda gradient: 0.5 * gradient)
    yield "freezes between passes", freezes_between_passes
    yield "accumulates later", lambda: accumulates_later((1, 2, 3, 2, 1, 2))
    yield "accumulates from the start", lambda: accumulates_later((2, 2, 3))
    yield "logs norms", logs_norms
    yield "halves gradients of first passes", lambda: changes_gradients_of_each_pass(halves)
    yield "forgets gradients of first passes", lambda: changes_gradients_of_each_pass(forgets)
    yield "sets gradients of first passes again", lambda: changes_gradients_of_each_pass(sets_again)
    yield "sets gradients of last passes again", lambda: changes_gradients_of_each_pass(sets_again, number_of_pass=1)
    yield "trains inside", trains_inside
    yield "drops and trains inside", lambda: trains_inside(drops_first=True)
    yield "penalizes, then passes", lambda: train(Blocks(), "ddp", loss_of=penalty_before_a_pass)
    yield "answers after checkpoints", answers_after_checkpoints
    yield "saves on rank 0 and logs weights", lambda: logs_after_rank_0("saves")
    yield "evaluates on rank 0 and logs weights", lambda: logs_after_rank_0("evaluates")
    yield "reloads states of their own shape", reloads_states_of_their_own_shape
    yield (
        "converts to its own type",
        lambda: train(Blocks([nn.Sequential(Converts(24, 24), nn.Tanh()) for _ in range(2)]), "ddp"),
    )
    yield "prunes amid training", lambda: train(Blocks(), "ddp", after_step=prunes)
    yield "answers from one unit", answers_from_one_unit
    yield "works on lists", works_on_lists
    yield "shrinks lists of weights", shrinks_lists_of_weights
    yield "compiles its step", compiles_its_step
    yield "divides by one norm", lambda: train(Blocks(), "ddp", optimizer_of=lambda ps: ByOneNorm(ps, lr=0.05))
    yield "reads whole states", lambda: train(FrozenAtTheEnd(), "ddp", after_step=reads_whole_states)
    yield "is cautious", lambda: train(Blocks(), "ddp", optimizer_of=lambda ps: Cautious(ps, lr=0.05))
    yield "takes layers out of their wrappers", takes_layers_out_of_their_wrappers
    yield "goes on after a step that failed", goes_on_after_a_step_that_failed
    yield "syncs states", lambda: train(Blocks(), "ddp", after_step=syncs_states)


if __name__ == "__main__":
    main(jobs)

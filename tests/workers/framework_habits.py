"""What scripts do with the means of their framework alone, a small job each, one after the other.

Arguments: "ddp", "fsdp1" or "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from script_habits import STEPS, Blocks, adamw, main, mean, squares, train, values_of, whole, wrapped
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Replaced(nn.Linear):
    """Puts a smaller weight in place of its own in its forward pass."""

    def forward(self, values):
        self.weight.data = self.weight.detach() * 0.99
        return super().forward(values)


class Coder(Blocks):
    """A model whose other method is a pass of training too, alone or inside of ``forward``."""

    def encode(self, values):
        return self.first(values).tanh()

    def forward(self, values):
        return super().forward(values) + self.encode(values).sum()


def scales_by_stacked_norms(model):
    norms = torch.stack([gradient.norm() for gradient in gradients_of(model)]).tolist()
    clip(model, sum(norm**2 for norm in norms) ** 0.5)


def adds_kept_sums(model):
    total = torch.zeros(1)
    for gradient in gradients_of(model):
        total += gradient.reshape(-1).square().sum(0, keepdim=True)
    clip(model, total.sqrt())


def clips_by_rank(model):
    """Only rank 0 looks at what clipping returns."""
    if dist.get_rank() == 0:
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def squares_after_dropping(job, values):
    with job.no_sync():
        squares(job, values).backward()
    job.zero_grad()
    return squares(job, -values)


def sums_norms(model):
    """Put the norm of all gradients together from those of the shards, as FSDP1 shows them."""
    total = torch.zeros(())
    for gradient in gradients_of(model):
        total += gradient.norm() ** 2
    dist.all_reduce(total)
    clip(model, total.sqrt())


def averages_squares(model):
    found = torch.stack([gradient.detach().square().sum() for gradient in gradients_of(model)]).mean()
    clip(model, found.item())


def clip(model, norm):
    for gradient in gradients_of(model):
        gradient.mul_(0.1 / norm)


def skips_faults(model):
    if not all(torch.isfinite(gradient).all() for gradient in gradients_of(model)):
        model.zero_grad()


def gradients_of(model):
    """Return those of which this rank has a part."""
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None and gradient.numel()]


def clips_twice(job, values):
    """Clip what the pass before has left, first."""
    norm = job.clip_grad_norm_(0.05)
    return squares(job, values) + 0.0 * float(norm)


def squares_after_waiting(job, values):
    part = job.blocks[0]
    part.set_requires_gradient_sync(False)
    squares(job, values).backward()
    part.set_requires_gradient_sync(True)
    return squares(job, -values)


def squares_after_the_root_waited(job, values):
    job.set_requires_gradient_sync(False)
    squares(job, values).backward()
    job.blocks[0].set_requires_gradient_sync(True)
    job.set_requires_gradient_sync(True)
    return squares(job, -values)


def squares_without_replicas(job, values):
    job.set_requires_all_reduce(False)
    return squares(job, values)


def edits_while_gathered(job, *, gathers_again=False):
    part = job.blocks[0]
    part.unshard()
    with torch.no_grad():
        part.weight.mul_(0.5)
    if gathers_again:
        part.unshard()
    part.reshard()
    return 0.0


def looks_while_gathered(job):
    job.blocks[0].unshard()
    found = mean(whole(job.blocks[0].weight.detach()).square().sum())
    job.blocks[0].reshard()
    return found


class Means:
    """Means of weights, and a momentum, made of FSDP2's own DTensors before the first pass of training."""

    def start(self, parameters):
        self.parameters = list(parameters)
        self.means = [parameter.detach().clone() for parameter in self.parameters]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        return adamw(self.parameters)

    def after_step(self, job):
        values = values_of(9, same=False)
        with torch.no_grad():
            now = list(job.parameters())
            for moment, parameter, mean_of in zip(self.moments, now, self.means, strict=True):
                moment.mul_(0.9).add_(parameter.grad)
                parameter.add_(moment, alpha=-0.05)
                mean_of.sub_((mean_of - parameter) * 0.1)
            torch._foreach_lerp_(self.means, [parameter.detach() for parameter in now], 0.3)
            before = [parameter.detach().clone() for parameter in now]
            for parameter, mean_of in zip(job.parameters(), self.means, strict=True):
                parameter.copy_(mean_of)
            found = mean(job(values).sum())
            job.reshard()  # FSDP2 keeps the root's parameters gathered
            for parameter, value in zip(job.parameters(), before, strict=True):
                parameter.data.copy_(value.data)
        return found


def keeps_means(framework):
    means = Means()
    return train(OneOutput(), framework, optimizer_of=means.start, after_step=means.after_step)


def assigns_data(job):
    for parameter in job["params"] if isinstance(job, dict) else job.parameters():
        parameter.data = parameter.detach() * 0.5
    return 0.0


def assigns_data_in_groups(framework):
    made = []
    start = lambda wanted: made.append(adamw(list(wanted))) or made[-1]  # noqa: E731
    return train(Blocks(), framework, optimizer_of=start, after_step=lambda _: assigns_data(made[-1].param_groups[0]))


def scales_data(job):
    for parameter in job.parameters():
        parameter.data *= 0.5
    return 0.0


def loads_while_gathered(job):
    state = {name: 0.5 * value for name, value in job.state_dict().items()}
    job.blocks[0].unshard()
    job.load_state_dict(state)
    job.blocks[0].reshard()
    return 0.0


def hooked(framework):
    model, calls = Coder(), []
    job = wrapped(model, framework)
    model.register_forward_hook(lambda *_: calls.append(1))
    register_fsdp_forward_method(job, "encode")
    optimizer, found = adamw(job.parameters()), []
    for step in range(STEPS):
        loss = job.encode(values=values_of(step, same=False)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [mean(loss.item()), float(len(calls))]
    return found


def coded(framework):
    model = Coder()

    def squares_of_both(job, values):
        if not isinstance(model.encode, type(squares)):
            register_fsdp_forward_method(job, "encode")
        return job.encode(values).square().mean() + squares(job, values)

    return train(model, framework, loss_of=squares_of_both)


def perturbs(job, values):
    """Change a weight by its gradient of a pass that is not reduced, as adversarial training does."""
    weight = job.module.first.weight
    with job.no_sync():
        squares(job, values).backward()
    before = weight.data.clone()
    if weight.grad is not None:
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
    loss = squares(job, values)
    loss.backward()
    weight.data.copy_(before)
    return 0.0 * squares(job, values)


def loads_by_assignment(job):
    job.load_state_dict({name: value.clone() for name, value in job.state_dict().items()}, assign=True)
    return 0.0


class Saving:
    """Rank 0 alone saves between backward and clipping."""

    def start(self, parameters):
        self.optimizer = adamw(parameters)
        return self.optimizer

    def after_backward(self, model):
        if dist.get_rank() == 0:
            self.saved = [model.state_dict(), self.optimizer.state_dict()]
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def saves_before_clipping(framework):
    saving = Saving()
    return train(Blocks(), framework, optimizer_of=saving.start, after_backward=saving.after_backward)


def checkpoints_composably():
    """Checkpoint blocks as torchtitan once did; what it keeps at a module stands beside what ``fully_shard`` keeps."""
    model = Blocks()
    for block in model.blocks:
        composable_checkpoint(block)
    return train(model, "fsdp2")


def steps_in_hooks(framework):
    model = Blocks()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    job = wrapped(model, framework)
    found = []
    for number in range(STEPS):
        loss = squares(job, values_of(number, same=True))
        loss.backward()
        found.append(mean(loss.item()))
    return found


def adds_rows_up(mesh=None):
    """Make norms of gradients and weights of this rank's rows, over the group that shards."""
    torch.manual_seed(0)
    model = fully_shard(Blocks(), mesh=mesh)
    group = mesh.get_group("shard") if mesh is not None else None
    optimizer, found = adamw(model.parameters()), []
    for step in range(STEPS):
        loss = squares(model, values_of(step, same=False))
        loss.backward()
        for rows in ([p.grad for p in model.parameters()], list(model.parameters())):
            total = sum(item.to_local().detach().square().sum() for item in rows)
            dist.all_reduce(total, group=group)
            found.append(mean(total))
        optimizer.step()
        optimizer.zero_grad()
    return found


def looks_at_whole_weights(job):
    return mean(sum(parameter.full_tensor().square().sum() for parameter in job.parameters()))


def by_layers(_):
    """Wrap the layers and not the model that holds them."""
    torch.manual_seed(0)
    model = Blocks()
    for part in (model.first, *model.blocks, model.last):
        fully_shard(part)
    return steps(model, adamw(model.parameters()))


def keeps_a_target(framework):
    """A second model that follows the first one by state dicts: loaded whole, then mixed in place and out of place."""
    target = wrapped(Blocks(), framework).requires_grad_(requires_grad=False)

    def follow(job):
        job.reshard()
        target.reshard()
        now = job.state_dict()
        target.load_state_dict(now)
        with torch.no_grad():
            for name, value in target.state_dict().items():
                value.lerp_(now[name] * 0.5, 0.3)
            old = target.state_dict()
            target.load_state_dict({name: 0.9 * old[name] + 0.1 * now[name] for name in old})
        return sum(float(whole(value).double().abs().sum()) for value in target.state_dict().values())

    return train(Blocks(), framework, after_step=follow)


def two_with_one_optimizer(_):
    torch.manual_seed(0)
    model = nn.Sequential(DistributedDataParallel(nn.Linear(16, 24)), DistributedDataParallel(nn.Linear(24, 8)))
    return steps(model, adamw(model.parameters()))


def names_of_classes(job):
    """Libraries choose by them, and know FSDP2's."""
    assert type(job).__name__ == "FSDPBlocks"
    shown = [f"{type(part).__module__}.{type(part).__qualname__}" for part in job.modules()]
    return float(sum(map(len, shown)))


class Rerun(Blocks):
    """Its blocks run again in backward, called by their parent, as transformers does it."""

    def forward(self, values):
        values = self.first(values).relu()
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False).relu()
        return self.last(values)


def loads_by_names_without_wrappers():
    """Load the states that were saved some steps ago, by helpers that leave wrappers out of names."""
    torch.manual_seed(0)
    model = Blocks()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block)
    job, saved, found = wrapped(model, "fsdp2"), None, []
    optimizer = adamw(job.parameters())
    for step in range(2 * STEPS):
        if step == STEPS // 2:
            saved = copy.deepcopy(get_state_dict(job, optimizer))
        if step == STEPS:
            set_state_dict(job, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        loss = squares(job, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.item()))
    return found


def steps(model, optimizer):
    found = []
    for step in range(STEPS):
        loss = squares(model, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.item()))
    return found


def resumes_by_sharded_states():
    """Save and load with torch's own recipe for FSDP1: sharded state dicts, and its loader of optimizers' states."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    found = []
    for part in range(2):
        torch.manual_seed(0)
        job = wrapped(Blocks(), "fsdp1")
        FullyShardedDataParallel.set_state_dict_type(job, StateDictType.SHARDED_STATE_DICT)
        optimizer = adamw(job.parameters())
        if part:
            states = {"model": job.state_dict()}
            checkpoints.load(states, checkpoint_id=folder[0])
            job.load_state_dict(states["model"])
            loaded = load_sharded_optimizer_state_dict(
                states["model"], "optimizer", checkpoints.FileSystemReader(folder[0])
            )["optimizer"]
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(job, optimizer, loaded))
        for step in range(STEPS):
            loss = squares(job, values_of(STEPS * part + step, same=False))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(mean(loss.item()))
        states = {"model": job.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(job, optimizer)}
        checkpoints.save(states, checkpoint_id=folder[0])
    return found


class OneOutput(Blocks):
    """Its last layer has one row, of which all ranks but one hold none."""

    def __init__(self):
        super().__init__()
        self.final = nn.Linear(self.last.out_features, 1)

    def forward(self, values):
        return self.final(super().forward(values))


def sends_weights_round(job):
    """Broadcast what all hold alike; then rank 0 alone makes a state dict."""
    for parameter in job.module.parameters():
        dist.broadcast(parameter.data, 0)
    return (
        sum(float(value.double().sum()) for value in job.module.state_dict().values()) if dist.get_rank() == 0 else 0.0
    )


def jobs(framework):
    if framework == "ddp":
        yield "sends weights round", lambda: train(OneOutput(), framework, after_step=sends_weights_round)
        yield (
            "puts weights in place in forward",
            lambda: train(Blocks([Replaced(24, 24) for _ in range(2)]), framework),
        )
        yield "clips by rank", lambda: train(Blocks(), framework, after_backward=clips_by_rank)
        yield "drops a pass", lambda: train(Blocks(), framework, loss_of=squares_after_dropping)
        yield "perturbs by a gradient of its own", lambda: train(Blocks(), framework, loss_of=perturbs)
        yield "loads by assignment", lambda: train(Blocks(), framework, after_step=loads_by_assignment)
        yield "saves before clipping", lambda: saves_before_clipping(framework)
        yield "steps in hooks", lambda: steps_in_hooks(framework)
        yield "trains two with one optimizer", lambda: two_with_one_optimizer(framework)
    elif framework == "fsdp1":
        yield "sums norms of shards", lambda: train(Blocks(), framework, after_backward=sums_norms)
        yield "scales by norms of shards", lambda: train(Blocks(), framework, after_backward=scales_by_stacked_norms)
        yield "adds sums of shards", lambda: train(Blocks(), framework, after_backward=adds_kept_sums)
        yield "averages squares of shards", lambda: train(Blocks(), framework, after_backward=averages_squares)
        yield "skips faults", lambda: train(Blocks(), framework, after_backward=skips_faults)
        yield "clips", lambda: train(Blocks(), framework, loss_of=clips_twice)
        yield "resumes by sharded states", resumes_by_sharded_states
    else:
        yield "lets a part wait", lambda: train(Blocks(), framework, loss_of=squares_after_waiting)
        yield "lets the root wait", lambda: train(Blocks(), framework, loss_of=squares_after_the_root_waited)
        yield "has no replicas", lambda: train(Blocks(), framework, loss_of=squares_without_replicas)
        yield "edits while gathered", lambda: train(Blocks(), framework, after_step=edits_while_gathered)
        yield "scales data", lambda: train(Blocks(), framework, after_step=scales_data)
        edits_again = partial(edits_while_gathered, gathers_again=True)
        yield "gathers twice and edits", lambda: train(Blocks(), framework, after_step=edits_again)
        yield "loads while gathered", lambda: train(Blocks(), framework, after_step=loads_while_gathered)
        yield "has hooks and another method", lambda: hooked(framework)
        yield "looks while gathered", lambda: train(Blocks(), framework, after_step=looks_while_gathered)
        yield "keeps means of weights", lambda: keeps_means(framework)
        yield "assigns data", lambda: train(Blocks(), framework, after_step=assigns_data)
        yield "assigns data in groups", lambda: assigns_data_in_groups(framework)
        yield "trains by another method", lambda: coded(framework)
        yield "adds rows up", adds_rows_up
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        yield "adds rows up in groups", lambda: adds_rows_up(mesh)
        yield "looks at whole weights", lambda: train(Blocks(), framework, after_step=looks_at_whole_weights)
        yield "wraps layers alone", lambda: by_layers(framework)
        yield "runs blocks again", lambda: train(Rerun(), framework)
        yield "loads by names without wrappers", loads_by_names_without_wrappers
        yield "checkpoints by torch's composable function", checkpoints_composably
        yield "keeps a target by state dicts", lambda: keeps_a_target(framework)
        yield "goes by names", lambda: train(Blocks(), framework, after_step=names_of_classes)


if __name__ == "__main__":
    main(jobs)

"""What a training script may do between its first and its last line, each as one function of a job.

Each draws its own choices from the generator it gets and returns what a user would see.
"""

from __future__ import annotations

import contextlib

import torch
from differential_jobs import BrokenOffError, copy_of
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from paro_advise.errors import UsageError

STRATEGIES = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG")


def number_of(value):
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def passes(job, count, *, gated):
    """Micro-batches of one step; returns the mean losses."""
    seen = []
    for place in range(count):
        if gated and place < count - 1:
            with job.no_sync():
                losses = job.next_losses()
                job.backward(losses, 1.0 / count)
        else:
            losses = job.next_losses()
            job.backward(losses, 1.0 / count)
        seen.append(job.mean(sum(item.item() for item in losses)))
    return seen


def clip(job, choice):
    """Clip as scripts do; returns the norm."""
    parameters = list(job.model.parameters())
    if choice == "norm":
        return [number_of(clip_grad_norm_(parameters, 0.3))]
    if choice == "value":
        clip_grad_value_(parameters, 0.01)
    if choice == "hand":
        norm = sum(item.grad.norm() ** 2 for item in parameters if item.grad is not None) ** 0.5
        if norm > 0.3:
            for item in parameters:
                if item.grad is not None:
                    item.grad.mul_(0.3 / norm)
        return [number_of(norm)]
    if choice == "item":
        norm = sum(item.grad.norm().item() ** 2 for item in parameters if item.grad is not None) ** 0.5
        for item in parameters:
            if item.grad is not None:
                item.grad.data.mul_(min(1.0, 0.3 / (norm + 1e-6)))
        return [norm]
    if choice == "finite":
        fine = all(torch.isfinite(item.grad).all() for item in parameters if item.grad is not None)
        worst = max(float(item.grad.abs().max()) for item in parameters if item.grad is not None)
        return [float(fine), worst]
    return []


def step(job, rng):
    """The usual one."""
    count, gated = rng.choice([1, 1, 2, 3]), rng.random() < 0.5
    to_none = rng.random() < 0.8
    seen = passes(job, count, gated=gated)
    seen += clip(job, rng.choice(["", "norm", "norm", "value", "hand", "item", "finite"]))
    job.optimizer.step()
    if rng.random() < 0.5:
        job.optimizer.zero_grad(set_to_none=to_none)
    else:
        job.model.zero_grad(set_to_none=to_none)
    return seen


def leave_out(job, rng):
    """A block that no rank uses in this step: its parameters get no gradient, and no weight decay."""
    left_out = job.model.blocks[rng.randrange(2)]
    left_out.is_left_out = True
    seen = step(job, rng)
    left_out.is_left_out = False
    return seen


def evaluate(job, rng):
    del rng
    job.model.eval()
    with torch.no_grad():
        losses = job.next_losses()
    job.model.train()
    return [job.mean(sum(item.item() for item in losses))]


def drop_a_forward(job, rng):
    """A forward pass that no backward follows."""
    del rng
    return [job.mean(sum(item.item() for item in job.next_losses()))]


def evaluate_before_step(job, rng):
    """Between backward and step comes a pass whose output may be of any kind."""
    seen = passes(job, 2, gated=rng.random() < 0.5)
    job.model.output = rng.choice(["logits", "dataclass", "none", "dict", "list"])
    if rng.random() < 0.5:
        seen += evaluate(job, rng)
    else:
        seen += drop_a_forward(job, rng)
    job.model.output = "logits"
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def train_on_odd_outputs(job, rng):
    job.model.output = rng.choice(["dataclass", "none", "dict", "list"])
    seen = step(job, rng)
    job.model.output = "logits"
    return seen


def break_off(job, rng):
    """An exception in a pass, caught; then gradients are dropped and training goes on."""
    if rng.random() < 0.5:
        passes(job, 1, gated=rng.random() < 0.5)
    job.model.blocks[rng.randrange(2)].breaks_in = rng.choice(["forward", "backward"])
    try:
        job.backward(job.next_losses())
    except BrokenOffError:
        pass
    else:
        raise AssertionError("nothing was raised")
    for block in job.model.blocks:
        block.breaks_in = ""
    job.optimizer.zero_grad()
    job.number += 3  # several ranks' data were not all read
    return []


def edit_parameters(job, rng):
    """Changes by hand to what the model computes with."""
    kind, factor = rng.choice(["clamp", "mul", "data", "set", "one", "copy"]), rng.choice([0.9, 1.1])
    with torch.no_grad():
        for item in job.model.parameters():
            if kind == "clamp":
                item.clamp_(-0.4, 0.4)
            elif kind == "mul":
                item.mul_(factor)
            elif kind == "data":
                item.data.mul_(factor)
            elif kind == "set":
                item.data = item.data * factor
            elif kind == "copy":
                item.copy_(item * factor)
        if kind == "one":
            job.model.head.bias.fill_(0.1)
    return []


def edit_groups(job, rng):
    """Sharpness-aware steps and their kin: parameters of the optimizer are moved, used, and moved back."""
    kind = rng.choice(["add", "data", "set", "list"])
    with torch.no_grad():
        for group in job.optimizer.param_groups:
            if kind == "list":
                torch._foreach_add_(group["params"], 0.01)
            for item in group["params"] if kind != "list" else ():
                if kind == "add":
                    item.add_(0.01)
                elif kind == "data":
                    item.data.add_(0.01)
                else:
                    item.data = item.data + 0.01
    seen = passes(job, 1, gated=False)
    with torch.no_grad():
        for group in job.optimizer.param_groups:
            for item in group["params"]:
                item.sub_(0.01)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def decay_by_hand(job, rng):
    """Groups are changed after a step, as Lookahead does; the next pass must see it."""
    seen = passes(job, 1, gated=False)
    job.optimizer.step()
    with torch.no_grad():
        for group in job.optimizer.param_groups:
            for item in group["params"]:
                if rng.random() < 0.7:
                    item.mul_(0.97)
    job.optimizer.zero_grad()
    return seen


def edit_states(job, rng):
    factor = rng.choice([0.0, 0.5])
    for state in job.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(factor)
    return []


def edit_settings(job, rng):
    for group in job.optimizer.param_groups:
        group["lr"] *= rng.choice([0.5, 1.5])
    return []


def of_either_side(job, rng):
    """Return the parameters as the model holds them, or as the optimizer's groups do."""
    if rng.random() < 0.5:
        return list(job.model.parameters())
    return [item for group in job.optimizer.param_groups for item in group["params"]]


def edit_gradients(job, rng):
    """What scripts do to gradients between backward and step."""
    seen = passes(job, rng.choice([1, 2]), gated=rng.random() < 0.5)
    kind = rng.choice(["mul", "replace", "zero", "none", "data"])
    for place, item in enumerate(of_either_side(job, rng)):
        if item.grad is None:
            continue
        if kind == "mul":
            item.grad.mul_(0.5)
        elif kind == "data":
            item.grad.data.mul_(0.5)
        elif kind == "replace":
            item.grad = item.grad * 0.5
        elif place % 3 == 0:
            if kind == "zero":
                item.grad.zero_()
            else:
                item.grad = None
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def drop_while_accumulating(job, rng):
    """Gradients are dropped in the middle of an accumulation, in each way that scripts know."""
    passes(job, 1, gated=False)
    if rng.random() < 0.5:
        with job.no_sync():
            job.backward(job.next_losses())
    kind = rng.choice(["optimizer", "model", "none"])
    if kind == "optimizer":
        job.optimizer.zero_grad()
    elif kind == "model":
        job.model.zero_grad()
    else:
        for item in of_either_side(job, rng):
            item.grad = None
    return step(job, rng)


def add_up(job, rng):
    """More passes after gradients are on show: they add up."""
    seen = passes(job, 1, gated=False)
    seen += passes(job, rng.choice([1, 2]), gated=rng.random() < 0.5)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def forward_twice(job, rng):
    """Two forward passes, then two backward passes."""
    del rng
    first, second = job.next_losses(), job.next_losses()
    job.backward(first)
    job.backward(second)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return []


def clear_before_backward(job, rng):
    del rng
    losses = job.next_losses()
    job.optimizer.zero_grad()
    job.backward(losses)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return []


def closure(job, rng):
    count = rng.choice([1, 2])
    seen = []

    def again():
        job.optimizer.zero_grad()
        seen.extend(passes(job, count, gated=False))
        return torch.tensor(seen[-1])

    job.optimizer.step(again)
    job.optimizer.zero_grad()
    return seen


def freeze(job, rng):
    """A block stops or begins to learn."""
    block = job.model.blocks[rng.randrange(2)]
    wanted = not next(block.parameters()).requires_grad
    job.optimizer.zero_grad()
    block.requires_grad_(wanted)
    return step(job, rng)


def save_model(job, rng):
    del rng
    job.kept["model"] = copy_of(job.model.state_dict())
    return []


def load_model(job, rng):
    del rng
    if "model" in job.kept:
        job.model.load_state_dict(job.kept["model"])
    return []


def save_optimizer(job, rng):
    del rng
    job.kept["optimizer"] = copy_of(job.optimizer.state_dict())
    return []


def load_optimizer(job, rng):
    del rng
    if "optimizer" in job.kept:
        job.optimizer.load_state_dict(copy_of(job.kept["optimizer"]))
    return []


def average(job, rng):
    """An exponential mean of parameters is kept, and sometimes put in their place."""
    with torch.no_grad():
        means = job.kept.setdefault("means", {})
        for name, item in job.model.named_parameters():
            if name in means:
                means[name].lerp_(item, 0.5)
            else:
                means[name] = item.detach().clone()
        if rng.random() < 0.5:
            for name, item in job.model.named_parameters():
                item.copy_(means[name])
    return []


def switch(job, rng):
    wanted = rng.choice(STRATEGIES)
    job.kept.clear()  # of the old shapes
    job.switch(wanted)
    return []


def switch_amid(job, rng):
    """A switch where gradients wait must be refused, or keep them."""
    wanted = rng.choice(STRATEGIES)
    seen = passes(job, 1, gated=False) if rng.random() < 0.3 else []
    with job.no_sync():
        losses = job.next_losses()
        if rng.random() < 0.7:
            job.backward(losses)
            losses = []
    with contextlib.suppress(UsageError):
        job.switch(wanted)
    job.kept.clear()
    job.backward(losses)
    seen += passes(job, 1, gated=False)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


# Twice where scripts do it more often.
OPERATIONS = (
    step,
    step,
    leave_out,
    evaluate,
    drop_a_forward,
    evaluate_before_step,
    train_on_odd_outputs,
    break_off,
    edit_parameters,
    edit_groups,
    decay_by_hand,
    edit_states,
    edit_settings,
    edit_gradients,
    drop_while_accumulating,
    add_up,
    forward_twice,
    clear_before_backward,
    closure,
    freeze,
    save_model,
    load_model,
    save_optimizer,
    load_optimizer,
    average,
    switch,
    switch_amid,
)

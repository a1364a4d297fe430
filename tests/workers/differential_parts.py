"""What scripts do to parts of parameters, gradients and states, and with functions that torch lacks for shards."""

from __future__ import annotations

import torch
from differential_operations import OPERATIONS, passes
from torch import nn

LAYERS = ("embed", "head", "blocks.0.up", "blocks.1.down")


def weight_of(job, rng):
    return job.model.get_submodule(rng.choice(LAYERS)).weight


def change_part(tensor, rng):
    """Change rows, columns or views of a tensor in place."""
    kind = rng.choice(["row", "rows", "set", "columns", "chunk", "flat", "index", "each", "mask", "diagonal"])
    match kind:
        case "row":
            tensor[rng.randrange(5)].zero_()
        case "rows":
            tensor[1:4].mul_(0.5)
        case "set":
            tensor[2:5] = 0.05
        case "columns":
            tensor[:, 1:3].add_(0.1)
        case "chunk":
            first, *_ = tensor.chunk(2, dim=rng.randrange(2))
            first.mul_(0.5)
        case "flat":
            tensor.view(-1)[7:19].fill_(0.1)
        case "index":
            tensor.index_fill_(0, torch.tensor([0, 3]), 0.02)
        case "each":
            for row in tensor:
                row.div_(1.0 + row.norm())
        case "mask":
            tensor[tensor < 0] = 0.0
        case "diagonal":
            tensor.t().diagonal().fill_(0.2)


def edit_parts(job, rng):
    weight = weight_of(job, rng)
    with torch.no_grad():
        change_part(weight.data if rng.random() < 0.5 else weight, rng)
    return []


def edit_parts_of_groups(job, rng):
    place, group = rng.randrange(3), job.optimizer.param_groups[0]
    with torch.no_grad():
        change_part(group["params"][place], rng)
    return []


def edit_parts_of_gradients(job, rng):
    seen = passes(job, rng.choice([1, 2]), gated=rng.random() < 0.5)
    gradient = weight_of(job, rng).grad
    if gradient is not None:
        change_part(gradient, rng)
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def draw(job, rng):
    """Noise on gradients or new first values, drawn by all ranks alike."""
    seen = passes(job, 1, gated=False)
    torch.manual_seed(rng.randrange(100))
    if rng.random() < 0.5:
        for item in job.model.parameters():
            if item.grad is not None:
                item.grad.add_(torch.randn_like(item.grad), alpha=0.01)
    else:
        layer = job.model.get_submodule(rng.choice(LAYERS))
        rng.choice([layer.reset_parameters, lambda: nn.init.normal_(layer.weight, std=0.1)])()
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def edit_states_by_parameter(job, rng):
    """States are looked up by the model's parameters, read, scaled, set and forgotten."""
    kind, seen = rng.choice(["scale", "rows", "replace", "forget"]), []
    for item in job.model.parameters():
        state = job.optimizer.state.get(item, {})
        for key, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            seen.append(float(value.norm()))
            if kind == "scale":
                value.mul_(torch.full(item.shape, 0.5))
            elif kind == "rows" and value.dim() > 1:
                value[1:3] = 0.01
            elif kind == "replace":
                state[key] = torch.full_like(item, 0.01, requires_grad=False)
        if kind == "forget" and rng.random() < 0.3 and item in job.optimizer.state:
            del job.optimizer.state[item]
    return seen


def look_at_values(job, rng):
    """Statistics that loggers take of weights and gradients."""
    seen = passes(job, 1, gated=False)
    for item in job.model.parameters():
        for tensor in (item.detach(), item.grad):
            if tensor is not None:
                seen += [
                    float(abs(tensor.cpu().numpy()).max()),
                    sum(tensor.flatten().tolist()),
                    float(torch.quantile(tensor.float(), 0.5)),
                    float(f"{tensor.abs().mean():.4e}"),
                    float(tensor.flatten()[rng.randrange(6)]),
                    float(tensor.abs().flatten().topk(2).values[-1]),
                ]
    job.optimizer.step()
    job.optimizer.zero_grad()
    return seen


def evaluate_other_weights(job, rng):
    """A pass with other weights than the model's, which stay as they are."""
    other = {name: torch.full(item.shape, 0.03) for name, item in job.model.named_parameters()}
    if rng.random() < 0.5:
        other = {name: nn.Parameter(item) for name, item in other.items()}
    with torch.no_grad():
        found = torch.func.functional_call(job.model, other, (torch.arange(10).view(2, 5),))
    return [float(found.sum())]


ALL_OPERATIONS = (
    *OPERATIONS,
    edit_parts,
    edit_parts_of_groups,
    edit_parts_of_gradients,
    draw,
    edit_states_by_parameter,
    look_at_values,
    evaluate_other_weights,
)

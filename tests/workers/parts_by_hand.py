"""Parts of sharded tensors, functions that torch lacks for shards, draws, states by parameter, and other weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from sharding_by_hand import both, fresh, one_pass, refused, sgd
from sharding_worker import Model, data
from torch import nn

from paro_advise.runtime import shard, switch

SHARDED = ("III", "IIG", "ING", "GIG", "GGG")


def square(model):
    """37 x 37: no number of ranks divides it, so that it is cut by rows, unevenly."""
    return model.blocks[0].between.weight


def stepped(model, optimizer, step):
    one_pass(model, step)
    optimizer.step()
    optimizer.zero_grad()


def rows_of_weights(model, optimizer, remembered):
    """Rows that other ranks hold are set to zero, scaled, filled; views are written through."""
    stepped(model, optimizer, 0)
    with torch.no_grad():
        square(model)[3].zero_()
        square(model)[2:7].mul_(0.5)
        square(model).data[30] = 0.01
        square(model).data[:, 3] *= 2
        square(model).data[5:9, 3:5].copy_(torch.ones(4, 2))
        query, _, value = square(model).data.split([10, 20, 7])
        query.mul_(0.5)
        value.zero_()
        for row in square(model).data:
            row.div_(1.0 + row.norm())
        square(model).data.view(-1)[5] = 1.0
        square(model).index_copy_(0, torch.tensor([1, 3]), torch.ones(2, 37))
        square(model).tril_()
    stepped(model, optimizer, 1)


def several_views(model, optimizer, remembered):
    """Views live side by side and over steps; each write touches its own elements only."""
    stepped(model, optimizer, 0)
    with torch.no_grad():
        weight = square(model)
        first, second = weight[:5], weight[5:10]
        first.zero_()
        second.zero_()
        row = weight.data[20]
        weight.data.mul_(0.5)
        row.mul_(2.0)
        weight.data[12].data.zero_()
        torch._foreach_mul_([weight.data[13], weight.data[14]], 0.0)
        weight.data[3, 4] = 9.0
        weight.data[36, 36] = weight.data[0, 0].item()
    kept = square(model)[30]
    row, buffer = square(model).data[31], optimizer.state[square(model)]["momentum_buffer"]
    stepped(model, optimizer, 1)
    with torch.no_grad():
        kept.zero_()
        row.mul_(0.5)
    buffer[3].zero_()
    buffer[4:6].fill_(0.05)
    optimizer.state.update({model.embed.weight: {"momentum_buffer": torch.full((29, 16), 0.1)}})
    one_pass(model, 2)
    square(model).grad.mul_((square(model).grad > 0).any(0).float())
    square(model).grad[3, 4] = 0.5
    optimizer.step()


def parts_into_parameters(model, optimizer, remembered):
    """What was cut through shards is written into other parameters: by lists, as an output, in place."""
    stepped(model, optimizer, 0)
    with torch.no_grad():
        first, second = (block.between.weight for block in list(model.blocks)[:2])
        part = second.data.flatten()[: 37 * 36].view(36, 37)
        other = torch.cat([part, torch.zeros(1, 37)])
        torch._foreach_add_([first.data], [other], alpha=0.1)
        torch._foreach_add_([first.data[:36]], [part], alpha=0.1)
        torch.add(second.data.flatten().view(37, 37), 0.01, out=second.data)
        second.data.sub_(first.data.flatten().view(37, 37) * 0.1)
        part.add_(first.data[:36])
    stepped(model, optimizer, 1)


def few_elements(model, optimizer, remembered):
    """Tensors of which some ranks hold nothing: what fails there is decided alike everywhere."""
    one_pass(model, 0)
    norm = model.norm.bias.grad[:1]
    scale = sum(float(item.grad.amax() - item.grad.amin() + item.grad.median()) for item in model.parameters())
    for item in model.parameters():
        item.grad.mul_(1.0 + abs(scale) + float(norm))
    optimizer.step()


def rows_at_the_optimizer(model, optimizer, remembered):
    """The same on the optimizer's side, which other shards may be of."""
    stepped(model, optimizer, 0)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter[3].zero_()
                    parameter.data[4:6] = 0.1
                    parameter.mul_(torch.full(parameter.shape, 0.9))
    stepped(model, optimizer, 1)


def rows_of_gradients(model, optimizer, remembered):
    """Rows of gradients, before another backward pass adds to them and after."""
    one_pass(model, 0)
    gradient = square(model).grad
    gradient[:5] = 0
    gradient[7].mul_(2)
    gradient.narrow(0, 10, 3).zero_()
    gradient.view(-1)[100:200].mul_(3)
    one_pass(model, 1)
    square(model).grad.flatten().mul_(0.5)
    square(model).grad[torch.arange(3)] = 0.1
    optimizer.step()


def functions_of_whole_tensors(model, optimizer, remembered):
    """Thresholds, sums over flattened gradients, clipping row by row: torch has no rule for shards for some."""
    one_pass(model, 0)
    for parameter in model.parameters():
        size = parameter.grad.abs().flatten()
        parameter.grad.clamp_(-size.topk(2).values[-1].item(), torch.quantile(size, 0.9).item())
        parameter.grad[parameter.grad.abs() < size.kthvalue(2).values] = 0
    flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
    scale = 1.0 / (1.0 + flat.norm())
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
        if parameter.dim() > 1:
            norm = parameter.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3)
            parameter.grad.copy_(torch.where(parameter.grad > norm, norm, parameter.grad))
    optimizer.step()
    optimizer.zero_grad()
    values = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(values * 0.9, model.parameters())
    total = sum(float((parameter.detach().cpu().numpy() ** 2).sum()) for parameter in model.parameters())
    total += sum(model.norm.weight.tolist()) + float(f"{model.head.weight.mean():.3f}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 / total)
    stepped(model, optimizer, 1)


def plain_tensors_among_sharded_ones(model, optimizer, remembered):
    """A plain tensor is changed by a single value of sharded ones; lists hold both kinds."""
    one_pass(model, 0)
    plain = torch.full((3,), 2.0)
    with torch.no_grad():
        plain.mul_(square(model).norm())
        plain += square(model).mean()
        square(model).div_(plain.sum())
    gradients = [plain, *(parameter.grad for parameter in model.parameters()), torch.ones(2, 2)]
    torch._foreach_mul_(gradients, 0.5)
    sizes = torch.stack(torch._foreach_norm(gradients))
    assert not sizes[0].isnan()
    torch._foreach_div_(gradients, [size + 1.0 for size in sizes])
    with torch.no_grad():
        square(model).mul_(1.0 + 0.1 * sizes.norm() + plain.sum())
    optimizer.step()
    optimizer.zero_grad()
    stepped(model, optimizer, 1)


@torch.no_grad()
def draw_in_step(optimizer, *_):
    """Noise, masks and stochastic rounding, as optimizers by hand draw them."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad.add_(torch.randn_like(parameter), alpha=0.01)
        parameter.grad.mul_(torch.rand_like(parameter.grad) < 0.9)
        parameter.grad.mul_(torch.bernoulli(torch.full_like(parameter, 0.9)))
        parameter.grad.copy_(nn.functional.dropout(parameter.grad, 0.1))
        parameter.add_(torch.empty_like(parameter).normal_(0, 0.01))
        parameter.add_(torch.randint_like(parameter, 0, 3), alpha=0.01)
        parameter.add_(torch.normal(parameter, 0.5), alpha=0.01)
        parameter.add_(torch.bernoulli(torch.full_like(parameter, 0.5), out=torch.empty_like(parameter)), alpha=0.01)


def draws(model, optimizer, remembered):
    """Noise and new first values are those of one process whose generator stands where those of all ranks do."""
    one_pass(model, 0)
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        parameter.grad += torch.empty_like(parameter.grad).normal_(0, 0.01)
        parameter.grad.copy_(nn.functional.dropout(parameter.grad, 0.3))
    in_step = optimizer.register_step_pre_hook(draw_in_step)
    optimizer.step()
    in_step.remove()
    optimizer.zero_grad()
    for part in (model.head, model.norm, model.embed, model.blocks[0].up):
        part.reset_parameters()
    nn.init.normal_(model.blocks[0].down.weight, std=0.1)
    nn.init.trunc_normal_(model.blocks[1].up.weight, std=0.1)
    nn.init.orthogonal_(model.blocks[1].up.weight)
    model.blocks[2].up.weight.data.exponential_(50.0)
    stepped(model, optimizer, 1)


def states_by_parameter(model, optimizer, remembered):
    """The model's parameters, of today and remembered, find the optimizer's states."""
    stepped(model, optimizer, 0)
    for parameter in model.parameters():
        assert parameter in optimizer.state
        optimizer.state[parameter]["momentum_buffer"].mul_(torch.full(parameter.shape, 0.5))
    for parameter in remembered():
        if parameter.dim() > 1:
            optimizer.state[parameter]["momentum_buffer"][3:5] = 0
    del optimizer.state[model.head.weight]
    stepped(model, optimizer, 1)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.1, requires_grad=False)
    optimizer.state[model.embed.weight] = {}
    stepped(model, optimizer, 2)


def collectives_of_the_script(model, optimizer, remembered):
    """Gradients and parameters in collectives are whole ones, equal on all ranks; old ways to clear gradients work."""
    one_pass(model, 0)
    if type(model) is not Model:
        count = dist.get_world_size()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(count)
            dist.all_reduce(parameter.grad, async_op=True).wait()
            parameter.grad /= count
        dist.broadcast(model.head.weight.data, 0)
        gathered = [torch.empty(square(model).shape) for _ in range(count)]
        dist.all_gather(gathered, square(model).detach())
        assert torch.equal(gathered[0], gathered[-1])
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.detach_()
        torch.mul(parameter.grad, 0.5, out=parameter.grad)
    optimizer.step()


def others_in_their_place():
    """A parameter that is replaced or tied later would not be trained: said at the next pass."""

    def replace(model):
        model.head.weight = nn.Parameter(torch.full((29, 16), 0.05))

    def tie(model):
        model.head.weight = model.embed.weight

    for change in (replace, tie):
        for strategy in ("NNN", "NNG", *SHARDED):
            model = fresh()
            model, optimizer = shard(model, sgd(model), strategy, group_size=2)
            stepped(model, optimizer, 0)
            change(model)
            refused("must stay the parameter", lambda m=model: one_pass(m, 1))


def chosen_inputs():
    """A backward pass for some sharded parameters only would make no gradient at all."""

    def chosen(model, optimizer, remembered):
        ranks = range(dist.get_world_size()) if type(model) is Model else [dist.get_rank()]
        for rank in ranks:
            loss = model(data(0, 0, rank)[:, :-1]).square().mean() / len(ranks)
            loss.backward(inputs=list(model.parameters()))
        optimizer.step()

    both(chosen, strategies=("NNN", "NNG", "NIG"))
    for strategy in SHARDED:
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2)
        refused("gradients of all sharded parameters", lambda m=model, o=optimizer: chosen(m, o, None))


def other_weights():
    """A pass with other weights uses them and leaves the model's alone, or is refused where a gather would hide them."""

    def averaged(kind):
        def follow(model, optimizer, remembered):
            stepped(model, optimizer, 0)
            given = {name: kind(torch.full(value.shape, 0.03)) for name, value in fresh().named_parameters()}

            def evaluate():
                with torch.no_grad():
                    return torch.func.functional_call(model, given, (data(0, 0, 0)[:, :-1],)).double().sum().item()

            if type(model) is Model:
                expected.append(evaluate())
            elif isinstance(square(model), torch.distributed.tensor.DTensor):
                refused("the model's own weights", evaluate)
            else:
                assert evaluate() == expected[-1]
            stepped(model, optimizer, 1)

        return follow

    expected: list[float] = []
    for kind in (torch.Tensor.clone, nn.Parameter):
        both(averaged(kind), strategies=("NNN", "NNG", "NIG", "IIG", "GGG"))


def gradients_by_autograd():
    """Gradients that torch.autograd.grad makes reach no sharded parameter: said at that line, nothing has changed."""
    for strategy in SHARDED:
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2)
        loss = model(data(0, 0, dist.get_rank())[:, :-1]).square().mean()
        for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):

            def by_autograd(m=model, value=loss, options=options):
                torch.autograd.grad(value, list(m.parameters()), **options)

            refused("loss.backward", by_autograd)
        optimizer.zero_grad()
        stepped(model, optimizer, 0)


class Scaled(torch.optim.SGD):
    """Scales gradients by what a script has set on their parameters."""

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(getattr(parameter, "lr_scale", 1.0))
        super().step(closure)


def scaled(model):
    for number, parameter in enumerate(model.parameters()):
        parameter.lr_scale = 0.1 if number % 2 else 1.0
    return Scaled(model.parameters(), lr=0.1)


def attributes_of_parameters(model, optimizer, remembered):
    """What is set on parameters is there for the optimizer and for the script, after a switch as well."""
    for step in range(3):
        optimizer.zero_grad()
        if step == 2 and type(model) is not Model:
            switch(model, "GGG")
        if step == 1:  # another value than the first pass has seen
            for parameter in model.parameters():
                parameter.lr_scale *= 0.5
        one_pass(model, step)
        for parameter in model.parameters():
            parameter.grad.mul_(2 * parameter.lr_scale)
        optimizer.step()


def copies_and_pickles():
    """Parameters, gradients and states are copied and pickled as tensors that need nothing of ours to be read."""
    for strategy in ("NNN", "NNG", *SHARDED):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2)
        stepped(model, optimizer, 0)
        assert len(copy.deepcopy(optimizer.state)) == len(optimizer.state)
        assert len(optimizer.state.copy()) == len(optimizer.state)
        with torch.inference_mode():
            float(square(model)[3].sum())
        copied = copy.deepcopy(dict(model.named_parameters()))
        state = copy.deepcopy(model.state_dict())
        buffer = io.BytesIO()
        torch.save(dict(model.named_parameters()), buffer)
        pickled = pickle.dumps(square(model).data)
        assert b"paro_advise" not in buffer.getvalue()
        assert b"paro_advise" not in pickled
        for name, parameter in model.named_parameters():
            assert torch.equal(copied[name].detach(), parameter.detach())
            assert torch.equal(state[name], parameter.detach())


def state_of_nothing(model, optimizer, remembered):
    """An optimizer without states, some of whose parameters are frozen, loads its own state."""
    for step in range(2):
        stepped(model, optimizer, step)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def without_states(model):
    model.blocks[0].requires_grad_(False)
    return torch.optim.SGD(model.parameters(), lr=0.1)


CASES = (
    lambda: both(rows_of_weights),
    lambda: both(several_views),
    lambda: both(parts_into_parameters),
    lambda: both(few_elements),
    lambda: both(rows_at_the_optimizer),
    lambda: both(rows_of_gradients),
    lambda: both(functions_of_whole_tensors, tolerance=5e-6),
    lambda: both(plain_tensors_among_sharded_ones),
    lambda: both(draws, tolerance=5e-6),
    lambda: both(states_by_parameter),
    lambda: both(state_of_nothing, make_optimizer=without_states),
    lambda: both(collectives_of_the_script),
    lambda: both(attributes_of_parameters, make_optimizer=scaled),
    others_in_their_place,
    chosen_inputs,
    other_weights,
    gradients_by_autograd,
    copies_and_pickles,
)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    for case in CASES:
        case()
        if dist.get_rank() == 0:
            print("held", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

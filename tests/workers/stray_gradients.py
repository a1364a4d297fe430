"""Gradients that come to parameters on other ways than through the forward pass of their module."""

from __future__ import annotations

import contextlib
import gc
from datetime import timedelta

import torch
import torch.distributed as dist
from sharding_by_hand import both, fresh, one_pass, refused, sgd
from sharding_worker import Model, compare_parameters, data, loss_of, whole_parameters

from paro_advise.errors import DivergedError
from paro_advise.runtime import shard


def penalties():
    """A penalty on the distance to remembered weights: equal where parameters are whole, refused where they are not."""

    def penalised(model, step):
        old = {name: value.detach() for name, value in fresh().named_parameters()}
        ranks = range(dist.get_world_size()) if type(model) is Model else [dist.get_rank()]
        for rank in ranks:
            penalty = sum(((value - old[name]) ** 2).sum() for name, value in model.named_parameters())
            ((loss_of(model, data(step, 0, rank)) + 0.5 * penalty) / len(ranks)).backward()

    def weight_penalty(model, optimizer, remembered):
        for step in range(3):
            optimizer.zero_grad()
            penalised(model, step)
            optimizer.step()

    both(weight_penalty, strategies=("NNN", "NNG", "NIG"))
    for strategy in ("III", "IIG", "GGG"):
        model = fresh()
        model, _ = shard(model, sgd(model), strategy, group_size=2)
        refused("whose gradient would be lost", lambda model=model: penalised(model, 0))


def gradients_out_of_nothing():
    """A gradient that no backward pass made would go nowhere: it is refused at its line, and the model trains on."""

    def set_by_hand(model):
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)

    def trains_after_a_refusal(model, optimizer, remembered):
        if type(model) is not Model:
            refused("made by a backward pass", lambda: set_by_hand(model))
        for step in range(2):
            optimizer.zero_grad()
            one_pass(model, step)
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5
            optimizer.step()

    both(trains_after_a_refusal)


def replaced_at_the_optimizer():
    """A gradient that is replaced through the optimizer's groups is what later backward passes add to."""

    def halved(model, optimizer, remembered):
        for step in range(2):
            one_pass(model, step)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.grad * 0.5
            one_pass(model, step + 5)
            optimizer.step()
            optimizer.zero_grad()

    both(halved)


def hooks_on_gradients():
    """Hooks are called as on one process, or refused at their line where they would never be."""

    def hooked(model, optimizer, remembered):
        for step in range(3):
            if step == 1:
                for parameter in model.parameters():
                    parameter.register_hook(lambda gradient: gradient * 0.5)
            one_pass(model, step)
            optimizer.step()
            optimizer.zero_grad()

    both(hooked, strategies=("NNN", "NNG", "NIG"), group_size=2)
    for strategy in ("NNG", "III", "IIG", "GGG"):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2)
        one_pass(model, 0)
        optimizer.step()
        for parameter in model.parameters():
            refused("finished gradient", lambda p=parameter: p.register_post_accumulate_grad_hook(print))
            if strategy != "NNG":
                refused("no hook on its gradient", lambda p=parameter: p.register_hook(print))


def kept_gradients():
    """Gradients that a script keeps stay the parameters' until they are set to None: torch adds to them in place."""

    def kept(model, optimizer, remembered):
        gradients = []
        for step in range(4):
            one_pass(model, step)
            if step % 3 == 0:
                gradients = [parameter.grad for parameter in model.parameters()]
            one_pass(model, step + 5)
            for gradient in gradients:
                gradient.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 2)
            if step != 2:
                assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)

    both(kept)

    def dropped(model, optimizer, remembered):
        one_pass(model, 0)
        gradients = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            parameter.grad = None
        one_pass(model, 1)
        optimizer.step()
        assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)

    both(dropped)


def two_optimizers(model):
    wide = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    narrow = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [torch.optim.SGD(wide, lr=0.1, momentum=0.9), torch.optim.SGD(narrow, lr=0.05)]


def by_modules(model, optimizers):
    for child in model.children():
        child.zero_grad()


def by_parameters(model, optimizers):
    for parameter in model.parameters():
        parameter.grad = None


def in_place(model, optimizers):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def halved(model, optimizers):
    for child in model.children():
        for parameter in child.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5


def by_optimizers(model, optimizers):
    optimizers[0].zero_grad()
    optimizers[1].zero_grad(set_to_none=False)


def cleared_before_backward():
    """Gradients that a script clears between forward and backward, while the root is gathered, are gone."""

    def trained(clear, model, optimizers):
        for step in range(3):
            ranks = range(dist.get_world_size()) if type(model) is Model else [dist.get_rank()]
            loss = sum(loss_of(model, data(step, 0, rank)) for rank in ranks) / len(ranks)
            clear(model, optimizers)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return whole_parameters(model) if type(model) is not Model else dict(model.named_parameters())

    for clear in (by_modules, by_parameters, in_place, halved, by_optimizers):
        plain = fresh()
        expected = trained(clear, plain, two_optimizers(plain))
        for strategy in ("NNG", "IIG", "GIG", "GGG"):
            model = fresh()
            model, optimizers = shard(model, two_optimizers(model), strategy, group_size=1)
            compare_parameters(f"{clear.__name__} {strategy}", trained(clear, model, optimizers), expected, 1e-6)


def cleared_between_micro_batches():
    """What one of two optimizers clears to zeros after a micro-batch in no_sync() is gone, wherever it adds up."""

    def trained(model, optimizers):
        for step in range(3):
            with contextlib.nullcontext() if type(model) is Model else model.no_sync():
                one_pass(model, step + 5)
            optimizers[0].zero_grad(set_to_none=False)
            one_pass(model, step)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return whole_parameters(model) if type(model) is not Model else dict(model.named_parameters())

    plain = fresh()
    expected = trained(plain, two_optimizers(plain))
    for strategy in ("NNG", "NGG", "GNG", "ING", "IIG", "GGG"):
        model = fresh()
        model, optimizers = shard(model, two_optimizers(model), strategy, group_size=1)
        compare_parameters(f"cleared between {strategy}", trained(model, optimizers), expected, 1e-6)


def node_of(parameter):
    """Return the node of the graph that adds to a parameter's gradient, as Megatron and apex take it."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def hooks_on_nodes():
    """Hooks on the nodes that add to gradients are called, or refused: before a model is sharded and at a step."""
    for register in ("register_hook", "register_prehook"):

        def hooked(model, optimizer, remembered, register=register):
            nodes = [node_of(parameter) for parameter in model.parameters()]
            for step in range(3):
                if step == 1:
                    for node in nodes:
                        getattr(node, register)(lambda *given: None)
                        node.register_prehook(lambda given: (given[0] * 0.5,))
                one_pass(model, step)
                optimizer.step()
                optimizer.zero_grad()

        both(hooked, strategies=("NNN", "NNG", "NIG"), group_size=2)
        for strategy in ("III", "IIG", "GGG"):
            model = fresh()
            early = node_of(model.head.weight)
            handle = getattr(early, register)(lambda *given: None)
            refused("no hooks on its gradient", lambda m=model, s=strategy: shard(m, sgd(m), s, group_size=2))
            handle.remove()
            model, optimizer = shard(model, sgd(model), strategy, group_size=2)
            one_pass(model, 0)
            optimizer.step()
            node = node_of(model.head.weight)
            handle = getattr(node, register)(lambda *given: None)
            optimizer.zero_grad()
            one_pass(model, 1)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            refused("the node that adds to its gradient", optimizer.step)
            refused("the node that adds to its gradient", optimizer.step)
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            handle.remove()
            with torch.no_grad():
                optimizer.step()


class SomeBlocks(Model):
    """Leaves out one block of equal size, as experts and layers that are dropped at random are."""

    def forward(self, tokens, left_out=None):
        hidden = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            if place != left_out:
                hidden = block(hidden)
        return self.head(self.norm(hidden)) * self.scale


def other_units_on_each_rank():
    """Ranks that leave out the same block train; those that leave out others would use each other's weights."""
    rank = dist.get_rank()
    for strategy in ("NNN", "NNG", "III", "GIG", "GGG"):
        torch.manual_seed(0)
        model = SomeBlocks()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2, units=list(model.blocks))

        def one_step(left_out, model=model, optimizer=optimizer):
            model(data(0, 0, rank)[:, :-1], left_out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for left_out in (None, 1, 2):
            one_step(left_out)
        if strategy.startswith("N"):
            one_step(rank)
        else:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            refused("the same units", lambda step=one_step: step(rank), DivergedError)
            optimizer.zero_grad()
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    for case in (
        penalties,
        gradients_out_of_nothing,
        replaced_at_the_optimizer,
        hooks_on_gradients,
        kept_gradients,
        cleared_before_backward,
        cleared_between_micro_batches,
        hooks_on_nodes,
        other_units_on_each_rank,
    ):
        case()
        if dist.get_rank() == 0:
            print("held", case.__name__, flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

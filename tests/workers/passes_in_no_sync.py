"""Backward passes inside of DDP's no_sync() whose forward pass was outside, which DDP reduces all the same."""

from __future__ import annotations

from functools import partial

from script_habits import Blocks, main, squares, train


def squares_in_two_passes(job, values, *, runs_again):
    found = job(values)
    with job.no_sync():
        found[:, :2].square().mean().backward(retain_graph=True)
    return squares(job, values) if runs_again else found[:, 2:].square().mean()


def jobs(framework):
    for name, runs_again in (("runs again for the second pass", True), ("goes back again outside", False)):
        loss_of = partial(squares_in_two_passes, runs_again=runs_again)
        yield name, partial(train, Blocks(), framework, loss_of=loss_of)


if __name__ == "__main__":
    main(jobs)

"""What ranks compare of their optimizers before anything is changed: what differs by process is no difference."""

from __future__ import annotations

import torch

from paro_advise.runtime.sharding.agreement import around_difference, described


class _Schedule:
    """An object that a script keeps in a group of its optimizer."""


def test_objects_are_compared_by_their_kind_and_not_by_where_they_lie():
    assert described(_Schedule()) == described(_Schedule())
    assert described(lambda step: step) == described(lambda step: 2 * step)
    assert described(_Schedule()) != described(object())


def test_tensors_are_compared_by_shape_and_single_numbers_by_value():
    """A buffer to work in holds anything; a learning rate may be a tensor."""
    assert described(torch.zeros(4, 5)) == described(torch.ones(4, 5))
    assert described(torch.zeros(4, 5)) != described(torch.zeros(5, 4))
    assert described(torch.tensor(0.1)) != described(torch.tensor(0.2))
    assert described(torch.float32) != described(torch.bfloat16)


def test_an_error_shows_where_two_long_texts_differ():
    alike = '"amsgrad": false, ' * 20
    first, second = around_difference(f"{alike}lr: 0.1 {alike}", f"{alike}lr: 0.2 {alike}")
    assert "0.1" in first
    assert "0.2" in second
    assert first.startswith("...")
    assert around_difference("GGG", "NNG") == ("GGG", "NNG")

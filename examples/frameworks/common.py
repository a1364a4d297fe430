"""The model and data that all scripts in this folder train."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train import Transformer


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> Transformer:
    """Return the same model on every rank."""
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    return Transformer(args.vocabulary, args.width, args.layers, heads=4)


def batch(args: argparse.Namespace, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(100_000 * step + 1_000 * micro + rank)
    return torch.randint(0, args.vocabulary, (args.batch, args.sequence + 1), generator=generator)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

"""Makes sure that all ranks hold the same model and the same settings before anything is touched."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paro_advise.errors import DivergedError
from paro_advise.runtime.ho_ring.groups import are_alike
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paro_advise.runtime.sharding.parameters.units import UnitSpec

_SAMPLE = 4096
_SHOWN = 80  # characters of a value in an error


def fingerprint(specs: Iterable[UnitSpec]) -> str:
    """Return a digest of a model's parameters: names, shapes, types, and samples of the values of whole ones.

    Of what is sharded each rank holds other values, which are one whole by definition.
    """
    digest = hashlib.sha256()
    for spec in specs:
        for slot in spec.slots:
            digest.update(f"{spec.name}|{slot.name}|{tuple(slot.shape)}|{slot.dtype}|{slot.trains}".encode())
            if not slot.parameter.is_meta:
                digest.update(_sample(slot.parameter.detach()))
    return digest.hexdigest()


def fingerprint_of_states(states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a digest of an optimizer's states by parameter: keys, and samples of their values."""
    digest = hashlib.sha256()
    for name in sorted(states):
        for key, value in sorted(states[name].items()):
            digest.update(f"{name}|{key}|".encode())
            is_plain = isinstance(value, str | int | float | None)
            told = repr(value) if is_plain else described(value)
            digest.update(_sample(value.detach()) if isinstance(value, torch.Tensor) else told.encode())
    return digest.hexdigest()


def _sample(values: torch.Tensor) -> bytes:
    """Return some values spread over a tensor, as bytes; of a sharded one, how it is cut."""
    if isinstance(values, DTensor):
        return f"{tuple(values.shape)} {values.placements} {values.device_mesh.mesh.tolist()}".encode()
    flat = values.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE)
    sample: bytes = flat[::step].to(torch.float32).cpu().numpy().tobytes()
    return sample


def agree(facts: Mapping[str, Any], hint: str = "") -> None:
    """Compare facts on all ranks.

    Args:
        facts: JSON values by what they are called in an error.
        hint: what to do about a difference.

    Raises:
        DivergedError: on every rank, when they differ on any.
        CommunicationError: a rank did not take part.
    """
    mine = {name: json.dumps(value, sort_keys=True, default=described) for name, value in facts.items()}
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    with reaching_all_ranks(f"a comparison of {', '.join(mine)}"):
        if are_alike([_digest(json.dumps(mine, sort_keys=True))]):
            return
        dist.all_gather_object(everyone, mine)
    for name in mine:
        values = [found.get(name) if found else None for found in everyone]
        if len(set(values)) > 1:
            usual = max(dict.fromkeys(values), key=values.count)  # of several the first one, which all ranks take
            odd = [rank for rank, value in enumerate(values) if value != usual]
            raise DivergedError(
                f"all ranks must have the same {name}, got another one on rank{'s' * (len(odd) > 1)} "
                f"{', '.join(map(str, odd[:8]))}{' ...' * (len(odd) > 8)}: "
                f"{' where the others have '.join(around_difference(values[odd[0]], usual))}",
                hint=hint or None,
            )


def _digest(value: str) -> int:
    """Return a number that tells texts apart, of 63 bits: one and its negative fit a tensor."""
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:8]) >> 1


def described(value: object) -> str:
    """Return what can be compared between ranks of a value that JSON does not have.

    Addresses differ between processes, and what lies in a buffer to work in may be anything.
    """
    if isinstance(value, torch.Tensor):
        number = f" {value.item()}" if value.numel() == 1 and not value.is_meta else ""
        return f"tensor of {value.dtype} {tuple(value.shape)}{number}"
    if isinstance(value, complex | torch.dtype | torch.device | torch.Size):
        return str(value)
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def around_difference(one: str | None, other: str | None) -> tuple[str, str]:
    """Return where two texts differ, of both as much as a line shows."""
    texts = str(one), str(other)
    alike = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = max(0, alike - _SHOWN // 2)
    shown = [text[begin : begin + _SHOWN] for text in texts]
    ends = [begin + _SHOWN < len(text) for text in texts]
    first, second = (f"{'...' * (begin > 0)}{text}{'...' * is_cut}" for text, is_cut in zip(shown, ends, strict=True))
    return first, second

"""The units of a model: groups of parameters that are gathered and reduced together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

_MIN_REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place of a parameter in the model; what fills it changes with the strategy.

    Attributes:
        name: the first of its qualified names.
        aliases: all of them; several when it is tied.
        places: modules and attributes it is registered under; several when it is tied.
        shape, dtype: of the whole parameter as the user made it.
        trains: it wants a gradient.
    """

    name: str
    aliases: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size
    dtype: torch.dtype
    trains: bool

    @property
    def parameter(self) -> nn.Parameter:
        """Return what is registered now.

        Raises:
            UsageError: nothing is.
        """
        module, attribute = self.places[0]
        return self._of(module, attribute)

    @property
    def registered(self) -> list[torch.Tensor | None]:
        """Return what is registered now in each of its places; None where nothing is."""
        return [module._parameters.get(attribute) for module, attribute in self.places]  # noqa: SLF001

    def parameter_in(self, module: nn.Module) -> nn.Parameter:
        """Return what is registered now in one of the modules that share it."""
        attribute = next(name for place, name in self.places if place is module)
        return self._of(module, attribute)

    def _of(self, module: nn.Module, attribute: str) -> nn.Parameter:
        found = module._parameters.get(attribute)  # noqa: SLF001 - getattr may go through a parametrization
        if found is None:
            raise UsageError(
                f"{self.name} must stay the parameter that it was when the model was sharded, it was taken out of its "
                "module",
                where=self.name,
                hint="prune, parametrize or replace parameters before the model is wrapped, and take masks and norms "
                "off in a model of its own that loads the state dict",
            )
        return found

    def fill(self, parameter: nn.Parameter) -> None:
        """Register another parameter in all its places."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One unit.

    Attributes:
        name: qualified name of its module, "" for the root.
        module: the module whose forward brackets the use of the parameters.
        slots: its parameters that no unit inside it holds, without duplicates.
        ignored: parameters of the model that are in no unit, by name: each rank has its own.
    """

    name: str
    module: nn.Module
    slots: tuple[Slot, ...]
    ignored: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def training(self) -> tuple[Slot, ...]:
        """Return the slots that want gradients."""
        return tuple(slot for slot in self.slots if slot.trains)


def find_units(
    model: nn.Module,
    chosen: Sequence[type[nn.Module] | nn.Module] | None = None,
    ignored: Collection[nn.Parameter] = (),
) -> list[UnitSpec]:
    """Cut a model into units: the chosen modules, and the root with the rest as the last.

    Args:
        model: the root.
        chosen: modules or classes of modules; None for the repeated blocks, as FSDP2's users choose:
            children of lists of two or more modules of one class, the outermost ones, but for those that share a
            parameter or a layer with another part of the model.
        ignored: parameters that belong to no unit.

    Raises:
        UsageError: units lie inside each other, share a parameter, or hold a scalar.
    """
    modules = _apart(model, _repeated_blocks(model)) if chosen is None else _choose(model, chosen)
    owner = _owners(model, modules)
    given = frozenset(ignored)
    left_alone = {name: parameter for name, parameter in model.named_parameters() if parameter in given}
    slots: dict[int, Slot] = {}
    in_unit: dict[str, list[Slot]] = {name: [] for name in modules}
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():  # noqa: SLF001 - includes duplicates
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, module, attribute))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in _children_first(model):
        if parameter in given:
            continue
        name = names[id(parameter)]
        if parameter.dim() == 0:
            raise UsageError(
                "a parameter without a dimension must be made on its device, have the type that the model computes in, "
                f"and an optimizer that stays there; got {name}",
                where=name,
                hint="give it one element, torch.nn.Parameter(torch.ones(1))",
            )
        found = places[id(parameter)]
        units = {owner[place] for place, _, _ in found}
        if len(units) > 1:
            raise UsageError(
                f"a tied parameter must lie in one unit, got {name} in {', '.join(sorted(map(repr, units)))}",
                hint="choose units that hold all its modules, or leave those modules to the root",
            )
        slots[id(parameter)] = Slot(
            name=name,
            aliases=tuple(f"{place}.{attribute}" if place else attribute for place, _, attribute in found),
            places=tuple((module, attribute) for _, module, attribute in found),
            shape=parameter.shape,
            dtype=parameter.dtype,
            trains=parameter.requires_grad,
        )
        in_unit.setdefault(units.pop(), []).append(slots[id(parameter)])
    return [
        UnitSpec(name=name, module=module, slots=tuple(in_unit.get(name, ())), ignored=left_alone)
        for name, module in {**modules, "": model}.items()
        if in_unit.get(name) or module is model
    ]


def _children_first(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of FSDP2's buffers: those of submodules before a module's own."""
    found: dict[int, nn.Parameter] = {}
    visited = set()

    def visit(module: nn.Module) -> None:
        visited.add(module)
        for child in module.children():
            if child not in visited:
                visit(child)
        for parameter in nn.Module.parameters(module, recurse=False):  # a model's own method may take no argument
            found.setdefault(id(parameter), parameter)

    visit(model)
    return list(found.values())


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(f"{name}.".startswith(f"{outer}.") for outer in found):
            continue
        classes = Counter(type(child) for child in module)
        for key, child in module.named_children():
            if classes[type(child)] >= _MIN_REPEATS and _runs(child) and any(True for _ in child.parameters()):
                found[f"{name}.{key}" if name else key] = child
    return found


def _apart(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with another part of the model; the root holds what is shared."""
    owner = _owners(model, blocks)
    holders: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for _, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, set()).add(owner[name])
    shared = set().union(*(names for names in holders.values() if len(names) > 1))
    return {name: module for name, module in blocks.items() if name not in shared}


def _runs(module: nn.Module) -> bool:
    """Tell whether a module has a forward pass, which lists of modules in lists have not."""
    return type(module).forward is not nn.Module.forward


def _choose(model: nn.Module, chosen: Sequence[type[nn.Module] | nn.Module]) -> dict[str, nn.Module]:
    classes = tuple(item for item in chosen if isinstance(item, type))
    modules = [item for item in chosen if isinstance(item, nn.Module)]
    found = {
        name: module
        for name, module in model.named_modules()
        if name and (isinstance(module, classes) or any(module is item for item in modules))
    }
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer:
            raise UsageError(f"units must not lie inside each other, got {name} in {outer}")
    missing = [item for item in modules if not any(item is module for module in found.values())]
    if missing:
        raise UsageError(f"units must be parts of the model, got {type(missing[0]).__name__}, which is none")
    return found


def _owners(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, str]:
    """Return the unit of each module by each of its names; "" is the root."""
    own = {module: name for name, module in units.items()}
    owner = {"": ""}
    for name, module in model.named_modules(remove_duplicate=False):
        owner[name] = own.get(module) or owner[name.rpartition(".")[0]]
    return owner

"""Runs the constructor of a model for real, while holding the memory of only some of its tensors.

Every random number is drawn as usual, so the tensors are those of the whole model, bit for bit. Should the constructor
decide something by a value that was released, or compute a wanted tensor from one, it runs again and keeps what was
needed.

The constructor runs at least twice. The first run, on the meta device if possible, learns which registration becomes
which name.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from penstock.errors import SplitError
from penstock.execution.preserved_state import RNG_LOCK, preserved_random_state
from penstock.models.named_draws import memory_of
from penstock.models.registrations import Registrar, Survey, names_by_tensor, observe_registrations
from penstock.models.released_memory import LostValueError, OtherRegistrationError, ReleasedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.multiprocessing.reductions import StorageWeakRef

#: After this many runs, everything is kept.
_RUNS: Final = 4


def survey(build: Callable[[], nn.Module], *, seed: int | Tensor = 0, on_meta: bool = True) -> Survey:
    """Learn what a constructor registers; for real if it does not run on the meta device."""
    registrar = Registrar()
    place = torch.device("meta") if on_meta else nullcontext()
    try:
        with seeded(seed), ReleasedMemory(set()), observe_registrations(registrar.observe), place:
            return registrar.survey(checked_model(build()))
    except (Exception, LostValueError):
        if on_meta:
            return survey(build, seed=seed, on_meta=False)
    registrar = Registrar()
    with seeded(seed), observe_registrations(registrar.observe):
        return registrar.survey(checked_model(build()))


def construct(
    build: Callable[[], nn.Module], wanted: Callable[[Survey], set[str]], *, seed: int | Tensor, per_name: bool = False
) -> nn.Module:
    """Build the model with the wanted tensors only; the others are on the meta device afterwards.

    Args:
        build: the constructor.
        wanted: given what the constructor registers, returns the names of the tensors to keep.
        seed: what the random generator is seeded with before the constructor runs, or its state; ``per_name`` takes no
            state.
        per_name: whether the random numbers of each tensor come from a generator seeded from ``seed`` and its name.
            The numbers of other tensors need not be drawn then.
    """
    known, kept = survey(build, seed=seed), set[int]()
    for run in range(_RUNS + 1):
        names = wanted(known)
        keep = {number for number, called in enumerate(known.names) if names & set(called)} | kept
        if run == _RUNS:
            keep = set(range(len(known.registrations)))
        memory = ReleasedMemory(
            keep, known, seed=seed if per_name and isinstance(seed, int) else None, skip=per_name and not kept
        )
        try:
            with seeded(seed), memory, observe_registrations(memory.observe):
                model = checked_model(build())
                memory.check([tensor for name, tensor in named_tensors(model) if name in names])
        except LostValueError as lost:
            kept |= lost.registrations
        except OtherRegistrationError:
            known, kept = survey(build, seed=seed, on_meta=False), set()
        else:
            _move_to_meta(model, names)
            return model
    raise SplitError(
        "the callable registers other parameters each time it builds the model, so they cannot be identified; build "
        "the model and pass it instead"
    )


@contextmanager
def seeded(seed: int | Tensor) -> Iterator[None]:
    """Seed torch's generators, or set the state of the CPU's; afterwards those of all libraries are as before."""
    devices = [torch.device("cpu"), *(torch.device("cuda", number) for number in range(torch.cuda.device_count()))]
    with RNG_LOCK, preserved_random_state(devices):
        if isinstance(seed, Tensor):
            torch.set_rng_state(seed)
        else:
            torch.manual_seed(seed)
        yield


def checked_model(model: object) -> nn.Module:
    """Return what was passed or built, or raise ``SplitError`` unless it is a module."""
    if not isinstance(model, nn.Module):
        raise SplitError(f"split needs an nn.Module, or a function that returns one, got {type(model).__name__}")
    return model


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def replace_tensors(model: nn.Module, replacement: Callable[[list[str], Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by what is returned for its names, or itself; ties remain."""
    names = names_by_tensor(model)
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # with the replaced one, whose identity must not be reused
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for attribute, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = replacement(names[id(tensor)], tensor), tensor
                slots[attribute] = replaced[id(tensor)][0]  # type: ignore[assignment]


def empty_tensor(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return an uninitialised tensor like this one."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _move_to_meta(model: nn.Module, names: set[str]) -> None:
    """Replace every tensor of which no name is wanted; those that shared memory still do."""
    bases: dict[StorageWeakRef, Tensor] = {}

    def replacement(called: list[str], tensor: Tensor) -> Tensor:
        if names.intersection(called):
            return tensor
        moved, key = empty_tensor(tensor, "meta"), memory_of(tensor)
        if key is not None and (base := bases.setdefault(key, moved)) is not moved:
            moved.data = torch.empty_like(moved).set_(
                base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        return moved

    replace_tensors(model, replacement)

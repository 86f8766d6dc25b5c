"""Follows values through a forward: from which outputs of units, inputs, parameters and draws each was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.models.checkpoints import CheckpointRegions
from penstock.models.named_draws import operands_of
from penstock.models.record import INNER, INSIDE, RANDOM, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

Sources: TypeAlias = frozenset[Source]

NOTHING: Final[Sources] = frozenset()

#: These read the shape of their argument, not its values.
_SHAPE_ONLY: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
#: Of the arguments of these, only the ones behind the first decide on the shape of the result.
_CHOOSING: Final = frozenset({"aten::index", "aten::masked_select"})
#: Methods that read memory without the dispatcher.
_DIRECT: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class SourceTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the sources of every tensor, by its memory, while operators run.

    Attributes:
        call: the number of the call that is running; None in glue.
        reads: everything that calls have read from outside themselves, by the number of the call.
        glue: the names of the containers and glue modules that are running, outermost first.
        draws: in which of these glue has drawn random numbers, by the number of the draw.
        is_random: whether anything was drawn.
        changed: values of calls that others have changed in place.
        checkpoints: the activation checkpoints around calls.
        held: the name of each parameter and buffer, and whether it belongs to a unit, by its memory.
        written: the names of those that glue has written to, or that do not belong to a unit and a call has.
        decisions: the sources of all that glue has read as plain Python values. Whatever follows may depend on these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: int | None = None
        self.reads: dict[int, set[Source]] = {}
        self.draws: list[str] = []
        self.is_random = False
        self.changed: set[Source] = set()
        self.checkpoints = CheckpointRegions()
        self.held: dict[int, tuple[str, bool]] = {}
        self.written: list[str] = []
        self.decisions: Sources = NOTHING
        self.glue: list[str] = []
        self._sources: dict[int, Sources] = {}
        self._alive: dict[int, StorageWeakRef | torch.Tensor] = {}
        self._fractions: set[int] = set()
        self._direct = _DirectReads(self)

    def __enter__(self) -> SourceTracker:
        self._direct.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._direct.__exit__(*error)  # type: ignore[no-untyped-call]

    def of(self, tensor: torch.Tensor) -> Sources:
        """Return the sources of a tensor."""
        return self._sources.get(self.number_memory(tensor), NOTHING)

    def mark(self, tensor: torch.Tensor, sources: Iterable[Source]) -> None:
        """Set the sources of a tensor, and of all that share its memory."""
        self._sources[self.number_memory(tensor)] = frozenset(sources)

    def number_memory(self, tensor: torch.Tensor) -> int:
        """Return a number for the memory of a tensor, which no other memory will get."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError):  # it has no storage, such as a sparse tensor
            self._alive.setdefault(-id(tensor), tensor)
            return -id(tensor)
        # A weak reference keeps the number from being used again, though not the memory.
        self._alive.setdefault(int(reference.cdata), reference)
        return int(reference.cdata)

    def __torch_dispatch__(
        self, func: Any, types: Collection[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and give its results their sources."""
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        read = NOTHING if func._schema.name in _SHAPE_ONLY else self._union(given)
        found = self._inside(read) if self.call is not None else read
        self.decide(_deciding(func, args, given))
        if self._is_never(func, args):
            found = NOTHING
        if self.call is None and not func.is_view:
            self.checkpoints.note_glue()
        if torch.Tag.nondeterministic_seeded in func.tags:
            found = self._draw(found)
        self._mark_results(func, given, result, found, (args, kwargs or {}))
        return result

    def decide(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the values of tensors have been read, which matters to others only in glue."""
        if self.call is None:
            self.decisions |= self._union(tensors)

    def _is_never(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether random fractions are compared with a probability of 0: layers that are never skipped."""
        is_comparison = func is torch.ops.aten.lt.Scalar and args[1] <= 0
        return is_comparison and self.number_memory(args[0]) in self._fractions

    def _union(self, tensors: Iterable[torch.Tensor]) -> Sources:
        return frozenset().union(*(self.of(tensor) for tensor in tensors))

    def _inside(self, read: Sources) -> Sources:
        """Note what the running call reads; its results are its own."""
        assert self.call is not None
        own = (INSIDE, INNER)
        self.reads.setdefault(self.call, set()).update(
            source for source in read if source.call != self.call or source.kind not in own
        )
        return frozenset({Source(INSIDE, self.call)})

    def _draw(self, found: Sources) -> Sources:
        self.is_random = True
        if self.call is not None:
            return found
        self.draws.append(self.glue[-1] if self.glue else "")
        return found | {Source(RANDOM, len(self.draws) - 1)}

    def _mark_results(
        self, func: Any, given: list[torch.Tensor], result: Any, found: Sources, arguments: tuple[Any, dict[str, Any]]
    ) -> None:
        old = {self.number_memory(tensor) for tensor in given}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (key := self.number_memory(leaf)) not in old:
                self._sources[key] = found
                if func._schema.name == "aten::rand":
                    self._fractions.add(key)
        if func._schema.is_mutable:
            _, written = operands_of(func, *arguments)
            for tensor in written:
                key = self.number_memory(tensor)
                before = self._sources.get(key, NOTHING)
                self.changed.update(source for source in before if source.call != self.call)
                self._sources[key] = before | found
                self._fractions.discard(key)
                name, is_placed = self.held.get(key, ("", True))
                if name and (self.call is None or not is_placed):
                    self.written.append(name)


class _DirectReads(TorchFunctionMode):
    """Catches methods that read memory without the dispatcher."""

    def __init__(self, tracker: SourceTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DIRECT:
            self._tracker.decide(leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _deciding(func: Any, args: tuple[Any, ...], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors from whose values an operator makes a Python value: a number, or the shape of its result."""
    if torch.Tag.data_dependent_output in func.tags:
        return given
    if torch.Tag.dynamic_output_shape not in func.tags:
        return []
    if func._schema.name in _CHOOSING:
        chosen = [leaf for leaf in pytree.tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
        return [tensor for tensor in chosen if tensor.dtype in (torch.bool, torch.uint8)]
    return given


def wrap_forward(module: torch.nn.Module, around: Callable[..., Any], *context: Any) -> None:
    """Replace the forward of one module object by ``around(forward, *context, args, kwargs)``."""
    module.forward = WrappedForward(module.forward, around, context)


class WrappedForward:
    """A forward with something around it; an object, so that the copy of a module has the copy of its forward."""

    def __init__(self, original: Callable[..., Any], around: Callable[..., Any], context: tuple[Any, ...]) -> None:
        self.__wrapped__ = original
        self.around = around
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is around the forward."""
        return self.around(self.__wrapped__, *self.context, args, kwargs)

"""What a stage sends and receives: descriptions, buffers, and the layout in which a tensor goes over the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.execution.value_spec import TensorSpec, as_wire, describe_tensor
from penstock.pipelining._utils import PipeliningMetadataError, TensorMeta

if TYPE_CHECKING:
    import torch


def _normalize_model_output_as_tuple(output: Any) -> tuple[Any, ...]:
    """Make a tuple of what a module returns: what goes to the next stage.

    >>> _normalize_model_output_as_tuple([1, 2]), _normalize_model_output_as_tuple(1)
    ((1, 2), (1,))
    """
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


class _RecvInfo:
    """An input of a stage for one microbatch: where it comes from, what it looks like, and where it is put.

    Attributes:
        input_name: a name for messages.
        source: the stage that it comes from; None for an argument of the whole model.
        buffer: what it is received into. There is one from the moment the receive is asked for until it is used.
        tensor_meta: what it looks like; None if nothing comes.
        is_root_arg: whether it is an argument of the whole model, which is not received.
    """

    def __init__(
        self,
        input_name: str,
        source: int | None,
        buffer: torch.Tensor | None,
        tensor_meta: TensorMeta | None,
        *,
        is_root_arg: bool = False,
    ) -> None:
        self.input_name = input_name
        self.source = source
        self.buffer = buffer
        self.tensor_meta = tensor_meta
        self.is_root_arg = is_root_arg
        self._for_one_use = False

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"_RecvInfo(input={self.input_name}, root_arg=True)"
        shape = None if self.buffer is None else self.buffer.size()
        kind = "None" if self.tensor_meta is None else type(self.tensor_meta).__name__
        return f"_RecvInfo(input={self.input_name}, source={self.source}, shape={shape}, meta={kind})"

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Make a new buffer, which is given up when it is taken; return its memory, as it is received."""
        assert self.tensor_meta is not None
        self.buffer = spec_of(self.tensor_meta).empty(device)
        self._for_one_use = True
        return as_wire(self.buffer)

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor in place of a received one."""
        self.buffer = tensor
        self._for_one_use = True

    def forget(self) -> None:
        """Give up the buffer, unless someone else has put it there."""
        if self._for_one_use:
            self.buffer = None
            self._for_one_use = False


def spec_of(meta: TensorMeta, *, requires_grad: bool = False) -> TensorSpec:
    """Describe what goes over the wire for a tensor; for a distributed one, the part that is here."""
    return TensorSpec.dense(meta.shape, meta.stride, meta.dtype, requires_grad=requires_grad)


def to_wire(tensor: torch.Tensor, spec: TensorSpec, what: str) -> torch.Tensor:
    """View the memory of a tensor as it is sent; raise an error that says what it is if it does not match its spec."""
    if not spec.matches(tensor, gradients=False):
        differs = "shape" if tensor.shape != spec.shape else "dtype"
        raise PipeliningMetadataError(
            f"{what}: {differs} mismatch: it is {describe_tensor(tensor)}, but {spec} was agreed in the first step of "
            "its kind; use the same size for all batches, e.g. drop or pad the last one of an epoch"
        )
    return as_wire(spec.to_layout(tensor))

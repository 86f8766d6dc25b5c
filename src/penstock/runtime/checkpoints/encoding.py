"""Encodes plain Python data as JSON and back, exactly: what pickle would do, without running anything when it is read.

Numbers, texts, lists and None are themselves; anything else is an object with one key, which says what it is.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

_DICTIONARIES: Final[dict[str, Callable[[Any], Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}


def encode(value: Any, where: str) -> Any:
    """Encode a value.

    >>> encode({"betas": (0.9, 0.5), 3: None}, "options")
    {'dict': [['betas', {'tuple': [0.9, 0.5]}], [3, None]]}

    Args:
        value: numbers, texts, bytes, tensors, arrays and None, and lists, tuples, sets and dictionaries of them.
        where: what it is called, for errors.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(one, f"{where}[{number}]") for number, one in enumerate(value)]
    for name, dictionary in _DICTIONARIES.items():
        if kind is dictionary:
            return {name: [[encode(key, where), encode(one, f"{where}[{key!r}]")] for key, one in value.items()]}
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            ordered = value if isinstance(value, tuple) else sorted(value, key=repr)
            return {name: [encode(one, f"{where}[{number}]") for number, one in enumerate(ordered)]}
    return _encode_leaf(value, kind, where)


def _encode_leaf(value: Any, kind: type, where: str) -> Any:
    if kind is float:
        return {"float": str(value)}
    if kind is complex:
        return {"complex": [encode(value.real, where), encode(value.imag, where)]}
    if kind in (bytes, bytearray):
        return {kind.__name__: _text(value)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return {"tensor": [dtype_name(value.dtype), list(value.shape), _text(bytes_of(value, where))]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        return {
            "array" if kind is np.ndarray else "scalar": [array.dtype.str, list(array.shape), _text(array.tobytes())]
        }
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; use numbers, texts, tensors, and "
        "lists, tuples and dictionaries of them, e.g. the state_dict() of an object"
    )


def decode(encoded: Any) -> Any:
    """Decode what ``encode`` has made.

    >>> decode(encode({"betas": (0.9, float("inf")), 3: None}, ""))
    {'betas': (0.9, inf), 3: None}
    """
    if isinstance(encoded, list):
        return [decode(one) for one in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    if name in _DICTIONARIES:
        return _DICTIONARIES[name]({decode(key): decode(one) for key, one in content})
    if name in _SEQUENCES:
        return _SEQUENCES[name]([decode(one) for one in content])
    if name not in _LEAVES:
        raise CheckpointError(f"unknown kind of value {name!r}; it was saved by a later version of penstock")
    return _LEAVES[name](content)


def _decode_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    return tensor_from(bytearray(b64decode(text)), dtype_from(name), shape).clone()


def _decode_array(content: Any) -> Any:
    dtype, shape, text = content
    return np.frombuffer(b64decode(text), np.dtype(dtype)).reshape(shape).copy()


_LEAVES: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "complex": lambda content: complex(*(decode(one) for one in content)),
    "bytes": b64decode,
    "bytearray": lambda content: bytearray(b64decode(content)),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda content: _decode_array(content)[()],
    "dtype": lambda content: dtype_from(content),
    "device": torch.device,
}


def _text(data: bytes | bytearray | memoryview) -> str:
    return b64encode(data).decode()


# Tensors --------------------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """Name an element type.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    """Find an element type by its name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"unknown element type {name!r}; it was saved by a later version of torch")
    return found


def bytes_of(tensor: torch.Tensor, where: str) -> memoryview:
    """Get the elements of a tensor as bytes: those in memory if they can be used as they are, else a copy."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{where} is a sparse or quantized tensor, which cannot be saved; make it dense first")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def tensor_from(data: bytearray, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    """Make a tensor of its bytes, which it uses as its memory."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(tuple(shape))

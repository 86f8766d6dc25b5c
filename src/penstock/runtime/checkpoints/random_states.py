"""Saves and restores the states of the global random number generators of a rank."""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.runtime.checkpoints.encoding import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TORCH, _PYTHON, _NUMPY = "torch", "python", "numpy"


def random_states(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Get the states of this rank's generators, encoded, by their names.

    Args:
        devices: where its stages are.
    """
    states: dict[str, Any] = {
        _TORCH: torch.get_rng_state(),
        _PYTHON: random.getstate(),
        _NUMPY: np.random.get_state(),
    }
    for device in devices:
        if device.type not in ("cpu", "meta"):
            states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: encode(state, f"the random state of {name}") for name, state in states.items()}


def restore_random_states(states: Mapping[str, Any], devices: Iterable[torch.device]) -> None:
    """Restore the states of this rank's generators."""
    for name, encoded in states.items():
        state = decode(encoded)
        if name == _TORCH:
            torch.set_rng_state(state)
        elif name == _PYTHON:
            random.setstate(state)
        elif name == _NUMPY:
            np.random.set_state(state)
        else:
            for device in devices:
                if device.type == name:
                    torch.get_device_module(device).set_rng_state(state, device)


def seed_generators(names: Iterable[str], saved: Any, rank: int) -> None:
    """Seed generators whose states belong to ranks that no longer exist: the same way every time.

    Args:
        names: which generators.
        saved: what the seed depends on, beside the rank: plain data.
        rank: this rank; each one gets a seed of its own.
    """
    seed = zlib.crc32(f"{rank} {saved}".encode())
    if _PYTHON in names:
        random.seed(seed)
    if _NUMPY in names:
        np.random.seed(seed)
    if any(name not in (_PYTHON, _NUMPY) for name in names):
        torch.manual_seed(seed)  # that of every device as well

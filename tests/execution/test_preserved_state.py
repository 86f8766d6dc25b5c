"""A run within ``preserved_state`` leaves buffers and random numbers as they were."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from penstock.execution.preserved_state import copy_as_leaves, preserved_state

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """Draws from every generator that it can find."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)
        self.several = {"torch": [torch.Generator().manual_seed(2)], "python": random.Random(3)}
        self.old, self.new = np.random.RandomState(4), np.random.default_rng(5)

    def forward(self) -> list[float]:
        return [
            torch.rand(1).item(),
            torch.rand(1, generator=self.own).item(),
            torch.rand(1, generator=self.several["torch"][0]).item(),
            random.random(),
            self.several["python"].random(),
            np.random.random(),
            self.old.random_sample(),
            self.new.random(),
        ]


@pytest.mark.parametrize("inner", [Drawing, lambda: nn.Sequential(Drawing())])
def test_all_generators_that_can_be_found_draw_the_same_again(inner) -> None:
    module = inner()
    drawing = next(one for one in module.modules() if isinstance(one, Drawing))
    with preserved_state(module, CPU):
        first = drawing()
    assert drawing() == first
    assert drawing() != first


def test_they_do_also_if_the_run_fails() -> None:
    drawing, drawn = Drawing(), []

    def fail() -> None:
        drawn.extend(drawing())
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"), preserved_state(drawing, CPU):
        fail()
    assert drawing() == drawn


BUFFERS = {
    "a number for all": lambda: torch.ones(()).expand(3, 4),
    "a row for all": lambda: torch.arange(4.0).expand(3, 4),
    "a column for all": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "windows": lambda: torch.arange(6.0).unfold(0, 4, 1),
    "none": lambda: torch.ones(0).expand(3, 0),
    "turned": lambda: torch.arange(12.0).reshape(4, 3).t(),
    "with holes": lambda: torch.arange(24.0).reshape(3, 8)[:, ::2],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "a lazy conjugate": lambda: torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_all_layouts(kind: str) -> None:
    module = nn.Module()
    module.register_buffer("mask", BUFFERS[kind]())
    buffer, value = module.mask, module.mask.to_dense() if kind == "sparse" else module.mask.clone()
    with preserved_state(module, CPU):
        if kind == "sparse":
            module.mask.mul_(2)
        elif module.mask.numel():
            torch.as_strided(module.mask, (1,), (1,)).fill_(7)  # what all elements of the first column may share
            module.mask = torch.zeros(1)
    assert module.mask is buffer
    torch.testing.assert_close(module.mask.to_dense() if kind == "sparse" else module.mask, value, rtol=0, atol=0)


def test_copies_have_memory_of_their_own() -> None:
    x = torch.ones(2, requires_grad=True)
    mask = torch.ones(1).expand(3)
    (one, kept), other = copy_as_leaves(([x, 3], {"mask": mask}))
    assert one.requires_grad
    assert one.is_leaf
    assert kept == 3
    torch.as_strided(other["mask"], (1,), (1,)).add_(1)
    one.detach().add_(1)
    assert x.tolist() == [1, 1]
    assert mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", BUFFERS)
def test_copies_look_like_what_they_are_copies_of(kind: str) -> None:
    tensor = BUFFERS[kind]()
    copy = copy_as_leaves(tensor)
    assert copy.layout is tensor.layout
    if kind == "sparse":
        copy, tensor = copy.to_dense(), tensor.to_dense()
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    assert not copy.numel() or copy.data_ptr() != tensor.data_ptr()
    if tensor.is_floating_point():
        assert copy_as_leaves(tensor.detach().requires_grad_()).is_leaf

"""What goes from one stage to the next: how a stage packs its result, and how the next one unpacks it.

A form turns a tensor with a row for each sample into a value, and the value into a tensor again. On the way it does
what a pipeline could get wrong: containers, aliases, views, complex numbers, changes in place. The unsplit model does
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WIDTH = 4
NATIVE, DROP_IN = "native", "drop-in"
Pack = Callable[[torch.Tensor, Any], Any]
Unpack = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Form:
    """One way to pass a tensor on.

    Attributes:
        pack: makes a value of a tensor; also gets the stage, which has ``side``, a layer for this, and memory.
        unpack: gets what the next stage is called with, and returns a tensor.
        doors: where values of this form may go from stage to stage; elsewhere they are refused.
        marks: what is special about it:
            ``changes``: the next stage changes an input in place;
            ``shared``: and another input is in the same memory;
            ``mixes``: the samples of a microbatch depend on each other;
            ``unused``: a part of the value gets no gradient;
            ``reuses``: the stage uses memory again that it has returned, in evaluation;
            ``rough``: a part of it is less precise;
            ``output``: its tensors can be merged, so that the last stage may return it.
    """

    name: str
    pack: Pack
    unpack: Unpack
    doors: frozenset[str]
    marks: frozenset[str]


def fresh(h: torch.Tensor) -> torch.Tensor:
    """The same values in memory that no operation has saved: it may be changed in place."""
    return h + 0


def double_first(z: torch.Tensor) -> torch.Tensor:
    """Something that depends on both parts of a complex number."""
    return (z * z).real + 2 * z.imag


def change_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(0.5)
    return a + b


def change_second(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    return a * b


def change_last(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    c.mul_(2)
    return a * b


def change_column(a: torch.Tensor) -> torch.Tensor:
    a[:, :1].mul_(2)
    return a


def refill(stage: Any, **values: Any) -> Any:
    stage.kept.update(values)
    return stage.kept


def replace(stage: Any, *values: Any) -> Any:
    stage.listed[:] = values
    return stage.listed


def reuse(h: torch.Tensor, stage: Any) -> torch.Tensor:
    """In evaluation, always the same memory."""
    return h if torch.is_grad_enabled() else stage.memory[: len(h)].copy_(h)


def nest(h: torch.Tensor, stage: Any) -> Any:
    return {"deep": [h, (stage.side(h), None)], "count": 3, "name": "text"}


def unnest(value: Any) -> torch.Tensor:
    return value["count"] * value["deep"][0] + value["deep"][1][0]


# fmt: off
_TENSORS: list[tuple[str, Pack, Unpack, str]] = [
    ("tensor", lambda h, _: h, lambda a: a, "output"),
    ("pair", lambda h, s: (h, s.side(h)), lambda a, b: a + torch.tanh(b), "output"),
    ("alias", lambda h, _: (h, h), lambda a, b: a + 0.5 * b, "output"),
    ("changed alias", lambda h, _: (fresh(h),) * 2, change_first, "changes shared"),
    ("view", lambda h, _: (h, h[:, :1]), lambda a, b: a * b, "output"),
    ("changed view", lambda h, _: (o := fresh(h), o[:, :1]), change_second, "changes shared"),
    ("overlapping", lambda h, _: (h[:, 1:], h[:, :-1]), lambda a, b: torch.cat([a, b[:, :1]], 1), "output"),
    ("transposed", lambda h, _: h.t(), lambda a: a.t(), ""),
    ("sliced", lambda h, _: torch.cat([h, h], 1)[:, ::2], lambda a: a, "output"),
    ("expanded", lambda h, _: h.mean(1, keepdim=True).expand(-1, WIDTH), torch.sin, "output"),
    ("complex", lambda h, s: torch.complex(h, s.side(h)), double_first, "output"),
    ("conjugate", lambda h, s: torch.complex(h, s.side(h)).conj(), double_first, "output"),
    ("negative", lambda h, s: torch.complex(h, s.side(h)).conj().imag, torch.sin, "output"),
    ("complex pair", lambda h, s: (h, torch.complex(h, h)), lambda a, b: a + b.imag * b.real, "output"),
    ("integers", lambda h, _: (h, (h.detach() > 0).long()), lambda a, b: a * (1 + b), "output"),
    ("mask", lambda h, _: (h, h > 0), lambda a, b: torch.where(b, a, 0.1 * a), "output"),
    ("unused", lambda h, s: (h, s.side(h)), lambda a, _: a, "unused"),
    ("detached part", lambda h, s: (h, s.side(h).detach()), lambda a, b: a * b, "unused"),
    ("number", lambda h, _: (h, h.mean()), lambda a, b: a + b, "mixes"),
    ("empty", lambda h, _: (h, h[:, :0]), lambda a, b: a + b.sum(), ""),
    ("float32", lambda h, _: (h, h.float()), lambda a, b: a + b.double(), "output rough"),
    ("parameter", lambda h, s: (h, s.side.weight), lambda a, b: a @ b, ""),
    ("buffer", lambda h, s: (h, s.constant), lambda a, b: a * b, ""),
    ("passed on", lambda h, s: (h, s.entered), lambda a, b: a + 0.5 * b, "output"),
    ("changed", lambda h, _: fresh(h), lambda a: a.mul_(0.5), "changes"),
    ("changed column", lambda h, _: fresh(h), change_column, "changes"),
    ("changed pair", lambda h, s: (fresh(h), s.side(h)), change_first, "changes"),
    ("changed constant", lambda h, s: (h, s.side(h).detach()), change_second, "changes unused"),
    ("changed constants", lambda h, _: (h, o := h.detach() + 1, o), change_last, "changes shared unused"),
    ("reused memory", reuse, lambda a: a, "reuses"),
]
_CONTAINERS: list[tuple[str, Pack, Unpack, str]] = [
    ("list", lambda h, s: [h, s.side(h)], lambda v: v[0] + torch.tanh(v[1]), "output"),
    ("dict", lambda h, s: {"h": h, "side": s.side(h)}, lambda v: v["h"] + torch.tanh(v["side"]), "output"),
    ("nested", nest, unnest, ""),
    ("refilled dict", lambda h, s: refill(s, h=h, side=s.side(h)), lambda v: v["h"] + torch.tanh(v["side"]), "output"),
    ("refilled list", lambda h, s: replace(s, h, s.side(h)), lambda v: v[0] + torch.tanh(v[1]), "output"),
    ("none", lambda h, _: (h, None), lambda a, _: a, ""),
    ("constants", lambda h, _: (h, 0.5, "text"), lambda a, b, _: a * b, ""),
    ("alias in dict", lambda h, _: {"a": h, "b": h}, lambda v: v["a"] + 0.5 * v["b"], "output"),
    ("changed in list", lambda h, _: [o := fresh(h), o], lambda v: change_first(*v), "changes shared"),
]
# fmt: on

FORMS = {
    name: Form(name, pack, unpack, frozenset(doors), frozenset(marks.split()))
    for doors, rows in (((NATIVE, DROP_IN), _TENSORS), ((NATIVE,), _CONTAINERS))
    for name, pack, unpack, marks in rows
}

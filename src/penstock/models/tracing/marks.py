"""Defines the mark that says where to cut: an operator that does nothing, and that a trace keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.fx.node import has_side_effect

if TYPE_CHECKING:
    from torch import fx

torch.library.define("penstock::_pipe_split", "() -> ()")


@torch.library.impl("penstock::_pipe_split", "BackendSelect")
def _do_nothing() -> None: ...


@torch.library.register_fake("penstock::_pipe_split")  # type: ignore[untyped-decorator]
def _do_nothing_in_a_trace() -> None: ...


MARK: Final = torch.ops.penstock._pipe_split.default
has_side_effect(MARK)  # or a trace would drop it as dead code

#: The marks that end a stage: ours, and that of torch's own package, which a model may have in its forward.
_MARKS: Final = frozenset({str(MARK), "pippy._pipe_split.default"})


def mark() -> None:
    """Mark a place where a traced model is cut; nothing happens when the model is run as it is."""
    torch.ops.penstock._pipe_split()


def is_mark(node: fx.Node) -> bool:
    """Return whether a node of a trace is a mark."""
    return node.op == "call_function" and str(node.target) in _MARKS

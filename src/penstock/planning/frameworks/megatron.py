"""Writes a plan for Megatron-LM: its layout, and the nearest of its two schedules, since it reads no other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.errors import WriteError
from penstock.planning.frameworks.megatron_notation import render
from penstock.planning.frameworks.settings import Settings, explain, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.planning.frameworks.settings import Nearest, Request


def settings(request: Request) -> Settings:
    """Write the arguments of the command line."""
    chosen, notes = choose(request)
    flags = [f"--pipeline-model-parallel-size {chosen.schedule.ranks}"]
    stages_per_rank = chosen.schedule.stages // chosen.schedule.ranks
    if chosen.names is not None:
        flags.append(f'--pipeline-model-parallel-layout "{layout_of(chosen.names)}"')
    elif stages_per_rank > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {stages_per_rank}")
    if chosen.names is None:
        notes += (
            "the names of modules are unknown, so the model is cut evenly, and the value holds only if the stages of "
            "the plan are even, too; pass names=",
        )
    notes += (
        f"the global batch size must be {chosen.schedule.microbatches} times the micro batch size and the number of "
        "data-parallel ranks",
    )
    text = " \\\n".join(flags) + "\n"
    return Settings("megatron", text, {"megatron.args": text}, notes, chosen.schedule, chosen.value, request.planned)


def choose(request: Request) -> tuple[Nearest, tuple[str, ...]]:
    """Return the schedule that Megatron-LM runs, and how it differs from the plan."""
    possible = ["1F1B"]
    notes: tuple[str, ...] = ()
    if request.stages_per_rank > 1 and request.schedule.ranks > 1:
        microbatches, ranks = request.schedule.microbatches, request.schedule.ranks
        if microbatches % ranks == 0:
            possible.append("Interleaved1F1B")
        else:
            notes = (
                f"interleaving in Megatron-LM needs a multiple of {ranks} microbatches; {microbatches} is none, so the "
                "stages of each rank are joined",
            )
    chosen = nearest(request, possible)
    return chosen, explain(request, chosen, "Megatron-LM reads no custom schedule") + notes


def layout_of(names: Sequence[Sequence[str]]) -> str:
    """Write which modules are in which stage, in Megatron's notation.

    >>> layout_of([["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "norm", "head"]])
    'Et|tt|tL'
    """
    everything = [name for stage in names for name in stage]
    parents = Counter(name.rpartition(".")[0] for name in everything if name.rpartition(".")[2].isdecimal())
    most = parents.most_common(1)[0][0] if parents else None
    symbols = [_symbol(name, most) for name in everything]
    layers = [place for place, symbol in enumerate(symbols) if symbol in ("t", "m")]
    if not layers:
        raise WriteError(f"no layers among the modules {', '.join(everything)}; name them like layers.0, layers.1")
    written = []
    place = 0
    for number, stage in enumerate(names):
        text = ""
        for name in stage:
            symbol = symbols[place]
            if symbol is None and (place > layers[0] or number > 0) and (place < layers[-1] or number < len(names) - 1):
                raise WriteError(
                    f"{name!r} in stage {number} has no symbol in Megatron's notation: what comes before the layers "
                    "must be in the first stage, and what comes after them in the last"
                )
            text += symbol or ""
            place += 1
        written.append(text)
    written[0] = f"E{written[0]}"
    written[-1] += "L"
    return render(written)


def _symbol(name: str, parent: str | None) -> str | None:
    """Return the symbol of a layer; None for what belongs to the embedding or the loss."""
    if any(part.startswith("mtp") for part in name.split(".")):
        return "m"
    head, _, last = name.rpartition(".")
    return "t" if head == parent and last.isdecimal() else None

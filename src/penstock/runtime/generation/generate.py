"""Generates tokens with the stages of a pipeline."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import GenerationError, PenstockError
from penstock.execution.preserved_state import Buffers, preserved_random_state
from penstock.models.modes import preserved_modes
from penstock.runtime.generation.loop import Loop
from penstock.runtime.generation.request import Request, Sampling, make_request

if TYPE_CHECKING:
    from penstock.models.generation.generator import Generator
    from penstock.runtime.engine import Engine
    from penstock.runtime.generation.loop import Report
    from penstock.runtime.transport.protocol import Transport


def generate(engine: Engine, report: Report | None, sampling: Sampling, **arguments: Any) -> torch.Tensor:
    """Generate tokens, as ``Pipeline.generate`` says. All ranks call it."""
    generator, request = _agree(engine, sampling, arguments)
    _connect(engine)
    modules = [stage.module for stage in engine.stages.values()]
    devices = {stage.device for stage in engine.stages.values()}
    with ExitStack() as undone, engine.failures, torch.no_grad():
        undone.enter_context(preserved_random_state(devices, modules))
        undone.callback(Buffers(modules).restore)
        for module in modules:
            undone.enter_context(preserved_modes(module))
            module.eval()
        with engine.step_scope(training=False):
            parts = Loop(engine, generator, request, report).run()
    known = request.prompts.shape[1] + max(part.known for part in parts)
    tokens = torch.cat([part.tokens[:, :known] for part in parts]).to(request.prompts.device)
    places = torch.arange(known, device=tokens.device) + request.shifts[:, None]
    return tokens.gather(1, places % known)


def _agree(engine: Engine, sampling: Sampling, arguments: dict[str, Any]) -> tuple[Generator, Request]:
    """Check the model and the arguments on every rank; all raise the same error if any is wrong, or they differ."""
    mistake: Exception | None = None
    mine: dict[str, Any]
    try:
        if engine.split is None:
            raise GenerationError(
                "the stages were made by hand, so it is not known how they generate tokens; split the model with "
                "penstock.split"
            )
        generator = engine.split.generator()
        request = make_request(generator, engine.transport.ranks, sampling=sampling, **arguments)
        mine = {"facts": request.facts()}
    except Exception as error:  # the others must not wait for this rank
        mistake, mine = error, {"error": str(error) if isinstance(error, PenstockError) else repr(error)}
    ranks = [json.loads(data) for data in engine.transport.exchange(json.dumps(mine).encode())]
    _compare(ranks, mistake)
    if engine.transport.rank == 0 and generator.ignored:
        warnings.warn(
            f"the model's generation_config sets {', '.join(generator.ignored)}, which generate() does not follow",
            stacklevel=4,
        )
    return generator, request


def _compare(ranks: list[dict[str, Any]], mistake: Exception | None) -> None:
    """Raise the error of the first rank that has one, or name an argument that differs."""
    for rank, other in enumerate(ranks):
        if "error" in other:
            is_of_all = all(one == other for one in ranks)
            raise GenerationError(other["error"] if is_of_all else f"on rank {rank}: {other['error']}") from mistake
    first = ranks[0]["facts"]
    for rank, other in enumerate(ranks):
        for name, value in other["facts"].items():
            if value != first[name]:
                raise GenerationError(
                    f"rank {rank} called generate() with a different {name} from rank 0; pass the same on all ranks"
                )


def _connect(engine: Engine) -> None:
    """Connect the rank of the last stage to all others, which get its tokens, the first time."""
    transport: Transport = engine.transport
    source = engine.schedule.placement.rank_of[-1]
    if not engine.shares_tokens:
        transport.connect([(min(rank, source), max(rank, source)) for rank in range(transport.ranks) if rank != source])
        engine.shares_tokens = True

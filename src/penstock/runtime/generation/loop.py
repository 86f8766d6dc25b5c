"""Runs the stages of a rank, turn by turn, until all sequences have ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.execution.stage import device_of
from penstock.ir.actions import FORWARD, Action
from penstock.runtime.failure_scope import describe_failure
from penstock.runtime.generation.routes import Routes
from penstock.runtime.generation.sampling import Numbers, choose
from penstock.runtime.generation.sequences import Sequences
from penstock.runtime.generation.transfers import Transfers
from penstock.runtime.generation.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from penstock.ir.edges import Link
    from penstock.models.generation.generator import Generator
    from penstock.models.generation.stage_cache import StageCache
    from penstock.runtime.engine import Engine
    from penstock.runtime.generation.request import Request
    from penstock.runtime.generation.turns import Job

    #: Called with a line of text now and then.
    Report = Callable[[str], object]


class Loop:
    """Generates tokens on one rank, together with the others.

    Args:
        engine: the stages and what connects the ranks.
        generator: how the model generates.
        request: what is generated.
        report: called with a line for each new token.
    """

    def __init__(self, engine: Engine, generator: Generator, request: Request, report: Report | None) -> None:
        # A compiled stage would be compiled again for every new length of its cache.
        self._stages = {index: getattr(one.module, "_orig_mod", one.module) for index, one in engine.stages.items()}
        self._generator = generator
        self._request = request
        self._report = report
        self._transport = engine.transport
        self._routes = Routes(engine.schedule, engine.transport.rank)
        self._turns = Turns(engine.schedule.placement.rank_of, request.microbatches)
        device = device_of(engine.stages)
        self._transfers = Transfers(engine.transport, request.microbatches, device)
        self._sequences = [Sequences(request, rows, device) for rows in _divide(request)]
        self._numbers = Numbers(request.sampling.seed, len(request.prompts)) if request.sampling.temperature else None
        self._caches: dict[tuple[int, int], StageCache] = {}
        self._values: dict[tuple[Link | None, int], Any] = {}

    def run(self) -> list[Sequences]:
        """Generate until all sequences have ended."""
        progress, routes = self._transport.progress, self._routes
        labels = _Labels(self._describe_turn)
        progress.enter(labels, (), labels)
        for turn in count():
            progress.index = turn
            jobs = list(self._turns.jobs(turn))
            posted = self._receive_early(jobs)
            for job in jobs:
                if routes.is_here(job.stage) and self._is_wanted(job):
                    self._compute(job)
            for job in jobs:
                if job not in posted:
                    self._exchange(job)
            if all(sequences.has_ended for sequences in self._sequences):
                break
        self._transfers.finish()
        progress.index = -1
        return self._sequences

    def _receive_early(self, jobs: Sequence[Job]) -> set[Job]:
        """Post receives of what others will compute in a turn, where it is known that they do; returns their jobs.

        Then it arrives while this rank computes. Lanes that several messages share would be blocked by that.
        """
        if self._transport.model.lanes != "message":
            return set()
        posted = {job for job in jobs if not self._routes.is_here(job.stage) and self._is_known(job)}
        for job in posted:
            self._exchange(job)
        return posted

    def _is_known(self, job: Job) -> bool:
        """Return whether this rank knows, without waiting, if a token is still wanted."""
        sequences = self._sequences[job.microbatch]
        return sequences.known >= job.token or sequences.has_ended

    def _is_wanted(self, job: Job) -> bool:
        """Return whether a microbatch has not ended before a token; waits for the token before it."""
        if not self._is_known(job):
            self._append(job.microbatch, self._transfers.take(self._routes.of_tokens(job.microbatch)))
        return not self._sequences[job.microbatch].has_ended

    def _compute(self, job: Job) -> None:
        """Run a stage for a new token of a microbatch."""
        stage, microbatch, token = job
        received = [value for link in self._routes.into(stage) for value in self._take(link, microbatch)]
        cache = self._cache_of(stage, microbatch)
        ids, mask, positions = self._sequences[microbatch].inputs(token)
        args, kwargs = self._generator.call(stage, ids, mask, positions, cache)
        try:
            output = self._stages[stage](*args, *received, **kwargs)
        except BaseException as error:
            action = Action(stage, FORWARD, microbatch)
            self._transport.fail(describe_failure(error, self._transport.rank, action))
            raise
        cache.advance(ids.shape[1])
        if stage == self._routes.last:
            self._values[None, microbatch] = self._choose(output, microbatch, token)
            return
        outputs = self._routes.outputs(stage)
        for link, value in zip(outputs.links, outputs.payloads(outputs.values(output)), strict=True):
            self._values[link, microbatch] = value

    def _cache_of(self, stage: int, microbatch: int) -> StageCache:
        if (stage, microbatch) not in self._caches:
            self._caches[stage, microbatch] = self._generator.new_cache(self._stages[stage])
        return self._caches[stage, microbatch]

    def _choose(self, output: Any, microbatch: int, token: int) -> torch.Tensor:
        """Choose the next tokens of the sequences of a microbatch."""
        sequences = self._sequences[microbatch]
        numbers = None if self._numbers is None else self._numbers.of(token)[sequences.rows]
        return sequences.pad(choose(output.logits[:, -1], self._request.sampling, numbers))

    def _take(self, link: Link, microbatch: int) -> tuple[Any, ...]:
        """Get the values of a link to a stage of this rank, as its arguments."""
        way = self._routes.of_link(link, microbatch)
        value = self._values.pop((link, microbatch)) if way is None else self._transfers.take(way)
        return self._routes.as_arguments(link, value)

    def _exchange(self, job: Job) -> None:
        """Post the transfers of what a stage computes in this turn, as far as this rank takes part in them."""
        ways = self._routes.leaving(job.stage, job.microbatch)
        is_last = job.stage == self._routes.last
        if not ((ways or is_last) and self._is_wanted(job)):
            return
        for way, link in ways:
            if self._routes.is_here(job.stage):
                self._transfers.send(way, self._values[link, job.microbatch], job.token)
                if link is not None:
                    del self._values[link, job.microbatch]
            else:
                self._transfers.receive(way, job.token)
        if is_last and self._routes.is_here(job.stage):
            self._append(job.microbatch, self._values.pop((None, job.microbatch)))

    def _append(self, microbatch: int, tokens: torch.Tensor) -> None:
        before = self._complete()
        self._sequences[microbatch].append(tokens)
        if self._report is not None and (after := self._complete()) > before:
            self._report(f"token {after} of {self._request.new}")

    def _complete(self) -> int:
        """Return how many new tokens all sequences have, or will not need."""
        return min(self._request.new if one.has_ended else one.known for one in self._sequences)

    def _describe_turn(self, turn: int) -> str:
        jobs = [job for job in self._turns.jobs(turn) if self._routes.is_here(job.stage)]
        return ", ".join(f"{stage}F{microbatch} of new token {token}" for stage, microbatch, token in jobs)


class _Labels(Sequence[str]):
    """What a rank does in each turn, as text, made when it is asked for."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, turn: Any) -> Any:
        return self._describe(turn)


def _divide(request: Request) -> Iterator[slice]:
    """Divide the sequences into microbatches, the first ones larger if they cannot be equal."""
    size, more = divmod(len(request.prompts), request.microbatches)
    begin = 0
    for microbatch in range(request.microbatches):
        end = begin + size + (microbatch < more)
        yield slice(begin, end)
        begin = end

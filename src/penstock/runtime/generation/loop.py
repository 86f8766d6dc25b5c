"""Runs the stages of a rank, turn by turn, until all sequences have ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from penstock.execution.stage import device_of
from penstock.ir.actions import FORWARD, Action
from penstock.runtime.failure_scope import describe_failure
from penstock.runtime.generation.sampling import Numbers, choose
from penstock.runtime.generation.sequences import Sequences
from penstock.runtime.generation.transfers import Transfers, Way
from penstock.runtime.generation.turns import Turns
from penstock.runtime.wiring import Wiring

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
        self._wiring = Wiring(engine.schedule)
        self._rank_of = engine.schedule.placement.rank_of
        self._last = len(self._rank_of) - 1
        device = device_of(engine.stages)
        self._turns = Turns(self._rank_of, request.microbatches)
        self._transfers = Transfers(engine.transport, request.microbatches, device)
        self._sequences = [Sequences(request, rows, device) for rows in _divide(request)]
        self._numbers = Numbers(request.sampling.seed, len(request.prompts)) if request.sampling.temperature else None
        self._caches: dict[tuple[int, int], StageCache] = {}
        self._values: dict[tuple[Link, int], Any] = {}

    def run(self) -> list[Sequences]:
        """Generate until all sequences have ended."""
        progress = self._transport.progress
        labels = _Labels(self._describe_turn)
        progress.enter(labels, (), labels)
        for turn in count():
            progress.index = turn
            jobs = list(self._turns.jobs(turn))
            for job in jobs:
                if self._rank_of[job.stage] == self._transport.rank and self._is_wanted(job):
                    self._compute(job)
            for job in jobs:
                self._exchange(job)
            if all(sequences.has_ended for sequences in self._sequences):
                break
        self._transfers.finish()
        progress.index = -1
        return self._sequences

    def _is_wanted(self, job: Job) -> bool:
        """Return whether a microbatch has not ended before a token; waits for the token before it."""
        sequences = self._sequences[job.microbatch]
        if sequences.known < job.token and not sequences.has_ended:
            self._append(job.microbatch, self._transfers.take(self._token_way(job.microbatch, self._transport.rank)))
        return not sequences.has_ended

    def _compute(self, job: Job) -> None:
        """Run a stage for a new token of a microbatch."""
        stage, microbatch, token = job
        received = [value for link in self._wiring.into(stage) for value in self._take(link, microbatch)]
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
        if stage == self._last:
            self._values[_TOKENS, microbatch] = self._choose(output, microbatch, token)
            return
        outputs = self._wiring.outputs(stage)
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
        source = self._rank_of[link.source]
        if source == self._transport.rank:
            value = self._values.pop((link, microbatch))
        else:
            value = self._transfers.take(self._way(link, microbatch, source))
        return self._wiring.route(link).as_arguments(value)

    def _exchange(self, job: Job) -> None:
        """Post the transfers of what a stage has computed in this turn, as far as this rank takes part in them."""
        here, source = self._transport.rank, self._rank_of[job.stage]
        if job.stage == self._last:
            if self._is_wanted(job):
                self._share_tokens(job, source)
            return
        for link in self._wiring.outputs(job.stage).links:
            target = self._rank_of[link.target]
            if source == target or here not in (source, target) or not self._is_wanted(job):
                continue
            if here == source:
                value = self._values.pop((link, job.microbatch))
                self._transfers.send(self._way(link, job.microbatch, target), value, job.token)
            else:
                self._transfers.receive(self._way(link, job.microbatch, source), job.token)

    def _share_tokens(self, job: Job, source: int) -> None:
        """Send new tokens to all other ranks."""
        if self._transport.rank != source:
            self._transfers.receive(self._token_way(job.microbatch, self._transport.rank), job.token)
            return
        tokens = self._values.pop((_TOKENS, job.microbatch))
        for rank in range(self._transport.ranks):
            if rank != source:
                self._transfers.send(self._token_way(job.microbatch, rank)._replace(peer=rank), tokens, job.token)
        self._append(job.microbatch, tokens)

    def _append(self, microbatch: int, tokens: torch.Tensor) -> None:
        before = min(sequences.known for sequences in self._sequences)
        self._sequences[microbatch].append(tokens)
        after = min(self._request.new if one.has_ended else one.known for one in self._sequences)
        if self._report is not None and after > before:
            self._report(f"token {after} of {self._request.new}")

    def _way(self, link: Link, microbatch: int, peer: int) -> Way:
        number = self._wiring.route(link).number
        return Way(number, microbatch, peer, f"{link.target}RECV_F{microbatch}")

    def _token_way(self, microbatch: int, target: int) -> Way:
        number = len(self._wiring.links) + target
        return Way(number, microbatch, self._rank_of[self._last], f"a new token of microbatch {microbatch}")

    def _describe_turn(self, turn: int) -> str:
        jobs = [job for job in self._turns.jobs(turn) if self._rank_of[job.stage] == self._transport.rank]
        return ", ".join(f"{stage}F{microbatch} of new token {token}" for stage, microbatch, token in jobs)


#: In place of a link: where the tokens of a microbatch are kept until they are sent.
_TOKENS: Final[Any] = None


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

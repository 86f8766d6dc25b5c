"""Measures tokens per second of ``generate``, against a naive pipeline and the unsplit model on one core.

All contestants run in the same processes in turn, in a new random order in each round, on a small Llama with random
weights:

- ``in flight``: ``pipe.generate``, with a microbatch of sequences for each rank;
- ``naive``: one sequence at a time through the same stages with the same caches. Each rank waits for the hidden state
  of the rank before it; the last one sends the token to all. Shapes are known, so nothing but values is sent;
- ``unsplit``: the model's own ``generate`` on rank 0, with all sequences as one batch, while the other ranks wait.

The goal is about the time that ranks wait for each other, so there is one sequence for each microbatch: several of them
in one microbatch cost less than one by one, on any number of ranks. That case is printed, too. If ranks share cores,
nothing is judged: a pipeline can at best be as much faster as there are cores.
"""

from __future__ import annotations

import gc
import os
import time
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

import penstock as ps
from goals import Goal, finish, parser_of
from penstock.runtime import Pipeline
from runtime_parts.processes import on_ranks
from runtime_parts.racing import Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.models.split import Split

IN_FLIGHT, NAIVE, UNSPLIT = "in flight", "naive", "unsplit"
#: Of as many times the naive pipeline as there are ranks.
SHARE = 0.8
VOCABULARY = 2048


class Size(NamedTuple):
    """The model and what it generates."""

    layers: int
    width: int
    prompt: int
    new: int
    rounds: int

    def build(self) -> Any:
        """Build the model: always the same weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=self.width // 64,
            vocab_size=VOCABULARY,
            initializer_range=0.1,  # so that it does not repeat one token
        )
        model = LlamaForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
        return model

    def prompts(self, sequences: int) -> torch.Tensor:
        """Return as many prompts."""
        return torch.randint(3, VOCABULARY, (sequences, self.prompt), generator=torch.Generator().manual_seed(1))

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, prompts of {self.prompt} tokens, {self.new} new ones"


class Naive:
    """Generates one sequence after the other: the stage of each rank waits for the one before it."""

    def __init__(self, pipe: Pipeline, split: Split, size: Size) -> None:
        self._rank, self._last = pipe.rank, pipe.schedule.ranks - 1
        self._module = pipe.stages[self._rank].module
        self._generator = split.generator()
        self._size = size

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return prompts with new tokens."""
        with torch.no_grad():
            return torch.cat([self._extend(prompt) for prompt in prompts.split(1)])

    def _extend(self, tokens: torch.Tensor) -> torch.Tensor:
        cache = self._generator.new_cache(self._module)
        positions = torch.arange(tokens.shape[1])[None]
        new = tokens
        for _ in range(self._size.new):
            args, kwargs = self._generator.call(self._rank, new, None, positions, cache)
            if self._rank:
                hidden = torch.empty(1, new.shape[1], self._size.width)
                dist.recv(hidden, self._rank - 1)
                args = (hidden,)
            output = self._module(*args, **kwargs)
            cache.advance(new.shape[1])
            new = self._pass_on(output)
            positions = positions[:, -1:] + 1
            tokens = torch.cat([tokens, new], 1)
        return tokens

    def _pass_on(self, output: Any) -> torch.Tensor:
        """Send the hidden state on, and return the token that the last rank chooses."""
        if self._rank < self._last:
            dist.send(output.contiguous(), self._rank + 1)
            token = torch.empty(1, 1, dtype=torch.long)
            dist.recv(token, self._last)
            return token
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        for rank in range(self._last):
            dist.send(token, rank)
        return token


def raced(rank: int, tell: Callable[[str], None], size: Size, counts: list[int]) -> dict[tuple[str, int], list[float]]:
    """Let all contestants generate in turn; returns seconds by contestant and number of sequences."""
    ranks = dist.get_world_size()
    model = size.build()
    split = ps.split(size.build(), stages=ranks)
    schedule = ps.build("GPipe", ranks=ranks, microbatches=1)
    seconds: dict[tuple[str, int], list[float]] = {}
    with Pipeline(split, schedule) as pipe:
        for stage in pipe.stages.values():
            stage.module.eval()
        naive = Naive(pipe, split, size)

        def unsplit(prompts: torch.Tensor) -> torch.Tensor | None:
            options = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, "do_sample": False}
            return None if rank else model.generate(prompts, max_new_tokens=size.new, **options)

        contestants: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
            IN_FLIGHT: lambda prompts: pipe.generate(prompts, max_new_tokens=size.new),
            NAIVE: naive.generate,
            UNSPLIT: unsplit,
        }
        cases = [(name, count) for count in counts for name in contestants]
        drawn = Random(0)
        gc.freeze()
        for number in range(size.rounds + 1):
            tell(f"round {number} of {size.rounds}")
            found: dict[int, torch.Tensor] = {}
            for name, count in drawn.sample(cases, len(cases)):
                gc.collect()
                dist.barrier()
                begin = time.perf_counter()
                tokens = contestants[name](size.prompts(count))
                dist.barrier()
                if number:  # the first round warms up
                    seconds.setdefault((name, count), []).append(time.perf_counter() - begin)
                if tokens is not None and not torch.equal(found.setdefault(count, tokens), tokens):
                    raise AssertionError(f"{name} generates other tokens")
    return seconds


def show(seconds: dict[tuple[str, int], list[float]], size: Size, ranks: int, counts: list[int]) -> float:
    """Print a table; returns how many times as fast as the naive pipeline it is, with a sequence for each rank."""
    print(f"{'':12} {'sequences':>9}  {'tokens per second, median (quartiles)':40} in flight is faster by")
    for count in counts:
        for name in (IN_FLIGHT, NAIVE, UNSPLIT):
            speeds = Spread.of(count * size.new / one for one in seconds[name, count])
            gain = "" if name == IN_FLIGHT else str(ratios(seconds[name, count], seconds[IN_FLIGHT, count]))
            text = f"{speeds.middle:7.1f} ({speeds.low:.1f} to {speeds.high:.1f})"
            print(f"{name:12} {count:9}  {text:40} {gain}")
    print(flush=True)
    return ratios(seconds[NAIVE, ranks], seconds[IN_FLIGHT, ranks]).middle


def main() -> None:
    """Print a table for each number of ranks; exit with 1 if the goal is missed where ranks have a core each."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, action="append", help="by default 2 and 4; may be repeated")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    size = Size(given.layers, given.width, given.prompt, given.new, given.rounds)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    goals = []
    for ranks in given.ranks or (2, 4):
        shared = f"{cores} cores are shared, nothing is judged" if ranks > cores else "a core each"
        print(f"{ranks} ranks, {shared}; {size}\n", flush=True)
        counts = [ranks, 4 * ranks]
        figure = show(on_ranks(ranks, raced, size, counts)[0], size, ranks, counts)
        if ranks <= cores:
            goal = Goal(f"generate over a naive pipeline, {ranks} ranks", figure, SHARE * ranks, at_least=True)
            goals.append(goal)
    finish(goals, given.goals)


if __name__ == "__main__":
    main()

"""Pipelines generate the tokens that the unsplit model generates, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.runtime import DistributedTransport, Pipeline, run_in_threads
from runtime.generation.unsplit import NEW, PADDING, decoder, draw_prompts, generate, sample

#: Families and schedules; V placements and several stages per rank among them. All with sequences of different lengths.
ON_TWO = [
    ("gpt2", "1F1B"),
    ("gpt2", "ZBVZeroBubble"),
    ("llama", "1F1B"),
    ("llama", "Interleaved1F1B"),
    ("qwen2", "1F1B"),
    ("gemma2", "Interleaved1F1B"),
    ("mistral", "ZBVZeroBubble"),
    ("mixtral", "1F1B"),
]
ON_FOUR = [("gpt2", "1F1B"), ("llama", "1F1B")]


def schedule_of(name: str, ranks: int) -> ps.Schedule:
    if name != "uneven":
        return ps.build(name, ranks=ranks, microbatches=4)
    # Rank 1 has no stage, rank 0 has the first and the last one.
    rows = [["0F0", "2F0", "2B0", "0B0"], [], ["1F0", "1B0"], *[[] for _ in range(ranks - 3)]]
    return ps.Schedule(rows, placement=ps.Placement((0, 2, 0), ranks))


def split(family: str, name: str, ranks: int) -> tuple[Any, ps.Schedule]:
    schedule = schedule_of(name, ranks)
    return ps.split(decoder(family), stages=schedule.stages), schedule


def generated(_rank: int, ranks: int, cases: list[tuple[str, str]], *, group: Any) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    transport = DistributedTransport(group, timeout=60)
    ids, mask = draw_prompts()
    found = []
    try:
        for family, name in cases:
            pipe = Pipeline(*split(family, name, ranks), transport=transport)
            found.append(pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=()))
    finally:
        transport.close()
    return found


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_the_unsplit_model_on_every_rank(workers, ranks, cases):
    wanted = {family: generate(decoder(family), *draw_prompts(), eos_token_id=None) for family, _ in cases}
    assert all(len(tokens[:, -NEW:].unique()) > NEW for tokens in wanted.values())  # nothing trivial
    results = workers.run(generated, cases, ranks=ranks, limit=120)
    for found in results:
        for (family, name), tokens in zip(cases, found, strict=True):
            assert torch.equal(tokens, wanted[family]), (family, name)


def in_threads(family: str, name: str, ranks: int, *args: Any, **options: Any) -> list[torch.Tensor]:
    """Generate on ranks that are threads."""
    parts = split(family, name, ranks)

    def run(transport: Any) -> torch.Tensor:
        with Pipeline(*parts, transport=transport) as pipe:
            return pipe.generate(*args, **options)

    return run_in_threads(run, ranks, timeout=60)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_samples_depend_on_the_seed_alone(family):
    ids, mask = draw_prompts(4)
    for options in ({"temperature": 0.7}, {"temperature": 1.5, "top_k": 12}, {"temperature": 2.0, "top_p": 0.6}):
        wanted = sample(decoder(family), ids, mask, seed=11, **options)
        options |= {"attention_mask": mask, "max_new_tokens": NEW, "seed": 11, "eos_token_id": ()}
        for name, ranks, microbatches in (("GPipe", 1, None), ("1F1B", 2, None), ("Interleaved1F1B", 2, 4)):
            for tokens in in_threads(family, name, ranks, ids, microbatches=microbatches, **options):
                assert torch.equal(tokens, wanted)
    other = in_threads(family, "GPipe", 1, ids, **options | {"seed": 12})[0]
    assert not torch.equal(other, wanted)


def test_sequences_end_at_their_own_time():
    model, (ids, mask) = decoder("llama"), draw_prompts()
    free = generate(model, ids, mask, eos_token_id=None)
    ends = [int(free[0, 8]), int(free[2, 11])]
    wanted = generate(model, ids, mask, eos_token_id=ends)
    assert (wanted == PADDING).sum() > (ids == PADDING).sum()
    for microbatches in (1, 2, 5):
        options = {"max_new_tokens": NEW, "eos_token_id": ends, "microbatches": microbatches}
        for tokens in in_threads("llama", "1F1B", 2, ids, attention_mask=mask, **options):
            assert torch.equal(tokens, wanted)


def test_generation_stops_when_all_have_ended():
    ids, mask = draw_prompts(2, 6)
    first = generate(decoder("gpt2"), ids, mask)[:, 6]
    lines: list[str] = []
    options = {"eos_token_id": first.tolist(), "max_new_tokens": 40, "report": lines.append}
    for tokens in in_threads("gpt2", "1F1B", 2, ids, attention_mask=mask, **options):
        assert torch.equal(tokens, torch.cat([ids, first[:, None]], 1))
    assert lines == ["token 40 of 40"] * 2


@pytest.mark.parametrize("with_mask", [True, False])
def test_padding_on_the_right(with_mask):
    ids, mask = draw_prompts()
    lengths = mask.sum(1)
    right = torch.stack([row.roll(int(length)) for row, length in zip(ids, lengths, strict=True)])
    marked = torch.stack([row.roll(int(length)) for row, length in zip(mask, lengths, strict=True)])
    wanted = generate(decoder("gpt2"), ids, mask)
    options = {"max_new_tokens": NEW} | ({"attention_mask": marked} if with_mask else {})
    (tokens,) = in_threads("gpt2", "GPipe", 1, right, **options)
    for row, other, length in zip(tokens, wanted, lengths, strict=True):
        assert torch.equal(row[: length + NEW], other[ids.shape[1] - length :])
        assert (row[length + NEW :] == PADDING).all()


def test_ranks_without_stages():
    ids, mask = draw_prompts()
    wanted = generate(decoder("llama"), ids, mask)
    for tokens in in_threads("llama", "uneven", 4, ids, attention_mask=mask, max_new_tokens=NEW):
        assert torch.equal(tokens, wanted)


def test_more_microbatches_than_sequences_and_single_prompts():
    ids, mask = draw_prompts(1)
    wanted = generate(decoder("llama"), ids, mask)
    for tokens in in_threads("llama", "1F1B", 2, ids, max_new_tokens=NEW, microbatches=3):
        assert torch.equal(tokens, wanted)

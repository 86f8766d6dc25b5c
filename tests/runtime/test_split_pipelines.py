"""What a pipeline takes from a split: stages, edges, ties, the loss; and what it refuses."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import penstock as ps
from penstock.errors import EdgeError, StageError, StepError
from penstock.runtime import Pipeline, run_in_threads

WIDTH, WORDS = 4, 20


class Skipping(nn.Module):
    """Four layers; the output of the first is added before the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        first = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](first).tanh()).tanh() + first)


@pytest.fixture(autouse=True)
def _exact():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def split_of(model, stages=4):
    return ps.split(model, stages=stages, example=((torch.zeros(2, WIDTH),), {}))


def schedule_of(name="ZBVZeroBubble", ranks=2):
    return ps.build(name, ranks=ranks, microbatches=2)


def run(split, schedule, **options):
    """Build a pipeline on each rank, and return what a step gives there."""

    def worker(transport):
        with Pipeline(split, schedule, transport=transport, **{"loss_fn": mse_loss, **options}) as pipe:
            pipe.step(torch.ones(4, WIDTH), target=torch.zeros(4, WIDTH))
            return sorted(pipe.stages), pipe.schedule.edges

    return run_in_threads(worker, schedule.ranks, timeout=30)


def test_each_rank_takes_its_stages_and_the_edges():
    split, schedule = split_of(Skipping()), schedule_of()
    for rank, (stages, edges) in enumerate(run(split, schedule)):
        assert stages == list(schedule.placement.stages_of(rank))
        assert edges == split.edges
    assert any(edge.targets[-1] - edge.source > 1 for edge in split.edges)


def test_a_schedule_may_have_the_edges_already():
    split = split_of(Skipping())
    wired = schedule_of().with_edges(split.edges)
    for schedule in (wired, ps.lower(wired)):
        assert run(split, schedule)[0][1] == split.edges


def test_a_lowered_chain_is_refused():
    with pytest.raises(EdgeError, match=r"lowered for a chain of stages, but the split has other edges .*before it"):
        run(split_of(Skipping()), ps.lower(schedule_of()))


def test_other_edges_are_refused():
    wired = schedule_of().with_edges([ps.Edge(0, (1, 2, 3)), ps.Edge(1, (2,)), ps.Edge(2, (3,))])
    with pytest.raises(EdgeError, match=r"the schedule has other edges than the split .*pass a schedule without edges"):
        run(split_of(Skipping()), wired)


def test_another_number_of_stages_is_refused():
    with pytest.raises(StageError, match="the split has 2 stages, but the schedule has 4; split the model into 4"):
        run(split_of(Skipping(), 2), schedule_of())


def test_edges_beside_a_split_are_refused():
    with pytest.raises(StageError, match="a split has its own edges; leave out edges="):
        run(split_of(Skipping()), schedule_of(), edges=[ps.Edge(0, (1,))])


def test_ranks_with_different_splits_are_named():
    model, names = Skipping(), [f"layers.{index}" for index in range(4)]
    example = ((torch.zeros(2, WIDTH),), {})
    splits = [ps.split(model, layout=[names[:cut], names[cut:]], example=example) for cut in (1, 2)]
    schedule = schedule_of("1F1B")

    def worker(transport):
        Pipeline(splits[transport.rank], schedule, loss_fn=mse_loss, transport=transport)

    with pytest.raises((StageError, StepError), match=r"rank \d was given a different (schedule|split) from rank \d"):
        run_in_threads(worker, 2, timeout=30)


def pipelines_of(make_split, **options):
    """Make a pipeline on each of two ranks, whose splits are made from numbers of their own; returns the warnings."""
    splits = [make_split(number) for number in range(2)]
    schedule = schedule_of("1F1B")

    def worker(transport):
        split = splits[transport.rank]
        if options:
            split.materialize(transport.rank, schedule.placement, **options)
        Pipeline(split, schedule, loss_fn=mse_loss, transport=transport)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run_in_threads(worker, 2, timeout=30)
    return [str(each.message) for each in warned]


def seeded(number, *, built):
    torch.manual_seed(number)
    model = Skipping() if built else Skipping
    return ps.split(model, stages=2, example=((torch.zeros(2, WIDTH),), {}))


@pytest.mark.parametrize("built", [True, False])
def test_ranks_with_different_models_are_warned(built):
    messages = pipelines_of(lambda number: seeded(number, built=built))
    assert len(messages) == 2
    assert all(message.startswith("ranks 0 and 1 have stages of models with different values") for message in messages)


@pytest.mark.parametrize("built", [True, False])
def test_ranks_with_one_model_are_not_warned(built):
    assert not pipelines_of(lambda _: seeded(3, built=built))


def test_a_function_that_seeds_the_generator_makes_one_model_on_all_ranks():
    def build():
        torch.manual_seed(5)
        return Skipping()

    def split(number):
        torch.manual_seed(number)
        return ps.split(build, stages=2, example=((torch.zeros(2, WIDTH),), {}))

    assert not pipelines_of(split)


def test_only_what_the_parameters_come_from_is_compared():
    weights = Skipping().state_dict()
    assert not pipelines_of(lambda number: seeded(number, built=False), state_dict=weights)
    assert not pipelines_of(lambda number: seeded(number, built=False), seed=5)
    assert not pipelines_of(lambda number: seeded(number, built=False), init="per_name", seed=5)


# The loss of the model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model():
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 4, "n_positions": 16, "vocab_size": WORDS}
    options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options))
    torch.set_default_dtype(before)
    return model


def text_batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, WORDS, (5, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)}


def in_threads(model, schedule, work, **options):
    """What a function of the pipeline returns on each rank; every rank has a copy of the model."""
    copies = [copy.deepcopy(model) for _ in range(schedule.ranks)]

    def worker(transport):
        split = ps.split(copies[transport.rank], stages=schedule.stages, check=False)
        with Pipeline(split, schedule, transport=transport, share_losses=True, **options) as pipe:
            return work(pipe)

    return run_in_threads(worker, schedule.ranks, timeout=60)


def test_loss_weight_and_target_come_from_the_model(language_model):
    """Every rank makes the same call; the labels are the target, and microbatches count by the labels that count."""
    schedule, batch = schedule_of(), text_batch()

    def work(pipe):
        losses = []
        pipe.step(**batch, losses=losses)
        evaluated = []
        pipe.eval(**batch, losses=evaluated)
        name = next(name for name in dict(pipe.stages[min(pipe.stages)].module.named_parameters()) if "ln_1" in name)
        gradient = dict(pipe.stages[min(pipe.stages)].module.named_parameters())[name].grad
        return torch.stack(losses), torch.stack(evaluated), name, gradient

    found = in_threads(language_model, schedule, work)
    whole = copy.deepcopy(language_model)
    parts = [{name: value.split([3, 2])[part] for name, value in batch.items()} for part in range(2)]
    expected = torch.stack([whole(**part).loss for part in parts])
    weights = torch.stack([(part["labels"][:, 1:] != -100).sum() for part in parts])
    (expected * weights / weights.sum()).sum().backward()
    for losses, evaluated, name, gradient in found:
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(evaluated, expected.detach())
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=0, atol=1e-10)


def test_a_loss_that_is_given_counts_for_itself(language_model):
    """Then microbatches count by their samples, unless something else is said."""
    schedule, batch = schedule_of(), text_batch()

    def own(output, labels):
        return cross_entropy(output.logits[:, -1], labels)

    def work(pipe):
        losses = []
        pipe.step(input_ids=batch["input_ids"], target=batch["input_ids"][:, -1], losses=losses)
        return torch.stack(losses)

    logits = language_model(input_ids=batch["input_ids"]).logits[:, -1]
    wanted = [
        cross_entropy(*part) for part in zip(logits.split([3, 2]), batch["input_ids"][:, -1].split([3, 2]), strict=True)
    ]
    for losses in in_threads(language_model, schedule, work, loss_fn=own):
        torch.testing.assert_close(losses, torch.stack(wanted).detach())


@pytest.mark.filterwarnings("ignore:loss_fn divides by")  # which a sum does not expect
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_a_reduction_that_is_given_beside_the_loss_of_the_model(language_model, reduction):
    """The weight of the model counts with its own reduction alone."""
    batch = text_batch()

    def work(pipe):
        pipe.step(**batch)
        return dict(pipe.named_parameters())

    found = in_threads(language_model, schedule_of(), work, loss_reduction=reduction)[0]
    whole = copy.deepcopy(language_model)
    parts = [{name: value.split([3, 2])[part] for name, value in batch.items()} for part in range(2)]
    weights = torch.stack([(part["labels"][:, 1:] != -100).sum() for part in parts])
    shares = weights / weights.sum() if reduction == "weighted" else torch.ones(2)
    for share, part in zip(shares, parts, strict=True):
        (share * whole(**part).loss).backward()
    name = next(name for name in found if "ln_1" in name)
    torch.testing.assert_close(found[name].grad, whole.get_parameter(name).grad, rtol=0, atol=1e-8)


def test_check_parity_of_a_split(language_model):
    """The embedding and the head are a tie."""
    for parity in in_threads(language_model, schedule_of(), lambda pipe: pipe.check_parity(**text_batch())):
        assert not parity.wrong
        assert parity.largest < 1e-6


def test_keywords_that_only_some_ranks_pass_are_refused(language_model):
    """A mask that is missing on a rank would be missing in its layers, without an error."""
    batch = text_batch()
    mask = torch.ones_like(batch["input_ids"])

    def work(pipe):
        pipe.step(**batch, **({"attention_mask": mask} if pipe.has_first else {}))

    with pytest.raises(
        (StageError, StepError), match=r"passed the keyword arguments .*attention_mask|attention_mask.* to"
    ):
        in_threads(language_model, schedule_of("1F1B"), work)


def test_keywords_that_change_after_the_first_step_are_refused(language_model):
    batch = text_batch()

    def work(pipe):
        pipe.step(**batch)
        pipe.step(**batch, attention_mask=torch.ones_like(batch["input_ids"]))

    message = "got the keyword arguments attention_mask, input_ids, but input_ids in the first step"
    with pytest.raises((StageError, StepError), match=message):
        in_threads(language_model, schedule_of("1F1B"), work)


@pytest.mark.parametrize("given", [{}, {"target": torch.zeros(5, 6)}])
def test_labels_are_asked_for_by_name(language_model, given):
    ids = text_batch()["input_ids"]
    with pytest.raises(
        (StageError, StepError), match="the model computes its loss from labels=, but the rank of the last"
    ):
        in_threads(language_model, schedule_of("1F1B"), lambda pipe: pipe.step(input_ids=ids, **given))

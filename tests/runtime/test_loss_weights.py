"""A loss that is no mean over samples, in a step that takes it for one."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StageError
from penstock.runtime import Microbatches, Pipeline, run_in_threads
from penstock.runtime.loss_weights import find_terms

PAD = -100
WORDS = 5
#: How many tokens each of the eight samples has.
UNEVEN, EVEN = [4, 4, 1, 2, 3, 1, 4, 4], [3] * 8
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def by_function(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def by_dimension(output, target):
    return functional.cross_entropy(output.transpose(1, 2), target)


by_module = nn.CrossEntropyLoss()


def by_module_of_classes(output, target):
    return by_module(output.transpose(1, 2), target)


def by_log_probabilities(output, target):
    return functional.nll_loss(output.flatten(0, 1).log_softmax(-1), target.flatten())


def smoothed(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def masked(output, target):
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return (each * (target.flatten() != PAD)).sum() / (target != PAD).sum()


def counted(output, target):
    total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total / (target != PAD).sum().item()


def selected(output, target):
    return -output.log_softmax(-1)[target != PAD].mean()


def selected_squares(output, target):
    return functional.mse_loss(output[target != PAD], torch.zeros(()).expand(int((target != PAD).sum()), WORDS))


def with_another(output, target):
    return 0.5 * by_function(output, target).double() + 1e-4 * output.square().mean() - output.mean() / 7


def of_weighted_classes(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), weight=CLASSES)


TOKEN_MEANS = [
    by_function,
    by_dimension,
    by_module_of_classes,
    by_log_probabilities,
    smoothed,
    masked,
    counted,
    selected,
    selected_squares,
    with_another,
]


def sample_mean(output, target):
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each.sum(1) / (target != PAD).sum(1)).mean()


def sum_over_samples(output, target):
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return each.sum() / len(target)


def scaled_first(output, target):
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each / len(target)).sum()


def mean_of_means(output, _target):
    return output.mean((0, 1)).mean() / 4


def mean_of_one(output, target):
    return sample_mean(output, target).mean()


SAMPLE_MEANS = [sample_mean, sum_over_samples, scaled_first, mean_of_means, mean_of_one]


def words(lengths):
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (len(lengths), 4), generator=chance)
    target = tokens.roll(1, 1)
    for row, length in enumerate(lengths):
        target[row, length:] = PAD
    return tokens, target


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 3), nn.Linear(3, WORDS))

    def forward(self, tokens):
        return self.layers(tokens)


def run(loss_fn, lengths=UNEVEN, microbatches=4, **options):
    """Warnings of two steps, and whether gradients are those of the whole batch."""
    torch.manual_seed(0)
    module, (tokens, target) = Model(), words(lengths)
    loss_fn(module(tokens), target).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    schedule = ps.build("1F1B", ranks=1, microbatches=microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline({0: module}, schedule, loss_fn=loss_fn, **options)
        pipe.step(tokens, target=target)
        found = [parameter.grad.clone() for parameter in module.parameters()]
        pipe.step(tokens, target=target)
    right = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(expected, found, strict=True))
    return [str(warning.message) for warning in caught], right


@pytest.mark.parametrize("loss_fn", TOKEN_MEANS)
def test_a_mean_over_tokens_that_is_taken_for_one_over_samples(loss_fn):
    messages, right = run(loss_fn)
    assert not right
    assert len(messages) == 1  # in the first step
    assert "so gradients differ from those of the whole batch" in messages[0]
    assert "pass loss_reduction='weighted' and loss_weight=lambda target: (target != " in messages[0]


@pytest.mark.parametrize("loss_fn", TOKEN_MEANS)
def test_a_mean_over_tokens_with_weights(loss_fn):
    messages, right = run(loss_fn, loss_reduction="weighted", loss_weight=lambda target: (target != PAD).sum())
    # One of them has a part that is a mean over samples, so there are no right weights.
    assert (messages, right) == ([], loss_fn is not with_another)
    assert run(loss_fn, lengths=EVEN) == ([], True)
    assert run(loss_fn, microbatches=1) == ([], True)


@pytest.mark.parametrize("loss_fn", SAMPLE_MEANS)
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_a_mean_over_samples(loss_fn, microbatches):
    """Also of microbatches of different sizes."""
    assert run(loss_fn, microbatches=microbatches) == ([], True)


def test_weights_of_classes():
    messages, right = run(of_weighted_classes, lengths=EVEN)
    assert not right
    assert len(messages) == 1
    weight = lambda target: CLASSES[target[target != PAD]].sum()  # noqa: E731
    assert run(of_weighted_classes, loss_reduction="weighted", loss_weight=weight) == ([], True)


def test_the_message():
    messages, _ = run(by_function)
    assert messages == [
        "loss_fn divides by 8, 3, 4, 8 (one number per microbatch), but loss_reduction='mean' counts the microbatches "
        "as 0.25, 0.25, 0.25, 0.25 of the batch, so gradients differ from those of the whole batch. For a mean over "
        "tokens pass loss_reduction='weighted' and loss_weight=lambda target: (target != -100).sum(), or count what "
        "else loss_fn divides by"
    ]


def test_what_is_not_known_is_not_judged():
    """A product with something that is trained, and a loss of more parts in some microbatches than in others."""
    scale = torch.ones((), requires_grad=True)
    assert run(lambda output, target: scale * by_function(output, target)) == ([], False)

    def of_parts(output, target):
        return sum(by_function(output, target) for _ in range(1 + int((target[0] != PAD).sum()) % 2))

    assert run(of_parts) == ([], False)


def test_sequences_of_different_lengths():
    """Padded to one length, tokens would count alike; of a mean over all elements nobody knows."""
    tokens = Microbatches([torch.randint(0, WORDS, (2, length)) for length in (3, 5)])
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    modules = [nn.Embedding(WORDS, 3), nn.Linear(3, WORDS)]

    def run_with(loss_fn):
        def worker(transport):
            options = {"loss_fn": loss_fn, "transport": transport, "shapes": "per_microbatch"}
            with Pipeline({transport.rank: modules[transport.rank]}, schedule, **options) as pipe:
                pipe.step(tokens, target=tokens, return_outputs=False)

        run_in_threads(worker, 2, timeout=60)

    with pytest.warns(UserWarning, match=re.escape("divides by 6, 10 (one number per microbatch)")):
        run_with(by_function)
    run_with(lambda output, _: output.square().mean())


def test_check_parity_agrees():
    module, (tokens, target) = Model(), words(UNEVEN)
    pipe = Pipeline({0: module}, ps.build("1F1B", ranks=1, microbatches=4), loss_fn=by_function)
    with pytest.raises(StageError, match="is loss_fn a mean over samples"):
        pipe.check_parity(tokens, target=target)


def test_torch_names_its_nodes_as_ever():
    """If this fails, torch has changed what ``loss_weights`` reads."""
    output, (_, target) = torch.zeros(8, 4, WORDS, requires_grad=True), words(UNEVEN)
    for loss_fn in TOKEN_MEANS:
        terms = find_terms(loss_fn(output, target))
        counts = [term.divisor if term.over is None else term.over for term in terms]
        assert 23 in counts or 23 * WORDS in counts, (loss_fn, terms)
    assert find_terms(by_function(output, target))[0].ignored == PAD

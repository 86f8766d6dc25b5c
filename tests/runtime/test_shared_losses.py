"""Losses on every rank are those that the last stage has."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import MetadataError
from penstock.execution.framing import frame, join_parts
from penstock.execution.value_spec import describe
from penstock.execution.wire_format import encode
from penstock.runtime import Pipeline, run_in_threads
from penstock.runtime.shared_losses import _decode, _encode

LOSSES = {
    "a number": lambda output, _: output.mean(),
    "in a vector": lambda output, _: output.mean().reshape(1),
    "in a matrix": lambda output, _: output.mean().reshape(1, 1),
    "in double precision": lambda output, _: output.double().mean().reshape(1),
}


def run(loss_fn, **options):
    schedule = ps.build("1F1B", ranks=2, microbatches=3)
    torch.manual_seed(0)
    modules = [nn.Linear(3, 3), nn.Linear(3, 1)]
    x = torch.randn(6, 3)

    def worker(transport):
        losses = []
        mine = {transport.rank: modules[transport.rank]}
        with Pipeline(mine, schedule, loss_fn=loss_fn, transport=transport, **options) as pipe:
            pipe.step(x, target=x, losses=losses)
        return losses

    return run_in_threads(worker, 2, timeout=60)


@pytest.mark.parametrize("kind", LOSSES)
def test_shapes_and_element_types_stay(kind):
    _, alone = run(LOSSES[kind])
    for losses in run(LOSSES[kind], share_losses=True):
        torch.testing.assert_close(losses, alone, rtol=0, atol=0)


def test_losses_of_different_kinds():
    losses = [torch.tensor(0.1), torch.tensor([0.2], dtype=torch.float64), torch.tensor([[0.3]], dtype=torch.bfloat16)]
    shares = [0.1, 0.7, 0.2]
    found, their_shares = _decode(_encode(losses, shares), torch.device("cpu"))
    torch.testing.assert_close(found, losses, rtol=0, atol=0)
    assert their_shares == shares
    assert _decode(_encode(losses, []), torch.device("cpu"))[1] == []
    assert _decode(_encode([], []), torch.device("cpu")) == ([], [])


@pytest.mark.parametrize(
    "described",
    [
        [],
        [torch.zeros(3), torch.zeros(()), torch.zeros(())],
        [torch.zeros(2), torch.zeros(()), torch.zeros(2)],
        [torch.zeros(2, dtype=torch.float64), torch.zeros(()), torch.zeros(())],
    ],
)
def test_what_cannot_be_losses_is_refused(described):
    with pytest.raises(MetadataError, match=r"could not decode"):
        _decode(join_parts([encode(describe(described)), bytes(8)]), torch.device("cpu"))


def test_shares_that_fit_no_losses_are_refused():
    description = encode(describe([torch.zeros(1), torch.zeros(())]))
    assert _decode(join_parts([description, bytes(4), bytes(8)]), torch.device("cpu")) == ([torch.zeros(())], [0.0])
    for size in (4, 16):
        with pytest.raises(MetadataError, match=r"could not decode"):
            _decode(join_parts([description, bytes(4), bytes(size)]), torch.device("cpu"))


def test_damaged_losses_are_refused():
    data = bytearray(_encode([torch.tensor(0.5), torch.tensor(0.25)], [0.5, 0.5]))
    data[-1] ^= 1
    with pytest.raises(MetadataError, match=r"checksum mismatch"):
        _decode(bytes(data), torch.device("cpu"))
    with pytest.raises(MetadataError, match=r"could not decode"):
        _decode(join_parts([]), torch.device("cpu"))
    with pytest.raises(MetadataError, match=r"ends too early"):
        _decode(frame(bytes(2)), torch.device("cpu"))

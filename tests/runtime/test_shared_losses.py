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
from penstock.runtime.shared_losses import _read, _written

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
    torch.testing.assert_close(_read(_written(losses), torch.device("cpu")), losses, rtol=0, atol=0)
    assert _read(_written([]), torch.device("cpu")) == []


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
        _read(join_parts([encode(describe(described)), bytes(8)]), torch.device("cpu"))


def test_damaged_losses_are_refused():
    data = bytearray(_written([torch.tensor(0.5), torch.tensor(0.25)]))
    data[-1] ^= 1
    with pytest.raises(MetadataError, match=r"checksum mismatch"):
        _read(bytes(data), torch.device("cpu"))
    with pytest.raises(MetadataError, match=r"could not decode"):
        _read(join_parts([]), torch.device("cpu"))
    with pytest.raises(MetadataError, match=r"ends too early"):
        _read(frame(bytes(2)), torch.device("cpu"))

"""Models with no_grad and autocast regions are traced, also where a cut falls into one."""

import pytest
import torch
from torch import fx, nn

from models.tracing.traced_models import WIDTH, X, numbers
from penstock.models.tracing.regions import modes_kept
from penstock.pipelining import SplitPoint, pipe_split, pipeline


class Frozen(nn.Module):
    """A part without gradients, with an autocast in it and modules, one of which runs with gradients, too."""

    def __init__(self, split):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.split = split

    def forward(self, x):
        with torch.no_grad():
            h = self.encoder[0](x)
            self.split()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.encoder[2](self.encoder[1](h))
                with torch.enable_grad():
                    again = self.head(x)
            h = h.float()
        self.split()
        h = self.head(h) + again.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.encoder[0](h).float() * h


def run_as_one(pipe, *args):
    return fx.Interpreter(pipe.split_gm).run(*args)


@pytest.mark.parametrize("cuts", ["inside", "by name"])
def test_outputs_and_gradients_are_those_of_the_model(cuts):
    torch.manual_seed(3)
    model = Frozen(pipe_split if cuts == "inside" else lambda: None)
    pipe = pipeline(model, (X,), split_spec={"encoder.2": SplitPoint.END} if cuts == "by name" else None)
    assert pipe.num_stages == (3 if cuts == "inside" else 2)
    x = numbers(4, *X.shape)
    expected, (found,) = model(x), run_as_one(pipe, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    expected.square().mean().backward()
    found.square().mean().backward()
    seen = set()
    whole = dict(model.named_parameters())
    sums = {}
    for stage in pipe.split_gm.children():
        for name, parameter in stage.named_parameters():
            seen.add(name)
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
    assert seen == whole.keys()
    assert sums.keys() == {name for name, parameter in whole.items() if parameter.grad is not None}
    for name, gradient in sums.items():
        torch.testing.assert_close(gradient, whole[name].grad)


def test_the_mode_around_a_stage_stays():
    pipe = pipeline(Frozen(pipe_split), (X,))
    with torch.no_grad():
        assert not pipe(X)[0].requires_grad
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert pipe(X)[0].is_inference()
    pipe(X)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_inside_a_region_leaves_no_mode_behind():
    first = pipeline(Frozen(pipe_split), (X,)).get_stage_module(1)
    with pytest.raises(RuntimeError, match="shapes"):
        first(numbers(0, 2, WIDTH + 1), X)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def fail_in_a_region():
    with torch.autocast("cpu", dtype=torch.bfloat16), modes_kept():
        torch.set_grad_enabled(False)
        torch.autocast("cpu", dtype=torch.float16).__enter__()
        raise ZeroDivisionError


def test_modes_are_switched_back_after_an_error():
    with pytest.raises(ZeroDivisionError):
        fail_in_a_region()
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, while it traces a condition
def test_a_condition_is_kept():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            pipe_split()
            with torch.no_grad():
                y = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
            return self.second(y)

    model = Conditional()
    pipe = pipeline(model, (X,))
    assert pipe.num_stages == 2
    for x in (X, -X):
        torch.testing.assert_close(pipe(x)[0], model(x), rtol=0, atol=0)

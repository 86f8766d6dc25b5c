"""A ``.grad`` that torch keeps as a lazy conjugate is added to and divided like any other."""

import pytest
import torch
from torch import nn

from penstock.pipelining import PipelineStage
from penstock.pipelining.schedules import _Action, _PipelineScheduleRuntime
from runtime.test_lazy_gradients import COMPLEX, EARLIER, ORDERS, Conjugated, expected, loss_fn

pytestmark = pytest.mark.usefixtures("one_gloo_rank")


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("order", ORDERS)
def test_all_orders_of_backwards(order: str, earlier: str, scale_grads: bool) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Conjugated(), Conjugated()]
    x, y = torch.randn(4, 4, dtype=COMPLEX), torch.randn(4, 4, dtype=COMPLEX)
    weight = 1 if scale_grads else 0.5  # of each microbatch's mean in that of the batch
    gradients = expected(modules, x, y, earlier)
    parameters = list(nn.Sequential(*modules).parameters())
    for parameter in parameters:
        parameter.grad = EARLIER[earlier](parameter)
    stages = [PipelineStage(module, index, 2, torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = _PipelineScheduleRuntime(
        stages, 2, loss_fn=lambda output, target: weight * loss_fn(output, target), scale_grads=scale_grads
    )
    schedule._prepare_schedule_with_comms({0: [_Action.from_str(text) for text in ORDERS[order].split()]})
    schedule.step(x, target=y)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad.resolve_conj(), gradient)

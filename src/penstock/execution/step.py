"""The state of one step: everything in flight between the operations of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import MicrobatchError

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import GradientEdge

    from penstock.execution.channel import Pending
    from penstock.execution.shared_memory import Kin, SharedInputs
    from penstock.execution.training_check import TrainingCheck
    from penstock.execution.value_spec import ValueSpec
    from penstock.ir.actions import Action

    Tensors = Sequence[torch.Tensor]


class InFlight(NamedTuple):
    """A microbatch in a stage, between its forward and its backward.

    Attributes:
        roots: where its graph begins: an edge for each output that needs a gradient, or for the loss.
        inputs: the tensors that came from other stages and need a gradient.
    """

    roots: Sequence[GradientEdge]
    inputs: Tensors


class Step:
    """The state of one step on one rank.

    Values between stages are kept by a key that names link and microbatch, the rest by one that names stage and
    microbatch. Operations pop what they use, so that it lives no longer than needed.

    Attributes:
        args: the positional arguments of the first stage, for each microbatch.
        shared_args: those of them that share memory, for each microbatch, if any of them needs a gradient.
        kwargs: the keyword arguments of every stage, for each microbatch.
        targets: the target of the loss function, for each microbatch.
        shares: what each microbatch's loss counts for in that of the batch.
        seeds: the gradient of each loss that has been computed.
        losses: the loss of each microbatch, without history, where it is computed.
        outputs: the output of each microbatch, if they are to be kept.
        receiving: activations that have been asked for.
        local_values: activations from a stage of the same rank.
        outgoing: activations that have yet to be sent.
        operands: the forward or backward that runs now, and the inputs or gradients that it works on.
        computing: whether its module or backward itself runs, not what comes before and after.
        metas: the description of each activation that was sent, where it varies.
        sends_in_flight: what has been sent but not been waited for: transfers, each with its tensor and its version.
        samples: how many samples each microbatch has: known at the first stage, and sent with shapes that vary.
        target_samples: how many each target has, if they are to be compared.
        kin: the inputs of the stage that runs whose originals share memory, in groups.
        in_flight: microbatches between forward and backward.
        input_counts: for a stage that several links enter, how many tensors that need a gradient came over each.
        root_numbers: for a stage whose values several stages took, which root each gradient that comes back belongs to.
        deferred: weight gradients to be computed.
        on_loss: called with the number of a microbatch and its loss, if set.
        training_check: notes forwards whose output, or loss, requires no gradient; None if there may be any.
    """

    __slots__ = (
        "args",
        "computing",
        "deferred",
        "in_flight",
        "input_counts",
        "kin",
        "kwargs",
        "local_gradients",
        "local_values",
        "losses",
        "metas",
        "on_loss",
        "operands",
        "outgoing",
        "outgoing_gradients",
        "outputs",
        "receiving",
        "receiving_gradients",
        "root_numbers",
        "samples",
        "seeds",
        "sends_in_flight",
        "shared_args",
        "shares",
        "target_samples",
        "targets",
        "training_check",
    )

    def __init__(
        self,
        microbatches: int,
        *,
        args: Sequence[tuple[Any, ...]] = (),
        shared_args: Sequence[SharedInputs | None] = (),
        kwargs: Sequence[dict[str, Any]] = (),
        targets: Sequence[Any] = (),
        shares: Sequence[float] = (),
        samples: Sequence[int] = (),
        target_samples: Sequence[int] = (),
        keep_outputs: bool = False,
        on_loss: Callable[[int, torch.Tensor], None] | None = None,
        training_check: TrainingCheck | None = None,
    ) -> None:
        self.args = args
        self.shared_args = shared_args
        self.kwargs = kwargs
        self.targets = targets
        self.shares = shares
        self.on_loss = on_loss
        self.seeds: dict[int, Tensors] = {}
        self.losses: list[torch.Tensor | None] = [None] * microbatches
        self.outputs: list[Any] | None = [None] * microbatches if keep_outputs else None
        self.receiving: dict[int, Any] = {}
        self.local_values: dict[int, Any] = {}
        self.outgoing: dict[int, Any] = {}
        self.metas: dict[int, ValueSpec] = {}
        self.operands: tuple[Action, Any] | None = None
        self.computing = False
        self.receiving_gradients: dict[int, Any] = {}
        self.local_gradients: dict[int, Sequence[torch.Tensor | None]] = {}
        self.outgoing_gradients: dict[int, Any] = {}
        self.sends_in_flight: dict[int, Sequence[tuple[Pending, torch.Tensor, int | None]]] = {}
        self.kin: Kin = ()
        self.samples = dict(enumerate(samples))
        self.target_samples = target_samples
        self.in_flight: dict[int, InFlight] = {}
        self.input_counts: dict[int, Sequence[int]] = {}
        self.root_numbers: dict[int, Sequence[int]] = {}
        self.deferred: dict[int, Callable[[], None]] = {}
        self.training_check = training_check

    def check_samples(self, microbatch: int) -> None:
        """Refuse a microbatch whose target has a different size: a loss function might not notice."""
        known = self.samples.get(microbatch)
        if self.target_samples and known is not None and known != self.target_samples[microbatch]:
            raise sample_mismatch_error([known], [self.target_samples[microbatch]])


def sample_mismatch_error(samples: Sequence[int], targets: Sequence[int], hint: str = "") -> MicrobatchError:
    """Make the error for a target whose size differs from the batch's."""
    return MicrobatchError(
        f"the target has {sum(targets)} samples (by microbatch {list(targets)}), but the first stage was given "
        f"{sum(samples)} ({list(samples)}); pass both from the same batch, or a target that is already split: "
        f"Microbatches([...]){hint}",
        name="target",
    )


Operation = Callable[[Step], None]

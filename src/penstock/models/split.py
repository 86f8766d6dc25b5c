"""Splits a model into stages: nothing rewritten, nothing lost."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import SplitError
from penstock.ir.edges import Edge, chain
from penstock.ir.numbers import whole_number
from penstock.ir.placement import Placement
from penstock.models.checking import SplitCheck, Stages
from penstock.models.choose import choose_layout, find_opened
from penstock.models.describe import describe
from penstock.models.description import Description
from penstock.models.edges import Flow, find_flow
from penstock.models.examine import examine
from penstock.models.generation.generator import Generator
from penstock.models.holdings import declared_ties, find_holdings, group_names, part_names
from penstock.models.inputs import Example, checked_example, example_for
from penstock.models.layout import checked_names, shorten
from penstock.models.loss import ModelLoss, model_loss
from penstock.models.made_parts import MadeParts, Part
from penstock.models.materialize import checked_seed
from penstock.models.measure_loss import measure_loss
from penstock.models.model_source import ModelSource, examination, is_on_meta
from penstock.models.modes import preserved_modes
from penstock.models.origin import identify_seed, identify_values
from penstock.models.outside_state import OutsideState
from penstock.models.plan import Plan
from penstock.models.sequential import is_plain, sequential_stage
from penstock.models.stage_module import make_stage
from penstock.models.tree_copy import copy_tree
from penstock.models.units import Units, find_units
from penstock.models.weights.pretrained import Configuration, rename_for_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock.execution.ties import Tie
    from penstock.models.materialize import Init, Values
    from penstock.models.partition import UnitCosts
    from penstock.models.record import Record


def split(
    model: nn.Module | Callable[[], nn.Module],
    *,
    stages: int | Sequence[int] | None = None,
    layout: str | Iterable[Iterable[str]] | Mapping[int, Iterable[str]] | None = None,
    costs: UnitCosts | None = None,
    ties: Iterable[Sequence[str]] = (),
    example: Example | torch.Tensor | Mapping[str, Any] | None = None,
    check: bool = True,
) -> Split:
    """Split a model into stages.

    Args:
        model: the model, which is not changed; the stages share its parameters. Or a function that builds it, or a
            model on the meta device: then only ``stages`` or ``materialize`` of the split make parameters real.
        stages: how many stages; layers are distributed by count, or by ``costs``. Or how many layers each stage has, as
            a plan says: ``plan.partition.sizes``.
        layout: instead of ``stages``, the names of the modules of each stage, as a list of lists or by number; or a
            string in Megatron's notation.
        costs: the cost of each layer, as a sequence or by name.
        ties: parameters that are to stay equal, as groups of names. Those that are one tensor are found anyway.
        example: ``(args, kwargs)`` of a small call of the model; a tensor if that is all it takes, a dictionary if it
            only takes keyword arguments. An ``nn.Sequential`` and Hugging Face text models need none.
        check: whether to run the stages once on the example and compare with the model.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> parts = split(model, stages=2)
    >>> parts.layout
    (('0', '1', '2', '3'), ('4',))
    >>> [str(edge) for edge in parts.edges]
    ['0>1']
    """
    source = ModelSource(model)
    if (stages is None) == (layout is None):
        raise SplitError("pass either stages= or layout=, e.g. split(model, stages=4)")
    if layout is not None and costs is not None:
        raise SplitError("costs= chooses a layout, but layout= is one; pass stages= and costs=, or only layout=")
    original = source.skeleton()
    base = copy_tree(original, declared_ties(original, ties))
    names = layout if layout is None or isinstance(layout, str) else checked_names(layout)
    units = find_units(base, find_opened(base, names))
    example = example_for(base) if example is None else checked_example(example)
    if example is None and not is_plain(base):
        raise SplitError(
            f"a {type(original).__name__} needs an example to find out what its modules take from each other; pass "
            "example=(args, kwargs) of a small call"
        )
    record = None
    with OutsideState(base).preserved():
        if example is not None and not is_plain(base):
            record = examine(base, units, *example)
        description = _describe(base, units, record, choose_layout(base, units, record, stages, names, costs))
        if example is not None:
            description = description._replace(loss=measure_loss(base, *example))
    made = Split(base, units, description, source, Configuration.of(original))
    if check and example is not None:
        made.check(example)
    return made


class Split:
    """A model and how it is divided into stages.

    Attributes:
        model: a copy of the model that shares its parameters; its configuration builds no caches.
        description: the layout, edges, ties and the record of the probe, as plain data.
        configuration: the configuration of a model of transformers, as it was given.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        description: Description,
        source: ModelSource | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        self.model = model
        self.description = description
        self.configuration = configuration
        self._units = units
        self._source = source or ModelSource(model)
        self._made = MadeParts()
        self._origin = identify_values(model)

    @property
    def layout(self) -> tuple[tuple[str, ...], ...]:
        """The names of the modules of each stage."""
        return self.description.layout

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What the stages send each other."""
        return self.description.flow.edges

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that several stages hold."""
        return self.description.ties

    @property
    def digest(self) -> str:
        """A checksum of the description; ranks that have the same one have split the model in the same way."""
        return self.description.digest

    @property
    def loss(self) -> ModelLoss | None:
        """The loss as the model computes it, if it is known how."""
        return model_loss(self.description.loss)

    def stages(self, rank: int | None = None, placement: Placement | None = None) -> dict[int, nn.Module]:
        """Make the modules of stages, which share parameters with the model and keep their names.

        A stage is called with the values of its incoming edges, and the keyword arguments of the model; the first one
        with the model's arguments. It returns the values of its outgoing edges, the last one the model's output.

        Args:
            rank: whose stages; None makes all.
            placement: which stages are on the rank, as in ``schedule.placement``.
        """
        wanted = self._stages_of(rank, placement)
        part = self._made.find(wanted)
        if part is None and is_on_meta(self.model):
            part = self._make_as_built(wanted)
            self._made.put(wanted, part)
        return self._make(wanted, self.model if part is None else part.model)

    def stage_alone(self, stage: int) -> nn.Module:
        """Make the module of one stage to measure it: parameters that are made real for it are not kept."""
        part = self._made.get((stage,))
        if part is None and is_on_meta(self.model):
            part = self._make_as_built((stage,))
        return self._make((stage,), self.model if part is None else part.model)[stage]

    def origin_of(self, stages: Iterable[int]) -> str:
        """Identify the model that stages are parts of: its values when it was split, or what they are drawn from.

        It is empty if that is not known here: parameters were loaded, or are made by a function of yours.
        """
        part = self._made.find(stages)
        return self._origin if part is None else part.origin

    def materialize(
        self,
        rank: int | None = None,
        placement: Placement | None = None,
        *,
        init: Init = "exact",
        seed: int | torch.Tensor = 0,
        state_dict: Values | None = None,
        device: torch.device | str | None = None,
    ) -> dict[int, nn.Module]:
        """Make the stages of a rank with parameters of their own; those of other ranks take no memory.

        ``stages`` returns them, too, from then on.

        Args:
            rank: whose stages; None makes all.
            placement: which stages are on the rank, as in ``schedule.placement``.
            init: ``"exact"`` gives the values that ``torch.manual_seed(seed)`` and building the whole model give, and
                needs a function that builds it. ``"per_name"`` draws each parameter from a generator of its own, seeded
                from ``seed`` and its name: the same values for any number of stages, and no others are drawn. Or a
                function that is called with the name and the uninitialised tensor of each parameter.
            seed: see ``init``.
            state_dict: the values of parameters and buffers, by name, instead of ``init``; or the path of a safetensors
                file, or of a folder that ``save_pretrained`` or ``penstock.export`` wrote. Only this rank's are read.
            device: where the parameters go.

        >>> parts = split(lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), stages=2)
        >>> parts.model[0].weight.is_meta
        True
        >>> list(parts.materialize(seed=3)[1].state_dict())
        ['2.weight', '2.bias']
        """
        wanted, seed = self._stages_of(rank, placement), checked_seed(seed, init)
        origin = identify_seed(init, seed) if isinstance(init, str) and state_dict is None else ""
        model = self._part_of(wanted, init=init, seed=seed, state_dict=state_dict, device=device)
        self._made.put(wanted, Part(model, origin, is_chosen=True))
        return self._make(wanted, model)

    def _make_as_built(self, stages: tuple[int, ...]) -> Part:
        """Make the part that the function would have built at the time of the split."""
        if not self._source.is_callable:
            raise SplitError(
                "the model is on the meta device; give its parameters values first: split.materialize(rank, "
                "placement=schedule.placement, init='per_name'), or state_dict="
            )
        model = self._part_of(stages, seed=self._source.state)
        # A function that seeds the generator draws the same from any state. If it leaves none behind, nothing is known.
        state = self._source.state_after
        origin = "" if torch.equal(state, self._source.state) else identify_seed("exact", state)
        return Part(model, origin, is_chosen=False)

    def _part_of(self, stages: Iterable[int], **options: Any) -> nn.Module:
        groups = [{*names} for names in self.description.shared]
        names = part_names(self.model, self._units, [self.description.held[stage] for stage in stages], groups)
        part = self._source.part(names, **options)
        return copy_tree(part, declared_ties(part, self.description.shared))

    def _stages_of(self, rank: int | None, placement: object) -> tuple[int, ...]:
        if rank is None:
            return tuple(range(len(self.layout)))
        if not isinstance(placement, Placement):
            got = "" if placement is None else f", got a {type(placement).__name__}"
            raise SplitError(f"stages of a rank need a placement; pass placement=schedule.placement{got}")
        if placement.stages != len(self.layout):
            raise SplitError(
                f"the placement has {placement.stages} stages, but the model was split into {len(self.layout)}"
            )
        return tuple(placement.stages_of(whole_number("rank", rank, most=placement.ranks - 1)))

    def _make(self, stages: Iterable[int], model: nn.Module) -> dict[int, nn.Module]:
        units = self._units if model is self.model else find_units(model, self.description.opened)
        return {stage: self._stage(stage, model, units) for stage in stages}

    def check(self, example: Example | torch.Tensor | Mapping[str, Any]) -> None:
        """Run the stages on an example, with NaN for all that a stage must not read, and compare with the model.

        Raises ``SplitError`` that names the module whose value is missing.
        """
        args, kwargs = checked_example(example)
        record = self.description.record
        stages = Stages(
            self.layout,
            self.edges,
            tuple(self._units.glue),
            lambda stage, poison: self._stage(stage, self.model, self._units, poison),
        )
        with examination(self.model), preserved_modes(self.model), torch.no_grad():
            check = SplitCheck(self.model, stages, args, kwargs)
            if record is not None and not record.is_eval_only and not self.model.training:
                self.model.train()  # as in the probe
            if record is not None and record.is_random:
                with suppress(SplitError):  # it may fail only because random numbers differ
                    check.run()  # which takes the same draws, in the same order
                    return
                self.model.eval()
            check.run()

    def generator(self) -> Generator:
        """Say how the stages generate tokens; raises ``SplitError`` if they cannot."""
        return Generator.of(self)

    def rename_for_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return some of the model's tensors under the names that files of its family have, if it has a family."""
        return rename_for_files(self.model, tensors)

    def write_configuration(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write what else ``from_pretrained`` needs to read tensors of a type from a folder."""
        if self.configuration is not None:
            self.configuration.write(folder, dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain data."""
        return self.description.to_json()

    @classmethod
    def from_json(cls, model: nn.Module | Callable[[], nn.Module], data: Any) -> Split:
        """Make a split of a model from a description, without a probe."""
        description = Description.from_json(data)
        source = ModelSource(model)
        original = source.skeleton()
        base = copy_tree(original, declared_ties(original, description.shared))
        units = find_units(base, description.opened)
        names = {name for stage in description.layout for name in stage}
        if names != set(units.units):
            raise SplitError(
                "the description does not fit the model; in only one of them are "
                f"{shorten(sorted(names ^ set(units.units)))}"
            )
        return cls(base, units, description, source, Configuration.of(original))

    def describe(self) -> str:
        """Return a table of the stages: modules, parameters, bytes, edges and ties."""
        return describe(self.model, self.description)

    def _stage(self, stage: int, model: nn.Module, units: Units, poison: Collection[str] = ()) -> nn.Module:
        found = self.description
        if found.record is None:
            return sequential_stage(model, found.layout[stage])
        plan = Plan(found.record, found.flow, stage, len(found.layout))
        return make_stage(model, units, plan, frozenset(found.held[stage]), poison=poison)


def _describe(
    model: nn.Module, units: Units, record: Record | None, layout: tuple[tuple[str, ...], ...]
) -> Description:
    count = len(layout)
    stages_of = {unit: {stage} for stage, names in enumerate(layout) for unit in names}
    if record is None:
        flow = Flow(chain(count), (), (), {})
    else:
        flow = find_flow(record, layout, units.listed)
        for call, stage in zip(record.calls, flow.stages, strict=True):
            if not call.is_glue:
                stages_of[call.unit].add(stage)
    holdings = find_holdings(model, units, stages_of, flow.parameters, count)
    called = {call.unit for call in record.calls} if record else set(units.units)
    shared = dict.fromkeys(group_names(dict(model.named_parameters(remove_duplicate=False))).values())
    return Description(
        layout,
        flow,
        holdings.ties,
        tuple(tuple(sorted(names)) for names in holdings.names),
        record,
        tuple(name for name in units.containers if name and name not in find_units(model).containers),
        tuple(names for names in shared if len(names) > 1),
        tuple(name for name in units.units if name not in called),
        holdings.unread,
    )

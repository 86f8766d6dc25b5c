"""Builds the links of one rank, and the ends of its stages between which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.execution.links.fan_in import FanIn
from penstock.execution.links.fan_out import FanOut
from penstock.execution.links.headered import HeaderedLink
from penstock.execution.links.local import LocalLink
from penstock.execution.links.negotiated import NegotiatedLink
from penstock.execution.links.single_tensor import SingleTensorLink, is_single
from penstock.runtime.ends import BatchInputs, LossHead, NoInputs, NoOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.execution.links import Inbound, LinkEnds, Outbound
    from penstock.execution.stage import Stage
    from penstock.ir.edges import Link
    from penstock.runtime.ends import LossFunction
    from penstock.runtime.shape_negotiation import Metas
    from penstock.runtime.transport.protocol import Transport
    from penstock.runtime.wiring import Wiring


class RankLinks(NamedTuple):
    """The links to and from the stages of this rank.

    Attributes:
        by_ends: each, by its source and its target.
        last_modifying: the last stage of the pipeline that modifies its inputs in place; None if any may.
    """

    by_ends: Mapping[tuple[int, int], LinkEnds]
    last_modifying: int | None = None

    @property
    def have_headers(self) -> bool:
        """Whether values are described as they go."""
        return any(isinstance(link, HeaderedLink) for link in self.by_ends.values())

    def may_be_modified(self, source: int) -> bool:
        """Whether a later stage may modify in place what comes from this one."""
        return self.last_modifying is None or source < self.last_modifying


class LinkBuilder:
    """Builds links and ends.

    Args:
        wiring: how the stages of the pipeline are connected.
        stages: the stages of this rank.
        transport: what connects the ranks.
        microbatches: how many microbatches there are.
    """

    def __init__(self, wiring: Wiring, stages: Mapping[int, Stage], transport: Transport, microbatches: int) -> None:
        self._wiring = wiring
        self._stages = stages
        self._transport = transport
        self._microbatches = microbatches

    def agreed(self, metas: Metas, last_modifying: int) -> RankLinks:
        """Build links over which goes what ranks have agreed on."""
        links = RankLinks({}, last_modifying)
        return links._replace(
            by_ends={
                (link.source, link.target): self._local(link, modifiable=links.may_be_modified(link.source))
                or self._negotiated(link, metas, modifiable=links.may_be_modified(link.source))
                for link in self._wiring.touching(self._stages)
            }
        )

    def described(self, first_tag: int = 0) -> RankLinks:
        """Build links over which every value is described; their messages have tags from ``first_tag`` on."""
        return RankLinks(
            {
                (link.source, link.target): self._local(link, modifiable=True) or self._headered(link, first_tag)
                for link in self._wiring.touching(self._stages)
            }
        )

    def inbound(self, links: RankLinks) -> dict[int, Inbound]:
        """Where the inputs of each stage come from."""
        return {index: self._inbound(index, links) for index in self._stages}

    def outbound(self, links: RankLinks, loss_fn: LossFunction | None) -> dict[int, Outbound]:
        """Where the outputs of each stage go."""
        return {index: self._outbound(index, links, loss_fn) for index in self._stages}

    def _inbound(self, index: int, links: RankLinks) -> Inbound:
        described = self._wiring.into(index)
        if not described:
            return BatchInputs() if index == 0 else NoInputs()
        entering = [links.by_ends[link.source, link.target] for link in described]
        if len(entering) == 1 and described[0].gradient:
            return entering[0]
        returning = [link.gradient for link in described]
        return FanIn(entering, index, self._microbatches, returning, self._transport.progress)

    def _outbound(self, index: int, links: RankLinks, loss_fn: LossFunction | None) -> Outbound:
        if index == len(self._wiring.rank_of) - 1:
            return LossHead(self._stages[index], loss_fn)
        outputs = self._wiring.outputs(index)
        leaving = [links.by_ends[link.source, link.target] for link in outputs.links]
        if outputs.is_plain:
            return leaving[0]
        if not leaving:
            return NoOutputs()
        modifiable = links.may_be_modified(index)
        return FanOut(outputs, leaving, self._microbatches, self._transport.progress, modifiable=modifiable)

    def _local(self, link: Link, *, modifiable: bool) -> LinkEnds | None:
        if link.source in self._stages and link.target in self._stages:
            return LocalLink(self._wiring.route(link), self._microbatches, modifiable=modifiable)
        return None

    def _negotiated(self, link: Link, metas: Metas, *, modifiable: bool) -> LinkEnds:
        here, there = self._ends_of(link)
        specs = metas[link.source, link.target]
        shares = modifiable and any(spec.shared for spec in specs)
        kind = SingleTensorLink if is_single(specs) and not shares else NegotiatedLink
        peer, device = self._wiring.rank_of[there], self._stages[here].device
        return kind(self._wiring.route(link), self._transport, peer, device, specs, modifiable=modifiable)

    def _headered(self, link: Link, first_tag: int) -> LinkEnds:
        here, there = self._ends_of(link)
        peer, device = self._wiring.rank_of[there], self._stages[here].device
        return HeaderedLink(self._wiring.route(link), self._microbatches, self._transport, peer, device, first_tag)

    def _ends_of(self, link: Link) -> tuple[int, int]:
        """The stage on this rank, and the one on another."""
        return (link.source, link.target) if link.source in self._stages else (link.target, link.source)

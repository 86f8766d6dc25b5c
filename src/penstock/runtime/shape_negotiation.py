"""Agrees on what goes over each link, by a dry run through the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import MetadataError
from penstock.execution.dry_run import Call, find_changes, find_outputs
from penstock.execution.framing import decode_numbers, encode_numbers, join_parts, split_parts
from penstock.execution.microbatch_kinds import Kinds, find_kinds
from penstock.execution.value_spec import ValueSpec
from penstock.execution.wire_format import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.execution.stage import Stage
    from penstock.ir.edges import Link
    from penstock.runtime.transport.protocol import Transport
    from penstock.runtime.wiring import Wiring

#: By source and target of a link: what each microbatch looks like.
Metas = dict[tuple[int, int], list[ValueSpec]]


class Announcement(NamedTuple):
    """What goes over a link.

    Attributes:
        kinds: the kind of each microbatch.
        samples: how many samples each microbatch has, if known.
        metas: the description of each kind.
    """

    kinds: Kinds
    samples: Sequence[int] | None
    metas: Sequence[ValueSpec]

    @property
    def by_microbatch(self) -> list[ValueSpec]:
        """The description of each microbatch."""
        return [self.metas[kind] for kind in self.kinds]


def infer_specs(
    stages: Mapping[int, Stage],
    wiring: Wiring,
    transport: Transport,
    args: Sequence[tuple[Any, ...]],
    kwargs: Sequence[dict[str, Any]],
    samples: Sequence[int] | None,
) -> tuple[Metas, Sequence[int] | None]:
    """Agree on what goes over every link to or from the stages of this rank. All ranks of the pipeline call it.

    Each stage is run once for every kind of microbatch, the first stage with the real arguments, the others with zeros
    of the announced shapes; then it announces to those after it its outputs' shapes, and each microbatch's samples. The
    first one knows the latter, the others receive it.
    """
    metas: Metas = {}
    announcements = _Announcements(transport, wiring, len(kwargs))
    for index in sorted(stages):
        heard = {link: announcements.receive(link) for link in wiring.into(index)}
        metas |= {(link.source, link.target): one.by_microbatch for link, one in heard.items()}
        samples = next((one.samples for one in heard.values() if one.samples), samples)
        given = args if index == 0 else [()] * len(kwargs)
        kinds = _combine([one.kinds for one in heard.values()]) if heard else find_kinds(given, kwargs)[0]
        calls = []
        for first in map(kinds.index, range(max(kinds) + 1)):
            received = [(wiring.route(link), one.metas[one.kinds[first]]) for link, one in heard.items()]
            call = Call(given[first], kwargs[first])
            calls.append(call.with_zeros(received, stages[index].device) if heard else call)
        outputs = wiring.outputs(index)
        if not outputs.links:
            find_changes(stages[index], calls[0])
            continue
        outcomes = [find_outputs(stages[index], call, outputs) for call in calls]
        for link, specs in zip(outputs.links, zip(*outcomes, strict=True), strict=True):
            announcement = Announcement(kinds, samples, specs)
            metas[link.source, link.target] = announcement.by_microbatch
            announcements.send(link, announcement)
    return metas, samples


def last_modifying(stages: Mapping[int, Stage], transport: Transport) -> int:
    """Find the last stage of the pipeline that modifies its inputs in place; 0 if none does. All ranks call it."""
    mine = max((index for index, stage in stages.items() if stage.changes_inputs), default=0)
    reports: list[int] = []
    for rank, data in enumerate(transport.exchange(encode_numbers([mine]))):
        try:
            (last,) = decode_numbers(data)
        except (ValueError, MetadataError) as damage:
            message = f"could not decode which stages of rank {rank} modify their inputs: {damage}"
            raise MetadataError(message) from damage
        reports.append(last)
    return max(reports)


class _Announcements:
    """Sends announcements from stage to stage. A rank needs them in another order than its peer sends them."""

    def __init__(self, transport: Transport, wiring: Wiring, microbatches: int) -> None:
        self._transport = transport
        self._rank_of = wiring.rank_of
        self._microbatches = microbatches
        self._arrived: dict[tuple[int, ...], Announcement] = {}

    def send(self, link: Link, announcement: Announcement) -> None:
        """Announce to the target of a link."""
        peer = self._rank_of[link.target]
        if peer == self._transport.rank:
            self._arrived[link.source, link.target] = announcement
        else:
            self._transport.send_bytes(peer, _encode(link, announcement))

    def receive(self, link: Link) -> Announcement:
        """Wait for what the source of a link announces."""
        wanted, peer = (link.source, link.target), self._rank_of[link.source]
        while wanted not in self._arrived:
            data = self._transport.receive_bytes(peer)
            try:
                ends, announcement = _decode(data, self._microbatches)
                if ends in self._arrived:
                    raise MetadataError(f"the link from stage {ends[0]} to stage {ends[1]} was announced twice")
            except MetadataError as error:
                message = f"stage {link.target} cannot use the shapes that stage {link.source} announced: {error}"
                raise MetadataError(message) from error
            self._arrived[ends] = announcement
        return self._arrived.pop(wanted)


def _combine(kinds: Sequence[Kinds]) -> Kinds:
    """Find the kinds of microbatches at a stage from those on each of its links."""
    seen: dict[tuple[int, ...], int] = {}
    return tuple([seen.setdefault(each, len(seen)) for each in zip(*kinds, strict=True)])


def _encode(link: Link, announcement: Announcement) -> bytes:
    kinds, samples, metas = announcement
    numbers = (kinds, samples or (), (link.source, link.target))
    return join_parts([*map(encode_numbers, numbers), *map(encode, metas)])


def _decode(data: bytes, microbatches: int) -> tuple[tuple[int, ...], Announcement]:
    parts = split_parts(data)
    if len(parts) < 4:
        raise MetadataError(f"{len(parts)} parts are too few for an announcement of shapes")
    kinds, samples, ends = map(decode_numbers, parts[:3])
    metas = [decode(part) for part in parts[3:]]
    if set(kinds) != set(range(len(metas))):
        raise MetadataError(f"{len(metas)} kinds of microbatches were described, but others occur")
    if len(kinds) != microbatches or len(samples) not in (0, microbatches):
        raise MetadataError(f"{len(kinds)} microbatches were announced, but there are {microbatches}")
    if len(ends) != 2:
        raise MetadataError(f"a link has two ends, not {len(ends)}")
    return ends, Announcement(kinds, samples or None, metas)

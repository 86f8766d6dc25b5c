"""Agrees with all ranks on the step after which a training loop ends."""

from __future__ import annotations

import signal
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.errors import MetadataError, StageError
from penstock.runtime.stopping.all_processes import announce_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.stopping.all_processes import Announce
    from penstock.runtime.transport.protocol import Announcement

#: In place of a signal: the script has requested the stop.
_BY_SCRIPT: Final = -1
#: The signal that came, or 0; and after how many calls to agree again, which counts if it is rank 0's.
_REPORT: Final = struct.Struct("<bB")
#: Ranks agree this often, in seconds, unless calls are further apart; and at least once in so many calls.
_EVERY: Final = 1.0
_MOST_CALLS: Final = 16
_CALL: Final = "Stop.requested()"


def stop_on_signal(
    pipe: Pipeline,
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    *,
    group: dist.ProcessGroup | None = None,
) -> Stop:
    """End a loop on all ranks after the same step, when a process gets a signal.

    Inside the block these signals do not end the process; ``stop.requested()`` becomes true instead, a few steps later.
    A second Ctrl-C is a ``KeyboardInterrupt``, as outside.

    >>> import torch, penstock as ps
    >>> from penstock.runtime import Pipeline
    >>> schedule, loss_fn = ps.build("GPipe", ranks=1, microbatches=2), torch.nn.functional.mse_loss
    >>> pipe = Pipeline({0: torch.nn.Linear(4, 4)}, schedule, loss_fn=loss_fn)
    >>> with ps.stop_on_signal(pipe) as stop:
    ...     for step in range(100):
    ...         _ = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    ...         if step == 2:
    ...             signal.raise_signal(signal.SIGTERM)
    ...         if stop.requested():
    ...             break
    >>> step, stop.reason
    (2, 'rank 0 received SIGTERM')

    Args:
        pipe: the pipeline; all ranks call this, and then ``requested`` equally often.
        signals: which ones; none to stop by ``request`` alone, which also works in threads.
        group: all processes that stop together, if that is not all there are.
    """
    return Stop(pipe, tuple(signals), group)


class Stop:
    """Whether a training loop should end; see ``stop_on_signal``."""

    def __init__(self, pipe: Pipeline, signals: Sequence[signal.Signals], group: dist.ProcessGroup | None) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise StageError(
                "only the main thread of a process can handle signals; call stop_on_signal() there, or pass signals=() "
                "and call request()"
            )
        engine = pipe._engine
        engine.begin_call("stop_on_signal()")
        self._engine = engine
        self._announce = announce_to(group, engine.transport)
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        #: What this rank wants: 0 to go on, the number of a signal, or _BY_SCRIPT.
        self._wish = 0
        self._reason: str | None = None
        self._announced: Announcement | None = None
        self._calls = 0
        #: The call in which ranks announce their wishes next.
        self._next = 0
        self._last = _Moment(0, time.monotonic())

    @property
    def reason(self) -> str | None:
        """Why the loop ends, e.g. ``"rank 2 received SIGTERM"``; None while it goes on. The same on all ranks."""
        return self._reason

    def request(self) -> None:
        """Request a stop from this rank, e.g. because its time is up."""
        self._wish = self._wish or _BY_SCRIPT

    def requested(self) -> bool:
        """Return whether to end the loop: the same on all ranks. All of them call it once between two steps.

        Ranks announce what they want, about once in a second, and read it in the next call, when it has arrived. So
        they do not wait for each other here, and a stop comes one step after it was announced.
        """
        if self._reason is None:
            if self._announce is None:
                self._decide([self._wish])
            else:
                self._agree(self._announce)
                self._calls += 1
        return self._reason is not None

    def _agree(self, announce: Announce) -> None:
        """Read what was announced in the last call, and announce again if it is time to."""
        transport = self._engine.transport
        if self._announced is not None:
            transport.progress.call = _CALL
            reports = [_read(data, rank) for rank, data in enumerate(self._announced.collect())]
            self._announced = None
            self._next += reports[0].calls
            self._decide([report.wish for report in reports])
        if self._reason is None and self._calls == self._next:
            self._engine.begin_call(_CALL, settles=False)
            self._announced = announce(_REPORT.pack(self._wish, self._interval()))

    def _decide(self, wishes: Sequence[int]) -> None:
        for rank, wish in enumerate(wishes):
            if wish:
                self._reason = f"rank {rank} {_describe(wish)}"
                return

    def _interval(self) -> int:
        """Find after how many calls the ranks should agree again."""
        now = _Moment(self._calls, time.monotonic())
        before, self._last = self._last, now
        if now.calls == before.calls or now.time == before.time:
            return 1
        return max(1, min(_MOST_CALLS, round(_EVERY * (now.calls - before.calls) / (now.time - before.time))))

    # Signals --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        for number in self._signals:
            # One that is ignored, as Ctrl-C is in the background of a script, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: object) -> None:
        # A launcher may pass on a SIGTERM that the cluster has already sent to all processes, so it may come twice.
        if number == signal.SIGINT == self._wish:
            raise KeyboardInterrupt
        self._wish = number


class _Moment(NamedTuple):
    """When a call was made."""

    calls: int
    time: float


class _Report(NamedTuple):
    """What a rank announces."""

    wish: int
    calls: int


def _read(data: bytes, rank: int) -> _Report:
    if len(data) != _REPORT.size or data[1] == 0:
        raise MetadataError(f"what rank {rank} sent in Stop.requested() could not be decoded: {data[:60]!r}")
    return _Report(*_REPORT.unpack(data))


def _describe(wish: int) -> str:
    return "requested it" if wish == _BY_SCRIPT else f"received {signal.Signals(wish).name}"

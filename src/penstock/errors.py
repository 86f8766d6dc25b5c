"""Defines every exception that penstock raises for a mistake in its input.

::

    PenstockError
    ├── ScheduleError            a value that cannot be part of a schedule      (also a ValueError)
    │   ├── ActionError            an Action with inconsistent fields
    │   ├── PlacementError         a stage on two ranks, or on none
    │   ├── EdgeError              an edge that goes backwards, or to a stage that does not exist
    │   ├── SizeError              ranks=0, or three stages per rank where two are required
    │   ├── ModelError             an unknown communication model
    │   └── VerificationError      a schedule that would not run correctly; holds the findings
    ├── CostsError               invalid costs: negative, too few               (also a ValueError)
    ├── PlanError                costs, sizes or a memory limit for which nothing can be planned  (also a ValueError)
    ├── UnknownScheduleError     a name that is not in the registry             (also a LookupError)
    ├── ReadError                text or a file that cannot be parsed           (also a ValueError)
    │   ├── ScheduleSyntaxError    a cell that is not an action, a line that is not a row
    │   └── FormatError            a file that is damaged, too new, or does not match its suffix
    ├── SplitError               a model that cannot be split as requested      (also a ValueError)
    │   └── TraceError             a model that cannot be traced                  (also a RuntimeError)
    ├── WriteError               a file that cannot be written as requested     (also a ValueError)
    ├── DropInError              a mix of torch's package and its replacement   (also an ImportError)
    └── RunError                 a failure while a pipeline is set up or run    (also a RuntimeError)
        ├── StageError             stages that do not match the schedule, or each other
        ├── MicrobatchError        a batch that cannot be split, or outputs that cannot be merged, as requested
        ├── MetadataError          tensors on an edge that differ from the agreed ones, or metadata that is damaged
        ├── TransportError         an edge that could not be set up, a connection that was lost
        ├── CheckpointError        a checkpoint that cannot be saved, found or read, or is of another model
        ├── GenerationError        a model that cannot generate tokens, or prompts and options that do not fit
        └── StepError              an action that failed or hangs on some rank; raised on every rank

Each error carries the facts as attributes and renders them in ``str(error)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.verification.findings import Finding


class PenstockError(Exception):
    """The base class: ``except PenstockError`` catches every mistake that penstock reports."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor, whose arguments differ from class to class."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[PenstockError], arguments: tuple[Any, ...], facts: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(facts)
    return error


class ScheduleError(PenstockError, ValueError):
    """A value that cannot be part of a schedule."""


class ActionError(ScheduleError):
    """The fields of an action are inconsistent."""


class PlacementError(ScheduleError):
    """A stage is on two ranks, or on none.

    Attributes:
        stage: the misplaced stage, if it is a single one.
        places: where it was found, as pairs of (rank, step).
    """

    def __init__(self, message: str, *, stage: int | None = None, places: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.stage = stage
        self.places = tuple(places)


class EdgeError(ScheduleError):
    """An edge goes backwards, or to a stage that does not exist."""


class SizeError(ScheduleError):
    """A schedule cannot be built with these sizes.

    Attributes:
        field: the invalid argument, e.g. ``"ranks"``.
        value: the value that was passed.
    """

    def __init__(self, message: str, *, field: str, value: object) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class ModelError(ScheduleError):
    """The communication model is unknown."""


class VerificationError(ScheduleError):
    """A schedule would not run correctly.

    Attributes:
        findings: everything that is wrong with it, as returned by ``check``.
        picture: the grid, or the part around the findings, with marks.
    """

    def __init__(self, findings: Sequence[Finding], picture: str) -> None:
        super().__init__(findings, picture)
        self.findings = tuple(findings)
        self.picture = picture

    def __str__(self) -> str:
        findings = "\n".join(f"- {finding}" for finding in self.findings)
        return f"the schedule is invalid:\n{findings}\n\n{self.picture}"


class CostsError(PenstockError, ValueError):
    """Costs are invalid.

    Attributes:
        field: the invalid field of ``Costs``, if it is a single one.
        value: the value that was passed.
    """

    def __init__(self, message: str, *, field: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class PlanError(PenstockError, ValueError):
    """Something that cannot be planned: a memory limit that nothing fits, more stages than layers.

    Attributes:
        field: the argument in question.
        value: its value.
        smallest: the smallest memory limit for which there is a plan, if that is what is wrong.
        rank: the rank that needs it.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: Any = None,
        smallest: float | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.smallest = smallest
        self.rank = rank


class UnknownScheduleError(PenstockError, LookupError):
    """No schedule has this name.

    Attributes:
        name: the requested name.
        near: the known names closest to it, best match first.
        known: every known name.
    """

    def __init__(self, name: str, *, near: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(name)
        self.name = name
        self.near = tuple(near)
        self.known = tuple(known)

    def __str__(self) -> str:
        if self.near:
            return f"unknown schedule {self.name!r}; did you mean {' or '.join(self.near)}?"
        return f"unknown schedule {self.name!r}; the known schedules are {', '.join(self.known)}"


class ReadError(PenstockError, ValueError):
    """Text or a file cannot be parsed.

    Attributes:
        message: what is wrong and what to write instead.
        path: the file, if the text came from one.
        row: the row in it, counted from 1 as in editors and spreadsheets.
        cell: the cell in that row, counted from 1.
    """

    def __init__(
        self, message: str, *, path: str | None = None, row: int | None = None, cell: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.row = row
        self.cell = cell

    def at(self, *, path: str | None = None, row: int | None = None, cell: int | None = None) -> Self:
        """Add the location, keeping what is already known, and return the error, ready to be raised."""
        self.path = self.path or path
        self.row = self.row or row
        self.cell = self.cell or cell
        return self

    def __str__(self) -> str:
        place = [self.path] if self.path else []
        place += [f"row {self.row}"] if self.row else []
        place += [f"cell {self.cell}"] if self.cell else []
        return f"{', '.join(place)}: {self.message}" if place else self.message


class ScheduleSyntaxError(ReadError):
    """A cell is not an action, or a line is not a row of a schedule.

    Attributes:
        text: the text that was found there.
    """

    def __init__(
        self,
        message: str,
        *,
        text: str,
        path: str | None = None,
        row: int | None = None,
        cell: int | None = None,
    ) -> None:
        super().__init__(message, path=path, row=row, cell=cell)
        self.text = text


class FormatError(ReadError):
    """A file is damaged, too new, unreadable, or does not match its suffix."""


class SplitError(PenstockError, ValueError):
    """A model cannot be split as requested.

    Attributes:
        unit: the name of the module or parameter in question, if it is a single one.
    """

    def __init__(self, message: str, *, unit: str | None = None) -> None:
        super().__init__(message)
        self.unit = unit


class TraceError(SplitError, RuntimeError):
    """A model cannot be traced."""


class WriteError(PenstockError, ValueError):
    """A file cannot be written as requested."""


class DropInError(PenstockError, ImportError):
    """A process would mix ``torch.distributed.pipelining`` and its replacement, or a module has none."""


class RunError(PenstockError, RuntimeError):
    """Setting up or running a pipeline failed."""


class StageError(RunError):
    """The stages do not match the schedule, or each other.

    Attributes:
        stage: the stage in question, if it is a single one.
    """

    def __init__(self, message: str, *, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class MicrobatchError(RunError):
    """A batch cannot be split, or outputs cannot be merged, as requested.

    Attributes:
        name: the value in the call, e.g. ``args[0]`` or ``kwargs['mask']``.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class MetadataError(RunError):
    """Tensors on an edge between stages differ from the agreed ones, or their metadata is damaged."""


class TransportError(RunError):
    """An edge between ranks could not be set up, or a connection was lost.

    Attributes:
        peer: the rank at the other end, if it is known.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class CheckpointError(RunError):
    """A checkpoint cannot be saved, found or read, or does not fit the pipeline; every rank raises this error.

    Attributes:
        path: the folder in question, if it is known.
        rank: the rank where it happened, if it is a single one.
    """

    def __init__(self, message: str, *, path: str | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.rank = rank


class GenerationError(RunError):
    """A model cannot generate tokens, or the prompts and options do not fit; every rank raises this error."""


class StepError(RunError):
    """A step failed on some rank; every rank raises this error, with what happened there.

    Attributes:
        rank: the rank that failed.
        action: the text form of the action that failed or hangs, e.g. ``2F0``, if there was one.
        stage: the stage of that action.
        microbatch: the microbatch of that action.
        remote_traceback: the traceback on that rank, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        action: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.action = action
        self.stage = stage
        self.microbatch = microbatch
        self.remote_traceback = remote_traceback

"""Every exception that penstock raises for a mistake in its input.

::

    PenstockError
    ├── ScheduleError            a value that cannot be part of a schedule      (also a ValueError)
    │   ├── ActionError            fields of an Action that do not go together
    │   ├── PlacementError         a stage on two ranks, or on none
    │   ├── SizeError              ranks=0, three stages per rank where two are needed
    │   ├── ModelError             a communication model that there is not
    │   └── VerificationError      a schedule that would not run as it should: holds the findings
    ├── CostsError               costs that no run could have: negative, too few   (also a ValueError)
    ├── UnknownScheduleError     a name that the registry does not know         (also a LookupError)
    ├── ReadError                text or a file that cannot be understood       (also a ValueError)
    │   ├── ScheduleSyntaxError    a cell that is not an action, a line that is not a row
    │   └── FormatError            a file that is damaged, too new, or not what its suffix says
    ├── WriteError               a schedule that cannot be written as asked     (also a ValueError)
    └── RunError                 what goes wrong when a pipeline is set up or run (also a RuntimeError)
        ├── StageError             stages that do not fit the schedule, or each other
        ├── MicrobatchError        a batch that cannot be split, or outputs that cannot be merged, as asked
        ├── MetadataError          tensors on an edge are not what was agreed, or a description of them is damaged
        ├── TransportError         an edge that does not come up, a connection that is lost
        └── StepError              an action failed on some rank, or hangs: raised on every rank

Each one carries the facts as attributes and puts them into words in ``str(error)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.verification.findings import Finding


class PenstockError(Exception):
    """The root: ``except PenstockError`` catches every mistake that penstock reports."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors go between processes, where the arguments of their constructors are not known."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[PenstockError], arguments: tuple[Any, ...], facts: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(facts)
    return error


class ScheduleError(PenstockError, ValueError):
    """A value that cannot be part of a schedule."""


class ActionError(ScheduleError):
    """The fields of an action do not go together."""


class PlacementError(ScheduleError):
    """A stage is on two ranks, or on none.

    Attributes:
        stage: the stage that is misplaced, where one can be named.
        places: where it was found, as (rank, step) pairs.
    """

    def __init__(self, message: str, *, stage: int | None = None, places: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.stage = stage
        self.places = tuple(places)


class SizeError(ScheduleError):
    """A schedule cannot be built with these numbers.

    Attributes:
        field: the argument that is wrong, e.g. ``"ranks"``.
        value: what was given for it.
    """

    def __init__(self, message: str, *, field: str, value: object) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class ModelError(ScheduleError):
    """There is no such communication model."""


class VerificationError(ScheduleError):
    """A schedule would not run as it should.

    Attributes:
        findings: everything that is wrong with it, as ``check`` returns it.
        picture: the grid, or the part of it around the findings, with marks.
    """

    def __init__(self, findings: Sequence[Finding], picture: str) -> None:
        super().__init__(findings, picture)
        self.findings = tuple(findings)
        self.picture = picture

    def __str__(self) -> str:
        told = "\n".join(f"- {finding}" for finding in self.findings)
        return f"the schedule is not right:\n{told}\n\n{self.picture}"


class CostsError(PenstockError, ValueError):
    """Costs that no run could have.

    Attributes:
        field: the field of ``Costs`` that is wrong, where there is one.
        value: what was given for it.
    """

    def __init__(self, message: str, *, field: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class UnknownScheduleError(PenstockError, LookupError):
    """No schedule has this name.

    Attributes:
        name: the name that was asked for.
        near: the known names closest to it, best first.
        known: every known name.
    """

    def __init__(self, name: str, *, near: Sequence[str], known: Sequence[str]) -> None:
        super().__init__(name)
        self.name = name
        self.near = tuple(near)
        self.known = tuple(known)

    def __str__(self) -> str:
        if self.near:
            return f"no schedule is called {self.name!r}; did you mean {' or '.join(self.near)}?"
        return f"no schedule is called {self.name!r}; the known ones are {', '.join(self.known)}"


class ReadError(PenstockError, ValueError):
    """Text or a file that cannot be understood.

    Attributes:
        message: what is wrong and what to write instead.
        path: the file, if it came from one.
        row: the row in it, counted from 1 as editors and spreadsheets do.
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
        """Say where it happened; what is already known stays. Returns the error, to be raised."""
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
    """A cell that is not an action, or a line that is not a row of a schedule.

    Attributes:
        text: what was found there.
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
    """A file that is damaged, too new, unreadable, or not what its suffix says."""


class WriteError(PenstockError, ValueError):
    """A schedule cannot be written as asked."""


class RunError(PenstockError, RuntimeError):
    """Something went wrong when a pipeline was set up or run."""


class StageError(RunError):
    """The stages do not fit the schedule, or each other.

    Attributes:
        stage: the stage in question, where one can be named.
    """

    def __init__(self, message: str, *, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class MicrobatchError(RunError):
    """A batch cannot be split, or outputs cannot be merged, as asked.

    Attributes:
        name: where the value is in the call, e.g. ``args[0]`` or ``kwargs['mask']``.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class MetadataError(RunError):
    """Tensors on an edge between stages are not what was agreed, or a description of them is damaged."""


class TransportError(RunError):
    """An edge between ranks does not come up, or a connection is lost.

    Attributes:
        peer: the rank at the other end, where one can be named.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class StepError(RunError):
    """A step ended early on some rank; every rank raises this, with what happened there.

    Attributes:
        rank: where it happened.
        action: the text form of the action that failed or hangs, e.g. ``2F0``, where there was one.
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

"""Defines the style of every type of action, for the page, charts and the terminal.

The colours are those of Okabe and Ito, which people with any kind of colour vision can distinguish. The terminal uses
its closest named colours for text, and the colours themselves as the background of bars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.ir.actions import COMPUTE, OVERLAP_F_B, SHARDING

if TYPE_CHECKING:
    from penstock.ir.actions import ComputationType

_BLACK: Final = "#000000"
_WHITE: Final = "#ffffff"


class Style(NamedTuple):
    """How something is drawn.

    Attributes:
        letter: the letter that represents it without colour.
        meaning: its description in a legend.
        colour: the colour of its bar.
        ink: a legible text colour on the bar.
        terminal: the colour of its text in a terminal, by a standard name.
    """

    letter: str
    meaning: str
    colour: str
    ink: str
    terminal: str

    @property
    def block(self) -> str:
        """The style of its bar in a terminal."""
        return f"{self.ink} on {self.colour}"


OVERLAP: Final = "overlap"
PARAMETERS: Final = "sharding"
TRANSFER: Final = "transfer"
IDLE: Final = "idle"

#: The styles in the order of a legend; those of compute types by their text form.
STYLES: Final = {
    "F": Style("F", "forward", "#0072b2", _WHITE, "bold blue"),
    "B": Style("B", "backward", "#009e73", _BLACK, "bold green"),
    "I": Style("I", "input gradient", "#56b4e9", _BLACK, "bold cyan"),
    "W": Style("W", "weight gradient", "#e69f00", _BLACK, "yellow"),
    OVERLAP: Style("O", "overlap of two", "#f0e442", _BLACK, "bold yellow"),
    PARAMETERS: Style("S", "sharding", "#d55e00", _BLACK, "red"),
    TRANSFER: Style("T", "transfer", "#cc79a7", _BLACK, "magenta"),
    IDLE: Style(".", "idle", "#eeeeee", "#666666", "dim"),
}


def style_name(kind: ComputationType) -> str:
    """Return the name of the style of a type of action.

    >>> from penstock.ir.actions import ComputationType
    >>> style_name(ComputationType.FORWARD), style_name(ComputationType.SEND_F)
    ('F', 'transfer')
    """
    if kind in COMPUTE:
        return kind.value
    if kind is OVERLAP_F_B:
        return OVERLAP
    return PARAMETERS if kind in SHARDING else TRANSFER

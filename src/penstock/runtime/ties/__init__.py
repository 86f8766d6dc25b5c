"""Trains a parameter that several stages of a pipeline hold as one.

``given.py`` finds the members of each tie, ``agreement.py`` checks that they begin equal and decides who holds what,
``training.py`` sums their gradients with ``penstock.execution.tied_parameters``, as the drop-in does.
"""

from __future__ import annotations

from penstock.runtime.ties.given import GivenTie, describe_options
from penstock.runtime.ties.training import Ties

__all__ = ["GivenTie", "Ties", "describe_options"]

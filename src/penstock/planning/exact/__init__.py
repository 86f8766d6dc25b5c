"""Finds the best order of a problem with CP-SAT, and proves it: small problems whole, larger ones window by window.

It needs OR-tools: ``pip install 'penstock[exact]'``.
"""

from penstock.planning.exact.cp_sat import INSTALL, is_available
from penstock.planning.exact.improve import improve
from penstock.planning.exact.results import ExactResult, Progress
from penstock.planning.exact.solve import solve

__all__ = ["INSTALL", "ExactResult", "Progress", "improve", "is_available", "solve"]

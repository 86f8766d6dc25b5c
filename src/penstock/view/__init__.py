"""Draws a simulation: as a page, a trace, a chart, or in the terminal."""

from penstock.view import chart, page, trace  # noqa: F401  # they register their writers

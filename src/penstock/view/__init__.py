"""What a simulation looks like: a page, a trace, a chart, the terminal."""

from penstock.view import chart, trace  # noqa: F401  # they register what they write

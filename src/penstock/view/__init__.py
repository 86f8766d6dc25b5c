"""What a simulation looks like: a page, a trace, a chart, the terminal."""

from penstock.view import chart, page, trace  # noqa: F401  # they register what they write

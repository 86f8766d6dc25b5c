"""Has the code of every page run as a test: `pytest docs/running.md`."""

from documentation.pages import pytest_collect_file

__all__ = ["pytest_collect_file"]

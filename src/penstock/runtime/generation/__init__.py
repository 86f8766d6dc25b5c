"""Generates tokens with the stages of a pipeline: several microbatches of sequences are in flight.

Start reading at ``generate.py`` and ``loop.py``.
"""

from penstock.runtime.generation.generate import generate

__all__ = ["generate"]

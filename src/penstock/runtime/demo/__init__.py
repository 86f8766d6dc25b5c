"""Profiles and trains the small GPT of ``penstock demo``, on the ranks that it starts."""

from penstock.runtime.demo.model import build, example

__all__ = ["build", "example"]

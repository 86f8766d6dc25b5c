"""Splits a model into stages, without changing it."""

"""Implements the ``penstock`` command."""

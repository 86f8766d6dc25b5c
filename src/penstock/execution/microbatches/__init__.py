"""Splits a batch into microbatches, and merges their outputs."""

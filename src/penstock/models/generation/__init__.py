"""Knows how the stages of a split model generate tokens: what they are called with, and their caches."""

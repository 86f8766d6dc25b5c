"""Trains a small GPT to write Python: what ``penstock demo`` runs on every rank."""

"""What ``penstock demo`` runs on every rank: a small GPT that learns to write Python."""

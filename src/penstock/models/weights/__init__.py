"""Reads and writes the values of a model's parameters as safetensors, as Hugging Face's libraries do.

``files`` reads tensors by the names in files, only those that are asked for; ``converted`` by the names of the model,
where those differ. ``shards`` writes them, and ``pretrained`` knows what else a folder holds.
"""

from penstock.models.weights.converted import open_weights
from penstock.models.weights.files import WeightFiles

__all__ = ["WeightFiles", "open_weights"]

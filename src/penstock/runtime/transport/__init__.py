"""How tensors get from rank to rank."""

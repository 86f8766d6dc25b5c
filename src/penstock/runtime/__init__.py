"""Execution on torch.distributed."""

"""Schedule classes and passes under the names of torch.distributed.pipelining."""

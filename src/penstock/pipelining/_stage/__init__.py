"""Pipeline stages under the names of torch.distributed.pipelining."""

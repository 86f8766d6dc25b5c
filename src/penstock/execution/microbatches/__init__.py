"""How a batch is split into microbatches, and their outputs merged."""

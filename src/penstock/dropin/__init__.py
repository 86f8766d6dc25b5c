"""Makes ``import torch.distributed.pipelining`` give ``penstock.pipelining``, so that programs run unmodified.

::

    penstock run --drop-in train.py
    torchrun --nproc-per-node 4 -m penstock.dropin train.py

Processes that a program starts get it, too, through an environment variable. In a notebook, call ``install()`` before
anything imports torch's package.
"""

from __future__ import annotations

from penstock.dropin.environment import environment
from penstock.dropin.install import install

__all__ = ["environment", "install"]

"""Steps the parameters of all stages of a rank with one optimizer.

``optimizer.py`` is what a script holds. ``making.py`` makes the optimizer that it wraps, with parameters sorted by name
(``groups.py``); ``agreement.py`` compares those of all ranks; ``policy.py`` decides, given the norm of all gradients,
what a step does.
"""

from __future__ import annotations

from penstock.runtime.optimizers.optimizer import Optimizer

__all__ = ["Optimizer"]

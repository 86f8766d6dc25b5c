"""Checks, for one batch, that a pipeline computes what the unsplit model does.

Three ways lead to the gradients of a batch: the unsplit model, which is every stage after the other with a whole
backward; the same with each backward in two halves; and the schedule. All three must give the same. Where they do not,
the report names the parameters, with those first that a backward comes upon first: what is wrong there spoils the rest.

All three count the loss of a microbatch as ``loss_reduction`` says. Whether that makes the loss of the batch is a
separate check: the loss function is called once more, with the outputs and targets of all microbatches merged.
"""

from penstock.runtime.parity.check import check_parity
from penstock.runtime.parity.report import Difference, Parity, Reduction

__all__ = ["Difference", "Parity", "Reduction", "check_parity"]

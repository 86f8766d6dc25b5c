"""Measures penstock.pipelining against the installed torch.distributed.pipelining, with the same program.

(a) the overhead per action, with a trivial model; (b) the step time of a transformer; (c) the two halves of a backward
against a full one, through a PipelineStage; (d) memory. Both run alternately, for (b) torch in separate processes, on
gloo's loopback with one thread each, next to a hand-written loop. Goals are relative to torch. Wall time depends on the
load of the machine; CPU time less so.
"""

from __future__ import annotations

import sys
from functools import partial

from runtime import main
from runtime_parts import memory, overhead, splitting, stage_halves, steps
from runtime_parts.contestants import DropIn

PARTS = {
    "a": partial(overhead.report, ours=DropIn, of_loop=None),
    "b": partial(steps.report, ours=DropIn),
    "c": partial(splitting.report, ways=stage_halves.WAYS | {"bare": splitting.bare}),
    "d": partial(memory.report, ours=DropIn, our_halves=stage_halves.marked),
}

if __name__ == "__main__":
    try:
        main(PARTS, __doc__)
    except KeyboardInterrupt:
        sys.exit(130)

"""The drop-in: penstock.pipelining against the installed torch.distributed.pipelining, the same program twice.

(a) what an action costs, with a model that costs nothing; (b) the time of a step of a transformer; (c) the two halves
of a backward against a whole one, asked of a PipelineStage; (d) memory. Both run in turn, for (b) torch in processes of
its own, on gloo's loopback with a thread each, beside a loop written by hand. Goals are against torch. Wall time
depends on who else uses the machine; CPU time less so.
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

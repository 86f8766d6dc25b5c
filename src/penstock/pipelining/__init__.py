"""The names and the behaviour of ``torch.distributed.pipelining``: change one import.

::

    from penstock.pipelining import PipelineStage, ScheduleGPipe
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("penstock.pipelining needs torch: pip install 'penstock[torch]'") from error

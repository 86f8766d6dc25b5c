"""Pipeline-parallel schedules as data.

>>> import penstock as ps
>>> schedule = ps.build("1F1B", ranks=2, microbatches=3)
>>> print(schedule.grid())
step   0   1   2   3   4   5   6   7
rank 0 0F0 0F1 .   0B0 0F2 0B1 .   0B2
rank 1 .   1F0 1B0 1F1 1B1 1F2 1B2

Importing the package loads neither torch nor numpy: every name is loaded from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.errors import (
        ActionError,
        CheckpointError,
        CostsError,
        DropInError,
        EdgeError,
        FormatError,
        GenerationError,
        MetadataError,
        MicrobatchError,
        ModelError,
        PenstockError,
        PlacementError,
        PlanError,
        ReadError,
        RunError,
        ScheduleError,
        ScheduleSyntaxError,
        SizeError,
        SplitError,
        StageError,
        StepError,
        TraceError,
        TransportError,
        UnknownScheduleError,
        VerificationError,
        WriteError,
    )
    from penstock.execution.ties import Tie
    from penstock.graph.comm_model import LANES, CommModel
    from penstock.ir.actions import Action, ComputationType
    from penstock.ir.edges import Edge
    from penstock.ir.formats import read
    from penstock.ir.placement import Placement
    from penstock.ir.schedule import Schedule
    from penstock.lowering.pipeline import lower
    from penstock.lowering.repair import repair
    from penstock.models.split import split
    from penstock.planning.plan import plan
    from penstock.planning.result import Plan
    from penstock.runtime.checkpoints.export import export
    from penstock.runtime.checkpoints.load import load
    from penstock.runtime.checkpoints.save import save
    from penstock.runtime.optimizers import Optimizer
    from penstock.runtime.profiling import profile
    from penstock.runtime.progress_line import ProgressLine
    from penstock.runtime.stopping import Stop, stop_on_signal
    from penstock.schedules.registry import build
    from penstock.simulation.costs import Costs
    from penstock.simulation.sampling import Samples, simulate_many
    from penstock.simulation.simulate import simulate
    from penstock.simulation.timeline import Timeline
    from penstock.verification.check import check, safe_models, verify
    from penstock.verification.findings import Finding

_HOMES = {
    "Action": "penstock.ir.actions",
    "ActionError": "penstock.errors",
    "CheckpointError": "penstock.errors",
    "CommModel": "penstock.graph.comm_model",
    "ComputationType": "penstock.ir.actions",
    "Costs": "penstock.simulation.costs",
    "CostsError": "penstock.errors",
    "DropInError": "penstock.errors",
    "Edge": "penstock.ir.edges",
    "EdgeError": "penstock.errors",
    "Finding": "penstock.verification.findings",
    "FormatError": "penstock.errors",
    "GenerationError": "penstock.errors",
    "LANES": "penstock.graph.comm_model",
    "MetadataError": "penstock.errors",
    "MicrobatchError": "penstock.errors",
    "ModelError": "penstock.errors",
    "Optimizer": "penstock.runtime.optimizers",
    "PenstockError": "penstock.errors",
    "Placement": "penstock.ir.placement",
    "Plan": "penstock.planning.result",
    "PlacementError": "penstock.errors",
    "PlanError": "penstock.errors",
    "ProgressLine": "penstock.runtime.progress_line",
    "ReadError": "penstock.errors",
    "RunError": "penstock.errors",
    "Samples": "penstock.simulation.sampling",
    "Schedule": "penstock.ir.schedule",
    "ScheduleError": "penstock.errors",
    "ScheduleSyntaxError": "penstock.errors",
    "SizeError": "penstock.errors",
    "SplitError": "penstock.errors",
    "StageError": "penstock.errors",
    "StepError": "penstock.errors",
    "Stop": "penstock.runtime.stopping",
    "Tie": "penstock.execution.ties",
    "Timeline": "penstock.simulation.timeline",
    "TraceError": "penstock.errors",
    "TransportError": "penstock.errors",
    "UnknownScheduleError": "penstock.errors",
    "VerificationError": "penstock.errors",
    "WriteError": "penstock.errors",
    "build": "penstock.schedules.registry",
    "check": "penstock.verification.check",
    "export": "penstock.runtime.checkpoints.export",
    "load": "penstock.runtime.checkpoints.load",
    "lower": "penstock.lowering.pipeline",
    "plan": "penstock.planning.plan",
    "profile": "penstock.runtime.profiling",
    "read": "penstock.ir.formats",
    "repair": "penstock.lowering.repair",
    "safe_models": "penstock.verification.check",
    "save": "penstock.runtime.checkpoints.save",
    "simulate": "penstock.simulation.simulate",
    "simulate_many": "penstock.simulation.sampling",
    "split": "penstock.models.split",
    "stop_on_signal": "penstock.runtime.stopping",
    "verify": "penstock.verification.check",
}

__all__ = [
    "LANES",
    "Action",
    "ActionError",
    "CheckpointError",
    "CommModel",
    "ComputationType",
    "Costs",
    "CostsError",
    "DropInError",
    "Edge",
    "EdgeError",
    "Finding",
    "FormatError",
    "GenerationError",
    "MetadataError",
    "MicrobatchError",
    "ModelError",
    "Optimizer",
    "PenstockError",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanError",
    "ProgressLine",
    "ReadError",
    "RunError",
    "Samples",
    "Schedule",
    "ScheduleError",
    "ScheduleSyntaxError",
    "SizeError",
    "SplitError",
    "StageError",
    "StepError",
    "Stop",
    "Tie",
    "Timeline",
    "TraceError",
    "TransportError",
    "UnknownScheduleError",
    "VerificationError",
    "WriteError",
    "__version__",
    "build",
    "check",
    "export",
    "load",
    "lower",
    "plan",
    "profile",
    "read",
    "repair",
    "safe_models",
    "save",
    "simulate",
    "simulate_many",
    "split",
    "stop_on_signal",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

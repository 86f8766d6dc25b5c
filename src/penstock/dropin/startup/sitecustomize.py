"""Python imports this when it starts, in the processes of a program that runs with the drop-in."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def install_dropin() -> None:
    """Install the drop-in; in an environment without penstock, refuse what would have been replaced."""
    try:
        from penstock.dropin.environment import take_report
        from penstock.dropin.install import install
    except ModuleNotFoundError:
        sys.meta_path.insert(0, _Refusal())
    else:
        install(report=take_report())


class _Refusal:
    """Refuses torch's package in an interpreter that cannot import ours: ranks would mix both."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch.distributed.pipelining":
            raise ImportError(
                f"{sys.executable} was started by a program that runs with penstock's drop-in, but has no penstock; "
                "install penstock there, or unset PYTHONPATH and PENSTOCK_DROP_IN for this process"
            )


def run_next() -> None:
    """Run the ``sitecustomize`` that Python would have imported without this one."""
    here = Path(__file__).parent.resolve()
    spec = PathFinder.find_spec(__name__, [place for place in sys.path if Path(place).resolve() != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if "PENSTOCK_DROP_IN" in os.environ and __name__ == "sitecustomize":
    install_dropin()
    run_next()

"""Resolves the names of torch's package to ours, and refuses a mix of both."""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from penstock.errors import DropInError
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

THEIRS: Final = "torch.distributed.pipelining"
OURS: Final = "penstock.pipelining"
#: The end of the path of torch's folder.
_FOLDER: Final = os.path.join("torch", "distributed", "pipelining", "")  # noqa: PTH118


def install(*, report: bool = False) -> None:
    """Make every later import of ``torch.distributed.pipelining``, and of its modules, return those of ours.

    Args:
        report: write one line to stderr when the package is imported, or at the end if it never was.

    Raises:
        DropInError: torch's own package has been imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = [name for name, module in [*sys.modules.items()] if is_of_torch(getattr(module, "__file__", None))]
    if loaded:
        raise DropInError(
            f"{min(loaded)} has been imported already, so this process would mix both packages; "
            "call penstock.dropin.install() before that import, or start the program with penstock run --drop-in"
        )
    finder = _Finder(report)
    sys.meta_path.insert(0, finder)
    _refuse_files()
    if report:
        atexit.register(finder.report_unused)


def is_of_torch(path: str | None) -> bool:
    """Return whether a file belongs to torch's package; torch is found, but not imported."""
    if path is None or _FOLDER not in path:
        return False
    torch = find_spec("torch")
    places = torch.submodule_search_locations if torch is not None else None
    folders = [os.path.realpath(place) for place in places or ()]
    return any(os.path.realpath(path).startswith(f"{folder[: -len('torch')]}{_FOLDER}") for folder in folders)


class _Finder(MetaPathFinder):
    """Finds the modules of our package under the names of torch's."""

    def __init__(self, report: bool) -> None:
        self._is_due = report

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where to find a module, if its name is one of torch's package."""
        del path, target
        if fullname != THEIRS and not fullname.startswith(f"{THEIRS}."):
            return None
        name = OURS + fullname.removeprefix(THEIRS)
        found = find_spec(name)
        if found is None:
            raise DropInError(
                f"{name} does not exist, so {fullname} cannot be replaced; run the program without the drop-in"
            )
        if self._is_due:
            self._is_due = False
            sys.stderr.write(f"penstock: {THEIRS} is {OURS} {__version__} in this program\n")
        return ModuleSpec(fullname, _Alias(name), is_package=found.submodule_search_locations is not None)

    def report_unused(self) -> None:
        """Report that nothing was replaced, if so."""
        if self._is_due:
            sys.stderr.write(f"penstock: the drop-in changed nothing, because {THEIRS} was not imported\n")


class _Alias(Loader):
    """Loads a module under a second name: there is one module, and one of each of its classes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        del spec
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own spec, which the import system has replaced by that of the second name."""
        module.__spec__ = self._spec


def _refuse_files() -> None:
    """Refuse to run the files of torch's package, under any name."""
    load = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        if is_of_torch(self.path):
            raise DropInError(
                f"{module.__name__} is to be loaded from {self.path}, but {THEIRS} is {OURS} in this process, "
                f"and a mix of both does not work; import it as {THEIRS}, or run without the drop-in"
            )
        load(self, module)

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]

"""Every name that torch 2.13's package defines is here, and is called the same way.

What differs on purpose is listed below, with a reason; what is listed and does not differ is an error, too.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest
import torch
import torch.distributed.pipelining as upstream

import penstock.pipelining as ours

#: What ours does not use there, so that nothing would come of replacing it there either.
ELSEWHERE = {
    "_schedule_visualizer": ["PipelineStage", "_Action"],
}


def modules() -> list[str]:
    return ["", *sorted(module.name for module in pkgutil.iter_modules(upstream.__path__))]


def module_of(package: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"{package.__name__}.{name}" if name else package.__name__)


def targets(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module, or of a class, gives a meaning to."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def defined(module: ModuleType) -> dict[str, ast.stmt]:
    """What a module defines, rather than imports."""
    body = ast.parse(inspect.getsource(module)).body
    return {name: statement for statement in body for name in targets(statement) if name != "__all__"}


def parameters(thing: object) -> list[tuple[str, str, str]] | None:
    """How something is called: names, kinds and defaults. None for what says nothing of it."""
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return [(each.name, each.kind.name, repr(each.default)) for each in found.parameters.values()]


def kind(thing: object) -> str:
    """A method, a static one, a class method, a property or an attribute."""
    for wrapper in (staticmethod, classmethod, property):
        if isinstance(thing, wrapper):
            return wrapper.__name__
    return "function" if callable(thing) else "attribute"


def bare(thing: object) -> object:
    if isinstance(thing, property):
        return thing.fget
    return getattr(thing, "__func__", thing)


def members(statement: ast.ClassDef) -> list[str]:
    return [name for inner in statement.body for name in targets(inner) if name not in ("__slots__", "__init__")]


def bases(kind: type) -> set[str]:
    """The names of what a class is derived from."""
    return {base.__name__ for base in kind.__mro__[1:]}


def abstract(kind: type) -> frozenset[str]:
    """What a derived class has to write."""
    return getattr(kind, "__abstractmethods__", frozenset())


def fields(kind: type) -> list[tuple[str, bool, bool]]:
    return [(each.name, each.init, each.compare) for each in dataclasses.fields(kind)]


def class_differences(name: str, statement: ast.ClassDef, theirs: type, mine: type) -> list[str]:
    if issubclass(theirs, enum.Enum):
        values = [{one.name: one.value for one in each} for each in (theirs, mine)]
        if values[0] != values[1]:
            return [name]
    found = []
    if abstract(theirs) != abstract(mine) or not bases(theirs) <= bases(mine):
        found.append(name)
    if dataclasses.is_dataclass(theirs) and fields(theirs) != fields(mine):
        found.append(name)
    for member in members(statement):
        one = inspect.getattr_static(theirs, member)
        other = inspect.getattr_static(mine, member, None)
        if isinstance(theirs, enum.EnumMeta) and isinstance(one, theirs):
            continue
        if kind(one) == "attribute" or member.startswith("__"):
            if not hasattr(mine, member):
                found.append(f"{name}.{member}")
        elif kind(one) != kind(other) or parameters(bare(one)) != parameters(bare(other)):
            found.append(f"{name}.{member}")
    return found


def differences(module: str) -> list[str]:
    """The dotted names of what is not here, or not the same."""
    try:
        mine = module_of(ours, module)
    except ModuleNotFoundError:
        return [module]
    theirs = module_of(upstream, module)
    found = []
    for name, statement in defined(theirs).items():
        dotted = f"{module}.{name}" if module else name
        if not hasattr(mine, name):
            found.append(dotted)
            continue
        one, other = getattr(theirs, name), getattr(mine, name)
        if callable(one) and parameters(one) != parameters(other):
            found.append(dotted)
        if isinstance(one, (enum.Enum, int, str)) and getattr(one, "value", one) != getattr(other, "value", other):
            found.append(dotted)
        if isinstance(statement, ast.ClassDef):
            found += class_differences(dotted, statement, one, other)
    return found


@pytest.mark.parametrize("module", modules())
def test_names_and_signatures_are_those_of_torch(module):
    assert differences(module) == []


def test_the_package_says_the_same_names():
    assert sorted(ours.__all__) == sorted(upstream.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)
    assert ours._ScheduleForwardOnly is ours.schedules._ScheduleForwardOnly


@pytest.mark.parametrize("module", modules())
def test_names_are_found_where_torch_imports_them_too(module):
    """A trainer may import a name from where it is used rather than from where it is defined."""
    theirs, mine = module_of(upstream, module), module_of(ours, module)
    inner = [
        name for name, value in vars(theirs).items() if getattr(value, "__module__", "").startswith(upstream.__name__)
    ]
    missing = {name for name in inner if not hasattr(mine, name)} - set(defined(theirs))
    assert sorted(missing) == sorted(ELSEWHERE.get(module, ()))


SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def attributes(rank, ranks, group):
    """What schedules and stages of torch have and ours have not, or of another type, before and after a step."""
    found = []
    for name, count in SCHEDULES.items():
        pairs = []
        for package in (ours, upstream):
            stages = [
                package.PipelineStage(torch.nn.Linear(4, 4), index, count, torch.device("cpu"), group=group)
                for index in range(count)
            ]
            given = stages if count > 1 else stages[0]
            pairs.append([getattr(package, name)(given, 2, loss_fn=torch.nn.functional.mse_loss), stages[0]])
        for when in ("made", "stepped"):
            for mine, theirs in zip(*pairs, strict=True):
                kinds = {key: type(value).__name__ for key, value in vars(theirs).items()}
                found += [
                    (name, when, type(theirs).__name__, key)
                    for key, kind in kinds.items()
                    if not hasattr(mine, key) or type(getattr(mine, key)).__name__ != kind
                ]
            for schedule, _ in pairs:
                schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return found


def test_schedules_and_stages_have_the_attributes_of_torch(workers):
    assert workers.run(attributes, ranks=1) == [[]]


def test_models_with_marks_run_as_they_are():
    sequential = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    marked = ours._IR.PipeSequential.from_sequential(sequential)
    x = torch.ones(1, 2)
    assert ours.pipe_split() is None
    assert torch.equal(marked(x), sequential(x))
    loss = ours._IR.TrivialLossWrapper(marked, torch.nn.functional.mse_loss)
    assert torch.equal(loss(x, x), torch.nn.functional.mse_loss(sequential(x), x))
    with pytest.raises(NotImplementedError):
        ours._IR.LossWrapper(marked, None)(x)

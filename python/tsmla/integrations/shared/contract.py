"""Whether an engine that is installed is the one that a plug-in was written for: its names and its functions.

Engines promise nothing to plug-ins. `broken` looks at what a plug-in overrides and calls, and at how it is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Function:
    """Parameters that the plug-in counts on, separated by spaces.

    exactly: the engine calls the plug-in's, which would not know another parameter. Otherwise the plug-in calls the
    engine's, whose other parameters have defaults. also: parameters of some versions, which the plug-in knows too.
    beside: what an engine has if it has the function; the clause does not concern others.
    """

    path: str
    parameters: str
    exactly: bool = False
    also: str = ""
    beside: str = ""


@dataclasses.dataclass(frozen=True)
class Names:
    """What a module, class or dataclass must have, separated by spaces.

    beside: as for functions.
    """

    path: str
    names: str
    beside: str = ""


def version_of(engine: str) -> str | None:
    """Return the version of the engine that is installed; None without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(engine)
    except PackageNotFoundError:
        return None


def broken(contract: Iterable[Function | Names]) -> list[str]:
    """Return a sentence for each part of the contract that does not hold. None: plug-in and engine go together."""
    return [sentence for clause in contract for sentence in _complaints(clause)]


def _complaints(clause: Function | Names) -> Iterator[str]:
    try:
        if clause.beside and not _is_there(clause.beside):
            return
        found = _found(clause.path)
    except Exception as error:  # importing an engine runs its code, which may raise anything
        yield f"{clause.path} is not there: {error}"
        return
    if isinstance(clause, Names):
        fields = getattr(found, "__dataclass_fields__", {})
        annotations = getattr(found, "__annotations__", {})
        missing = [n for n in clause.names.split() if not (hasattr(found, n) or n in fields or n in annotations)]
        if missing:
            yield f"{clause.path} has no {', '.join(missing)}"
        return
    parameters = dict(inspect.signature(found).parameters)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if missing := [name for name in clause.parameters.split() if name not in parameters and not takes_any]:
        yield f"{clause.path} takes no {', '.join(missing)}"
    if clause.exactly:
        unknown = set(parameters) - {*clause.parameters.split(), *clause.also.split()}
        if unknown:
            yield f"{clause.path} takes {', '.join(sorted(unknown))}, which the plug-in does not know"


def _is_there(path: str) -> bool:
    try:
        _found(path)
    except AttributeError:
        return False
    return True


def _found(path: str) -> Any:
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found

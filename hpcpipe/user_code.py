"""Finds and calls what a run file names as `mypkg.mymodule:build`: a model, a loss, a metric or a data set.

It checks names and arguments before the call, so that a wrong key is one line; what the user's code itself raises
keeps its traceback.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpcpipe.errors import UserError
from hpcpipe.hints import did_you_mean


def import_object(name: str, *, key: str, error: type[UserError]) -> Any:
    """Return the object `mypkg.mymodule:attribute`; the working directory is importable.

    `key` is the dotted key of the run file, for messages. Raises `error` when the module cannot be imported or has
    no such attribute.
    """
    module_name, _, path = name.partition(":")
    here = os.getcwd()
    # A console script, unlike `python -m`, does not see the directory it is started in.
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        if cause.name is not None and (module_name == cause.name or module_name.startswith(cause.name + ".")):
            text = f"no module {cause.name!r} in {here} or on the Python path; check the name or set PYTHONPATH"
            raise error(f"{key}: {name}: {text}") from cause
        raise error(f"{key}: {name}: importing {module_name} fails: {cause}; install what it needs") from cause
    except (ImportError, SyntaxError) as cause:
        text = " ".join(str(cause).split())
        raise error(f"{key}: {name}: importing {module_name} fails: {type(cause).__name__}: {text}") from cause
    for part in path.split("."):
        if not hasattr(found, part):
            raise error(f"{key}: {name}: {module_name} has no {part!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def call_builder(
    name: str,
    arguments: Mapping[str, Any],
    *,
    section: str,
    error: type[UserError],
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """Import the builder `name` and return what it makes of `arguments`.

    `offered` are values that a builder gets only if it has a parameter of that name and the run file gives none.
    Raises `error` for an argument that the builder does not take, or one that it needs and was not given.
    """
    builder = import_object(name, key=f"{section}.name", error=error)
    if not callable(builder):
        raise error(f"{section}.name: {name} is a {type(builder).__name__}; name a function that builds one")
    parameters = _parameters(builder)
    if parameters is None:
        return builder(**arguments)
    named = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        for key in arguments:
            if key not in named:
                takes = f"{name} takes {', '.join(sorted(named)) or 'no arguments'}"
                raise error(f"{section}.{key}: no such argument{did_you_mean(key, named) or '; ' + takes}")
    given = {**{key: value for key, value in (offered or {}).items() if key in named}, **arguments}
    for parameter in parameters:
        if _is_needed(parameter) and parameter.name not in given:
            raise error(f"{section}.{parameter.name}: {name} needs it; add {parameter.name} = ... to [{section}]")
    return builder(**given)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(builder: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the builder's parameters, or None for one whose signature Python cannot tell."""
    try:
        return list(inspect.signature(builder).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic

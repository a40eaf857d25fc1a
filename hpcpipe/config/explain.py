"""Turns the findings of validation into one line a mistake: key, what is wrong, what to do.

It knows the run file's shape, but reads no file and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hpcpipe.config.base import Mistakes, quoted, shown
from hpcpipe.config.run import RunConfig
from hpcpipe.hints import did_you_mean

_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "finite_number": "must be a finite number",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "string_too_short": "must not be empty",
}
_BOUNDS = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}
_OWN = {"model": "mypkg.mymodule:build", "data": "mypkg.mymodule:build"}


def explain(error: ValidationError, tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for each mistake; `tables` is what was validated."""
    for detail in error.errors(include_url=False):
        location = _without_tags(detail["loc"], tables)
        kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
        cause = context.get("error")
        if isinstance(cause, Mistakes):
            yield from ((_dotted((*location, key)), text) for key, text in cause.found)
        elif isinstance(cause, ValueError):
            yield _dotted(location), str(cause)
        elif kind == "extra_forbidden":
            yield _dotted(location), _unknown_key(location, tables)
        elif kind == "union_tag_not_found" and not isinstance(value, Mapping):
            yield _dotted(location), f"must be a table or a name, got {shown(value)}"
        elif kind == "union_tag_not_found":
            yield _dotted((*location, "name")), f"missing; {_names(str(location[0]), tables)}"
        elif kind == "union_tag_invalid":
            chosen = value.get("name")
            known = _tags(str(location[0]))
            text = f"{_names(str(location[0]), tables)}, got {shown(chosen)}{did_you_mean(str(chosen), known)}"
            yield _dotted((*location, "name")), text
        else:
            yield _dotted(location), _wrong_value(kind, context, value, location, tables)


def _wrong_value(
    kind: str, context: Mapping[str, Any], value: Any, location: tuple[int | str, ...], tables: Mapping[str, Any]
) -> str:
    if kind == "missing":
        field = _section(str(location[0]), tables).model_fields.get(str(location[-1]))
        if field is None:
            return "missing; give it a value"
        meaning = (field.description or "").rstrip(".")
        return f"missing ({meaning}); add {location[-1]} = ... to [{location[0]}]"
    got = shown(value)
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        return f"must be {quoted(choices)}, got {got}{near}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = context[bound]
        return f"{words} {f'{limit:g}' if isinstance(limit, float) else limit}, got {got}"
    if kind in ("too_short", "too_long"):
        wanted = context.get("min_length", context.get("max_length"))
        return f"must have {wanted} values, got {context['actual_length']}"
    if kind in _WANTED:
        return f"{_WANTED[kind]}, got {got}"
    return f"cannot be {got}"


def _unknown_key(location: tuple[int | str, ...], tables: Mapping[str, Any]) -> str:
    key = str(location[-1])
    if len(location) == 1:
        homes = [name for name in RunConfig.model_fields if key in _section(name, tables).model_fields]
        home = f"; as a key it belongs to [{homes[0]}]" if homes else did_you_mean(key, RunConfig.model_fields)
        return f"no such section{home or '; there are ' + ', '.join(RunConfig.model_fields)}"
    section = _section(str(location[0]), tables)
    if len(location) > 2:
        section = _nested(section, str(location[1]))
    near = did_you_mean(key, section.model_fields)
    if near or len(location) > 2:
        return f"no such key{near or '; the keys are ' + _keys(section)}"
    chosen = tables.get(str(location[0]))
    named = isinstance(chosen, Mapping) and "name" in chosen
    of = f" for {shown(chosen['name'])}" if isinstance(chosen, Mapping) and named else ""
    siblings = [
        tag for member in members_of(str(location[0])) if key in member.model_fields for tag in _tags_of(member)
    ]
    if siblings:
        return f"no such key{of}; name = {quoted(siblings)} has it"
    homes = [name for name in RunConfig.model_fields if key in _section(name, tables).model_fields]
    if homes:
        return f"no such key; it belongs to [{homes[0]}]"
    return f"no such key{of}; the keys are {_keys(section)}"


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(sorted(section.model_fields, key=lambda key: key != "name"))


def _names(section: str, tables: Mapping[str, Any]) -> str:
    own = f', or your own as "{_OWN[section]}"' if section in _OWN else ""
    return f"must be {quoted(_tags(section))}{own}"


def _tags(section: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for member in members_of(section) for tag in _tags_of(member)))


def _tags_of(member: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that pick this class; none for a user's own, which has no fixed name."""
    return tuple(get_args(member.model_fields["name"].annotation)) if "name" in member.model_fields else ()


def members_of(section: str) -> list[type[BaseModel]]:
    annotation = RunConfig.model_fields[section].annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [get_args(member)[0] for member in get_args(annotation)]


def _section(name: str, tables: Mapping[str, Any]) -> type[BaseModel]:
    """Return the class that a section's name picked, or the first one where it picked none."""
    members = members_of(name)
    table = tables.get(name)
    chosen = table.get("name") if isinstance(table, Mapping) else None
    for member in members:
        if chosen in _tags_of(member):
            return member
    is_own = name in _OWN and isinstance(chosen, str) and ":" in chosen
    return members[-1] if is_own else members[0]


def _nested(section: type[BaseModel], key: str) -> type[BaseModel]:
    for argument in get_args(section.model_fields[key].annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return section


def _without_tags(location: tuple[int | str, ...], tables: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Drop the tag that validation puts behind the name of a section with several classes."""
    if len(location) > 1 and location[0] in RunConfig.model_fields and len(members_of(str(location[0]))) > 1:
        return (location[0], *location[2:])
    return location


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text

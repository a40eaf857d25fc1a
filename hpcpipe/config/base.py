"""What all sections of the run file share: strict, frozen, unknown keys refused, mistakes that name their key.

It knows no section by name and reads no file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from hpcpipe.hints import did_you_mean

OBJECT_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""The form of a user's own object: `mypkg.mymodule:build`."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
LARGEST = 2**53
"""Beyond any real count, and still exact in every format that a number may pass through."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """A table of the run file. Values are never converted (no "5" for 5); lists are held as tuples."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Sections are built once per run, and most commands need none of them.
        defer_build=True,
        protected_namespaces=(),
    )


class Mistakes(ValueError):
    """One or more mistakes found by a check over several keys: pairs of (key below the section, what is wrong)."""

    def __init__(self, *found: tuple[str, str]) -> None:
        super().__init__("; ".join(f"{key}: {text}" for key, text in found))
        self.found = found


def quoted(choices: Iterable[str]) -> str:
    """Return the choices as `"a", "b" or "c"`."""
    words = [f'"{choice}"' for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def shown(value: Any) -> str:
    """Return a value as it would stand in the run file, shortened to 80 characters."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def name_or_object(known: tuple[str, ...], example: str) -> Callable[[str], str]:
    """Return a check that a string is one of `known` or has the form of a user's own object."""

    def check(value: str) -> str:
        if value in known or OBJECT_NAME.fullmatch(value):
            return value
        wanted = f"{quoted(known)}, or your own as " if known else ""
        near = did_you_mean(value, known)
        raise ValueError(f'must be {wanted}"{example}", got {shown(value)}{near}')

    return check


ObjectName = Annotated[str, AfterValidator(name_or_object((), "mypkg.mymodule:build"))]


def _one_string_is_a_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_string_is_a_list)]
"""A list of strings; one string alone stands for a list of one."""


def chosen_by_name(default: str | None, known: tuple[str, ...] = (), user: str | None = None) -> Discriminator:
    """Return the rule by which a section's `name` picks its class: the tag is the name itself.

    Without a name the tag is `default`. A name that is not among `known` but has the form of a user's own object
    gets the tag `user`.
    """

    def tag(value: Any) -> str | None:
        name = value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default)
        if user is not None and isinstance(name, str) and name not in known and OBJECT_NAME.fullmatch(name):
            return user
        return name if name is None or isinstance(name, str) else repr(name)

    return Discriminator(tag)

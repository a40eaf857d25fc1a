"""Writes docs/configuration.md, the reference of the run file, from the sections themselves.

python tools/make_config_reference.py            write the file
python tools/make_config_reference.py --print    print it instead
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpcpipe.config import RunConfig  # noqa: E402  # the path must be set first
from hpcpipe.config.base import LARGEST, Section, shown  # noqa: E402
from hpcpipe.config.optimizer import ParameterGroup  # noqa: E402

HEAD = """# The run file

Every key of a run file, with its default. This page is made from the code by `tools/make_config_reference.py`.

A run file is TOML. Only `[model]` and `[data]` must name something, and `[optimizer]` must give a learning rate.
Unknown keys are refused, with the nearest known one in the message. Any key can be set from the command line,
which stands over the file:

```bash
mpirun -n 4 hpcpipe train jobs/digits-mlp.toml --set run.epochs=5 --set pipeline.policy=stash
```

The options of commands also come from the environment (`HPCPIPE_TRAIN_OUT` for `--out` of `train`). The command
line stands over the environment, that over the file, that over the defaults. What a run was resolved to is written
to `run.toml` in its folder, and starts the same run again. Relative paths mean the working directory.
"""
BOUNDS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
NAMES = {str: "string", int: "whole number", float: "number", bool: "true or false", type(None): "nothing"}
NO_DEFAULT = "**needed**"


def variants(annotation: Any) -> list[type[Section]]:
    """The sections that a table of the run file can be, in their order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    found: list[type[Section]] = []
    for part in get_args(annotation):
        found += [section for section in variants(part) if section not in found]
    return found


def type_in_words(annotation: Any, metadata: list[Any]) -> str:
    """What a value must be: `whole number ≥ 1`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return ", ".join(f"`{shown(choice)}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_in_words(part, metadata) for part in arguments if part is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {type_in_words(arguments[0], [])}"
        return f"list of {len(arguments)}: {type_in_words(arguments[0], [])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table"
    return " ".join([NAMES[annotation], " and ".join(bounds(metadata))]).strip()


def bounds(metadata: list[Any]) -> Iterator[str]:
    """The limits of a number, as `≥ 1`; the largest whole number that anything can hold is no news."""
    for item in metadata:
        for part in getattr(item, "metadata", None) or [item]:
            sign = BOUNDS.get(type(part))
            if sign is not None:
                limit = next(getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name))
                if not (sign in "≤<" and limit >= LARGEST):
                    yield f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"


def default_of(field: FieldInfo) -> str:
    """The default as it would stand in the run file; a dash for a key that may be left out."""
    if field.is_required():
        return NO_DEFAULT
    return "–" if field.default is None else f"`{shown(field.default)}`"


def rows_of(section: type[Section]) -> Iterator[str]:
    """The table of a section's keys."""
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    fields = section.model_fields
    for key in sorted(fields, key=lambda key: key != "name"):
        field = fields[key]
        default = "`runs/<name of the run file>`" if key == "out" else default_of(field)
        cells = (
            f"`{key}`",
            type_in_words(field.annotation, list(field.metadata)),
            default,
            field.description or "",
        )
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        parts.append(f"## [{name}]\n\n{field.description}\n")
        sections = variants(field.annotation) or variants(field.metadata)
        for section in sections:
            if len(sections) > 1:
                heading = inspect.cleandoc(section.__doc__ or "").splitlines()[0].rstrip(".")
                parts.append(f"### {heading}\n")
            parts.append("\n".join(rows_of(section)) + "\n")
        if name == "optimizer":
            parts.append(f"### An entry of optimizer.groups\n\n{ParameterGroup.__doc__}\n")
            parts.append("\n".join(rows_of(ParameterGroup)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(reference())
    else:
        (ROOT / "docs" / "configuration.md").write_text(reference(), encoding="utf-8")

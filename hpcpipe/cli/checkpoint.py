"""`hpcpipe checkpoint`: list, show, verify and export sets on a login node, without MPI and without torch.

Thin: it turns paths into sets and results into text or JSON. Errors go up as `CheckpointError`; the top-level
command prints them.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcpipe.errors import EXIT_USAGE

if TYPE_CHECKING:
    from hpcpipe.checkpoint.sets import CheckpointSet, SetInfo

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_where = click.argument("where", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """List, show, verify and export checkpoints.

    DIR is a run's folder, its checkpoints folder, or one set (step-0000000050).
    """


@checkpoint.command("list")
@_where
@_json_option
def list_(where: Path, as_json: bool) -> None:
    """List all sets, newest first, and say of each whether it counts.

    Only commit records and file lengths are looked at; `verify` reads the files. Sets of another run than the
    folder's are marked: --resume auto passes over them.
    """
    infos = _infos(where)
    if as_json:
        click.echo(json.dumps({"sets": [_info_object(info) for info in infos]}))
        return
    rows = [("step", "ranks", "size", "age", "state")]
    for info in infos:
        ranks = str(len(info.record.files)) if info.record else "-"
        age = _age(info.record.created) if info.record else "-"
        step = f"{info.step}.{info.attempt}" if info.attempt else str(info.step)
        rows.append((step, ranks, _size(info.length) if info.record else "-", age, _state(info)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        click.echo("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4]]))


@checkpoint.command()
@_where
@click.option(
    "--digest", "with_digest", is_flag=True, help="SHA-256 of each tensor, and one over all and the step."
)
@_json_option
def show(where: Path, with_digest: bool, as_json: bool) -> None:
    """Show what a set (of a folder, the newest valid one) holds: run, layers, versions, minibatches in flight.

    Valid by commit record and file lengths; with --digest every byte is checked.
    """
    from hpcpipe.checkpoint.describe import describe
    from hpcpipe.checkpoint.digest import digest
    from hpcpipe.untrusted import printable

    chosen = _choose(where, deep=with_digest)
    layers, stages = describe(chosen)
    prints = digest(chosen) if with_digest else None
    if as_json:
        document: dict[str, Any] = {
            "path": str(chosen.path),
            "step": chosen.step,
            "created": chosen.record.created,
            "ranks": chosen.ranks,
            "bytes": sum(report.length for report in chosen.record.files),
            "meta": chosen.meta,
            "layers": [vars(layer) for layer in layers],
            "stages": [
                {**vars(s), "inflight": sorted(s.inflight), "versions": sorted(s.versions)}
                | {"predictions": sorted(s.predictions), "staleness": s.staleness(chosen.step)}
                for s in stages
            ],
        }
        if prints is not None:
            document["digest"] = {"overall": prints.overall, "tensors": prints.tensors}
        click.echo(json.dumps(document))
        return
    size = _size(sum(report.length for report in chosen.record.files))
    click.echo(
        f"{chosen.path}: step {chosen.step}, {chosen.ranks} ranks, {size}, {_age(chosen.record.created)} old"
    )
    for key, value in chosen.meta.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > 160 or "\n" in text:
            text = f"{' '.join(text.split())[:100]} … (whole with --json)"
        # A terminal obeys some characters, and a set may come from anywhere.
        click.echo(f"  {printable(key)[:100]}: {printable(text)}")
    for layer in layers:
        click.echo(f"layer {layer.name}: rank {layer.rank}, {layer.parameters} parameters, {_size(layer.nbytes)}")
    for stage in stages:
        click.echo(
            f"stage {stage.stage}: rank {stage.rank}, minibatches in flight {_numbers(stage.inflight)}, "
            f"older versions {_numbers(stage.versions)} (staleness up to {stage.staleness(chosen.step)}), "
            f"predictions kept for {_numbers(stage.predictions)}, {_size(stage.nbytes)}"
        )
    if prints is not None:
        for path, value in prints.tensors.items():
            click.echo(f"{value}  {path}")
        click.echo(f"overall {prints.overall}")


@checkpoint.command()
@_where
@_json_option
def verify(where: Path, as_json: bool) -> None:
    """Read every file of a set (of a folder, of all its sets) and check every checksum.

    Prints a line per set that is whole and a line per fault. Ends with 2 if there is a fault, or no whole set
    at all. A folder without commit record is no fault: its write was cut off, or is going on, or a run that
    goes on has just removed it.
    """
    from hpcpipe.checkpoint.layout import COMMIT_NAME
    from hpcpipe.checkpoint.sets import CheckpointSet

    results = []
    for info in _infos(where):
        if info.record is not None:
            faults = CheckpointSet(info.path, info.record).faults()
            if info.fault is not None and info.record.step != info.step:
                faults.insert(0, info.fault)
            if faults and not (info.path / COMMIT_NAME).exists():
                # The run that is still going on has retired it, record first.
                info = replace(info, committed=False)
                faults = [f"{info.path}: was removed while it was read"]
        else:
            faults = [str(info.fault)]
        results.append((info, faults))
    if as_json:
        objects = [_info_object(info) | {"faults": faults} for info, faults in results]
        click.echo(json.dumps({"sets": objects}))
    else:
        for info, faults in results:
            for fault in faults:
                click.echo(fault if info.committed else f"ignored: {fault}", err=True)
            if info.record is not None and not faults:
                other = _other_run(info)
                note = "" if other is None else f", of another run ({other})"
                click.echo(
                    f"ok {info.path}: step {info.step}, {len(info.record.files)} files, {_size(info.length)}{note}"
                )
    whole = sum(not faults for _, faults in results)
    if not whole or any(faults for info, faults in results if info.committed):
        click.get_current_context().exit(EXIT_USAGE)


@checkpoint.command()
@_where
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The safetensors file to write."
)
@_json_option
def export(where: Path, output: Path, as_json: bool) -> None:
    """Write parameters and buffers of a set (of a folder, the newest valid one) as one safetensors file.

    Names are the model's own, so plain torch loads it with load_state_dict.
    """
    from hpcpipe.checkpoint.export import export as write
    from hpcpipe.errors import CheckpointError

    chosen = _choose(where, deep=True)
    try:
        count = write(chosen, output)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written ({error.strerror})") from error
    if as_json:
        click.echo(json.dumps({"output": str(output), "step": chosen.step, "tensors": count}))
    else:
        click.echo(f"{output}: {count} tensors of step {chosen.step}")


def _infos(where: Path) -> list[SetInfo]:
    from hpcpipe.checkpoint.sets import find_sets, inspect, locate

    path, is_set = locate(where)
    return [inspect(path)] if is_set else find_sets(path)


def _choose(where: Path, *, deep: bool) -> CheckpointSet:
    from hpcpipe.checkpoint.sets import choose

    chosen, skipped = choose(where, deep=deep)
    for line in skipped:
        click.echo(f"passed over: {line}", err=True)
    return chosen


def _other_run(info: SetInfo) -> str | None:
    """The run that wrote a set, if it is not the one in whose folder the set lies."""
    from hpcpipe.checkpoint.origin import home_of, run_of, strangeness

    if (
        info.record is None
        or strangeness(info.path, info.record.meta, home_of(info.path.resolve().parent)) is None
    ):
        return None
    return run_of(info.record.meta)


def _info_object(info: SetInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "step": info.step,
        "attempt": info.attempt,
        "ranks": len(info.record.files) if info.record else None,
        "bytes": info.length if info.record else None,
        "created": info.record.created if info.record else None,
        "committed": info.committed,
        "fault": info.fault,
        "other_run": _other_run(info),
    }


def _state(info: SetInfo) -> str:
    if info.fault is None:
        other = _other_run(info)
        return "committed" if other is None else f"committed, but of another run ({other})"
    return f"damaged: {info.fault}" if info.committed else "not committed"


def _numbers(values: set[int]) -> str:
    return " ".join(map(str, sorted(values))) or "none"


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _age(created: float) -> str:
    seconds = max(time.time() - created, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

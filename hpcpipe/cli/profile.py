"""`hpcpipe profile`: measure what each layer of a run's model costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpipe.errors import EXIT_DONE, PlanError

if TYPE_CHECKING:
    from hpcpipe.engine.profiling import ProfileOptions
    from hpcpipe.planning.profile import Profile
    from hpcpipe.transport.world import World

LONGEST_NAME = 24


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option(
    "-o", "--output", metavar="FILE", default="profile.json", show_default=True, help="Where the profile goes."
)
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Sweeps over all layers that count.",
)
@click.option(
    "--concurrent",
    is_flag=True,
    help="All ranks measure at the same time, as they will compute at the same time.  [default: rank 0 alone]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as one JSON object.")
def profile(
    run_file: str, output: str, overrides: tuple[str, ...], repeats: int, concurrent: bool, as_json: bool
) -> None:
    """Measure time and bytes of each layer of RUN.toml's model, for `hpcpipe plan` and `hpcpipe simulate`.

    One process measures alone: hpcpipe profile RUN.toml. Where several ranks will share a machine, take the
    profile under that load: mpirun -n N hpcpipe profile RUN.toml --concurrent.
    """
    from hpcpipe.engine.profiling import ProfileOptions
    from hpcpipe.transport.job import run_job

    options = ProfileOptions(run_file=run_file, overrides=overrides, repeats=repeats, concurrent=concurrent)
    sys.exit(run_job(lambda world: _run(world, options, Path(output), as_json)))


def _run(world: World, options: ProfileOptions, output: Path, as_json: bool) -> int:
    from hpcpipe.engine.profiling import take_profile
    from hpcpipe.planning.profile import profile_table, save_profile

    with world.together("looking for the output folder"):
        if world.rank == 0 and not output.absolute().parent.is_dir():
            raise PlanError(f"{output}: there is no folder {output.absolute().parent}; make it first")
    found = take_profile(world, options)
    with world.together("writing the profile"):
        if world.rank == 0:
            save_profile(found, output)
    if world.rank == 0:
        if as_json:
            click.echo(json.dumps(profile_table(found)))
        else:
            for line in [*lines_of(found), f"written to {output}"]:
                click.echo(line)
    return EXIT_DONE


def lines_of(profile: Profile) -> list[str]:
    """A profile as a table for people."""
    from hpcpipe.planning.units import show_size

    about = profile.about
    ranks = about["ranks_measuring"]
    micro = f" in {about['microbatches']} microbatches" if about["microbatches"] > 1 else ""
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    lines = [
        f"{about['model']} in {about['dtype']} on {about['device']} ({about['device_name']}), {threads}, "
        f"batch {about['batch']}{micro}: passes of {profile.rows} rows",
        f"medians of {about['sweeps']} sweeps, "
        + (f"over {ranks} ranks at the same time" if ranks > 1 else "one rank measured alone"),
        f"{'layer':{LONGEST_NAME}s} {'F ms':>9s} {'±':>8s} {'B ms':>9s} {'±':>8s} {'output':>10s} "
        f"{'gradient':>10s} {'parameters':>10s} {'state':>10s} {'saved':>10s}",
    ]
    for layer in profile.layers:
        gradient = layer.output_bytes if layer.gradient_bytes is None else layer.gradient_bytes
        sizes = (layer.output_bytes, gradient, layer.parameter_bytes, layer.state_bytes, layer.saved_bytes)
        lines.append(
            f"{layer.name:{LONGEST_NAME}.{LONGEST_NAME}s} {layer.forward_s * 1e3:9.3f} "
            f"{layer.forward_spread_s * 1e3:8.3f} {layer.backward_s * 1e3:9.3f} "
            f"{layer.backward_spread_s * 1e3:8.3f} " + " ".join(f"{show_size(size):>10s}" for size in sizes)
        )
    forward = sum(layer.forward_s for layer in profile.layers)
    backward = sum(layer.backward_s for layer in profile.layers)
    update = sum(layer.update_s for layer in profile.layers)
    totals = [sum(getattr(layer, key) for layer in profile.layers) for key in _SUMMED]
    lines.append(
        f"{'all':{LONGEST_NAME}s} {forward * 1e3:9.3f} {'':8s} {backward * 1e3:9.3f} {'':8s} {'':10s} {'':10s} "
        + " ".join(f"{show_size(total):>10s}" for total in totals)
    )
    one_pass = forward + backward + 2 * profile.pass_overhead_s + profile.data_s + profile.targets_s
    seconds = about["microbatches"] * one_pass + update
    lines += [
        f"update {update * 1e3:.3f} ms, beside the layers {profile.pass_overhead_s * 1e3:.3f} ms a pass, loading "
        f"inputs {profile.data_s * 1e3:.3f} ms and targets {profile.targets_s * 1e3:.3f} ms, a message "
        f"{profile.message_s * 1e6:.1f} µs ({about['message_s']})",
        f"one rank alone would train {about['batch'] / seconds:.1f} samples/s",
    ]
    return lines


_SUMMED = ("parameter_bytes", "state_bytes", "saved_bytes")

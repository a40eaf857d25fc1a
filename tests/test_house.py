"""Rules of the house that no module can keep alone: sizes, arrows between packages, words, true documents."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpcpipe.cli.main import hpcpipe as command_line

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hpcpipe"
LONGEST_MODULE = 400

# What each part may import of the others. Arrows point one way: from the command line down to errors.
ARROWS = {
    "errors": set(),
    "schedule": {"errors"},
    "config": {"errors", "hints", "untrusted"},
    "native": set(),
    "durable": set(),
    "hints": set(),
    "batch": {"errors"},
    "untrusted": set(),
    "planning": {"errors", "durable", "hints", "untrusted", "schedule"},
    "simulation": {"errors", "schedule", "planning"},
    "checkpoint": {"errors", "durable", "untrusted"},
    "observe": {"errors", "durable", "schedule", "config"},
    "transport": {"errors"},
    "optim": {"errors", "native"},
    "seeding": set(),
    "user_code": {"errors", "hints"},
    "datasets": {"errors", "config", "seeding", "user_code"},
    "models": {"errors", "config", "datasets", "seeding", "user_code"},
    "engine": {
        "errors",
        "durable",
        "untrusted",
        "seeding",
        "schedule",
        "config",
        "planning",
        "simulation",
        "checkpoint",
        "observe",
        "transport",
        "optim",
        "datasets",
        "models",
    },
    "bench": {
        "errors",
        "schedule",
        "config",
        "planning",
        "checkpoint",
        "observe",
        "transport",
        "optim",
        "datasets",
        "models",
        "engine",
    },
    "cli": {
        "errors",
        "schedule",
        "config",
        "planning",
        "simulation",
        "checkpoint",
        "transport",
        "optim",
        "engine",
        "bench",
        "batch",
        "untrusted",
    },
}
# Libraries that a part must be usable without.
WITHOUT = {
    "errors": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "schedule": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "config": {"torch", "mpi4py", "cupy", "h5py", "numpy"},
    "native": {"torch", "mpi4py", "cupy", "h5py", "numpy"},
    "durable": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "hints": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "untrusted": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "batch": {"torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"},
    "planning": {"torch", "mpi4py", "cupy", "h5py", "pydantic"},
    "simulation": {"torch", "mpi4py", "cupy", "h5py", "pydantic"},
    "checkpoint": {"torch", "mpi4py", "cupy"},
    "observe": {"torch", "mpi4py", "cupy", "h5py"},
    "optim": {"mpi4py", "cupy", "h5py"},
    "seeding": {"mpi4py", "cupy", "h5py", "pydantic"},
    "user_code": {"torch", "mpi4py", "cupy", "h5py", "numpy"},
    "datasets": {"mpi4py", "cupy", "h5py"},
    "models": {"mpi4py", "cupy", "h5py"},
    "transport": {"h5py"},
    "engine": {"mpi4py", "cupy", "h5py"},
    "bench": {"mpi4py", "cupy"},
    "cli": {"mpi4py", "cupy"},
}
# Joined here, so that this file does not itself say what it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("deb", "debian", "org"),
        ("npmjs", "org"),
        ("nvidia", "com"),
        ("huggingface", "co"),
    )
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def texts() -> dict[str, str]:
    """Every text file of the repository that git would commit, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = (".ci", "docs", "hpcpipe", "jobs", "tests", "tools")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        paths += list(ROOT.glob("*.*"))
    found = {}
    for path in paths:
        if path.is_file() and path.suffix not in {".so", ".pyc", ".json"}:
            try:
                found[name_of(path)] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def imports_of(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports when it runs, wherever in the file."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            # `from package import module` names a module, too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def part_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "hpcpipe" and len(parts) > 1 and parts[1] in ARROWS else None


def test_no_module_is_longer_than_four_hundred_lines() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}

    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [name_of(path) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]

    assert silent == []


def test_every_part_has_its_arrows() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}

    assert parts - {"__init__", "__main__"} == set(ARROWS) == set(WITHOUT)


@pytest.mark.parametrize("part", sorted(ARROWS))
def test_arrows_between_parts_point_one_way(part: str) -> None:
    allowed = ARROWS[part] | {part}

    wrong = {
        (name_of(path), imported)
        for path in modules()
        if part_of(f"hpcpipe.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}") == part
        for imported in imports_of(path)
        if part_of(imported) not in allowed | {None}
    }

    assert wrong == set()


@pytest.mark.parametrize("part", sorted(WITHOUT))
def test_a_part_works_without_libraries_that_are_not_its_business(part: str) -> None:
    paths = [path for path in modules() if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == part]

    found = {
        (name_of(path), imported)
        for path in paths
        for imported in imports_of(path)
        if imported.split(".")[0] in WITHOUT[part]
    }

    # The doctor looks at every library it can find.
    assert {entry for entry in found if entry[0] != "hpcpipe/cli/doctor.py"} == set()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    edges = {name: {other for other in imports_of(path) if other in names} for name, path in names.items()}

    # Take away whatever imports nothing that is left, until only circles remain.
    while free := {name for name, others in edges.items() if not others - {name}}:
        edges = {name: others - free for name, others in edges.items() if name not in free}

    assert edges == {}


def calls_of(path: Path) -> Iterator[tuple[str, set[str]]]:
    """What a file calls, as it is written, and the names of the arguments that are not plainly False."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            off = [it for it in node.keywords if isinstance(it.value, ast.Constant) and it.value.value is False]
            yield ast.unparse(node.func), {keyword.arg or "" for keyword in node.keywords if keyword not in off}


LOADERS = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "runpy"}
RUNNERS = re.compile(r"(builtins\.)?(eval|exec|compile|__import__)|torch\.load|.*\.read_pickle")


def test_nothing_that_is_read_is_ever_run() -> None:
    sources = [*modules(), *(ROOT / "tools").rglob("*.py")]

    loaders = {(name_of(path), it) for path in sources for it in imports_of(path) if it.split(".")[0] in LOADERS}
    runners = {(name_of(path), call) for path in sources for call, _ in calls_of(path) if RUNNERS.fullmatch(call)}
    pickles = {(name_of(path), call) for path in sources for call, on in calls_of(path) if "allow_pickle" in on}

    assert loaders | runners | pickles == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["schedule", "verify", "--stages", "3"],
        ["checkpoint", "list", "--help"],
        ["profile", "--help"],
        ["plan", "tests/data/profiles/vgg16.txt", "--ranks", "4"],
        ["simulate", "--help"],
        ["job", "jobs/digits-mlp.toml", "--scheduler", "slurm", "--ranks-per-node", "4", "--time", "1:00:00"],
    ],
    ids=" ".join,
)
def test_a_login_node_loads_neither_torch_nor_mpi(arguments: list[str]) -> None:
    code = (
        "import json, sys\n"
        f"sys.argv = ['hpcpipe', *{arguments!r}]\n"
        "from hpcpipe.cli.main import hpcpipe\n"
        "hpcpipe(standalone_mode=False)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )

    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    loaded = set(json.loads(shown.stdout.splitlines()[-1]))
    assert loaded & {"torch", "mpi4py", "cupy"} == set()


def test_nothing_is_left_unfinished() -> None:
    found = [
        (name, line) for name, text in texts().items() for line in text.splitlines() if UNFINISHED.search(line)
    ]

    assert found == []


def test_no_file_names_a_package_registry() -> None:
    found = [(name, host) for name, text in texts().items() for host in REGISTRIES if host in text.lower()]

    assert found == []


def test_no_file_depends_on_a_folder_outside_the_repository() -> None:
    outside = re.compile(r"\.\./shared|/work/" + "main")

    assert [name for name, text in texts().items() if outside.search(text)] == []


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words after `hpcpipe` of every command line in a document's code blocks."""
    for block in re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:mpirun|srun|exec)\b.*? )?hpcpipe (.*)", line)
            if found:
                yield re.split(r"\s+", re.split(r"\s[#|>&;]|\s\|\||\)", found[1])[0].strip())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_exist(document: Path) -> None:
    context = click.Context(command_line)
    for words in commands_in(document.read_text(encoding="utf-8")):
        command: click.Command | None = command_line
        rest = list(words)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            command = command.get_command(context, rest.pop(0))
        assert command is not None, f"{document.name}: hpcpipe {' '.join(words)}"
        known = {name for parameter in command.params for name in parameter.opts} | {"--help", "--version"}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{document.name}: hpcpipe {' '.join(words)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_in_the_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    named = re.findall(r"(?<![\w/])((?:jobs|tools|docs|tests)/[\w./-]+\.\w+)", text)

    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]

    assert missing == []


def test_the_configuration_reference_is_up_to_date() -> None:
    shown = subprocess.run(
        [sys.executable, "tools/make_config_reference.py", "--print"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert shown.stdout == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("options", ["--minibatches 8", "--replicas 2,1 --minibatches 6 --policy stash"])
def test_the_drawings_in_the_documents_are_what_the_command_draws(options: str) -> None:
    arguments = ["schedule", "show", *options.split()]
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(command_line, arguments)

    assert f"```text\n{shown.output}```" in (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")

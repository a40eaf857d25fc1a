"""Builds the extension module by CMake; everything else about the package stands in pyproject.toml.

The extension is optional: where it cannot be built, the package installs without it and a build record says why.
HPCPIPE_REQUIRE_EXTENSION=1 turns that into an error, HPCPIPE_CUDA=0 leaves the CUDA side out.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "hpcpipe" / "native"
LOADER = runpy.run_path(str(NATIVE / "loader.py"))


def find_tool(name: str) -> str | None:
    """A program on the PATH, or beside the Python in use (a virtual environment that is not activated)."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def native_files(*suffixes: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in NATIVE.iterdir() if path.suffix in suffixes)


def telling(lines: list[str]) -> str:
    """The first error in a build's output, with what follows it where it ends in a colon."""
    for index, line in enumerate(lines):
        # Ninja's own lines begin with a bracket and may name a file like error.cpp.
        if not line.startswith("[") and re.search(r"\berror\b|\bfatal\b", line, re.IGNORECASE):
            return " ".join(lines[index : index + 3]) if line.endswith(":") else line
    return lines[-1] if lines else "no output"


class BuildFailure(Exception):
    """Why the extension was not built, in one line."""


class CMakeBuild(build_ext):
    """Configure and build with CMake, first with CUDA where nvcc is found, then without."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        record: dict[str, object] = {"python": platform.python_version()}
        try:
            record["cuda"] = self.build_for(target)
            record["built"] = True
        except BuildFailure as failure:
            if os.environ.get("HPCPIPE_REQUIRE_EXTENSION") == "1":
                raise SystemExit(f"hpcpipe: the extension could not be built: {failure}") from None
            record["built"] = False
            record["reason"] = str(failure)
            print(f"hpcpipe: installing without the extension: {failure}", file=sys.stderr)
        (target.parent / LOADER["BUILD_RECORD"]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def build_for(self, target: Path) -> str:
        """Build the module; return what became of its CUDA side, in words."""
        cmake = find_tool("cmake")
        if cmake is None:
            raise BuildFailure("cmake was not found")
        if not any(find_tool(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++", "clang++")):
            raise BuildFailure("no C++ compiler was found")
        if os.environ.get("HPCPIPE_CUDA") == "0":
            self.run_cmake(cmake, target, [])
            return "off: HPCPIPE_CUDA=0"
        nvcc = os.environ.get("CUDACXX") or find_tool("nvcc")
        if nvcc is None:
            self.run_cmake(cmake, target, [])
            return "off: nvcc was not found"
        options = ["-DHPCPIPE_WITH_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
        architectures = os.environ.get("HPCPIPE_CUDA_ARCHITECTURES")
        if architectures:
            options.append(f"-DHPCPIPE_CUDA_ARCHITECTURES={architectures}")
        try:
            self.run_cmake(cmake, target, options)
        except BuildFailure as failure:
            print(f"hpcpipe: building the extension without CUDA: {failure}", file=sys.stderr)
            self.run_cmake(cmake, target, [])
            return f"off: {failure}"
        return f"on: {nvcc}, architectures {architectures or 'sm_80, sm_90 and PTX'}"

    def run_cmake(self, cmake: str, target: Path, options: list[str]) -> None:
        try:
            import nanobind
        except ImportError:
            raise BuildFailure("nanobind was not found") from None
        # Tied to Python, nanobind and CUDA, so that none of them can leave something stale for another.
        name = f"extension-{sys.implementation.cache_tag}-nb{nanobind.__version__}-{'cuda' if options else 'cpu'}"
        build = ROOT / "build" / name
        version = re.search(
            r'__version__ = "(.+)"', (ROOT / "hpcpipe" / "__init__.py").read_text(encoding="utf-8")
        )
        assert version is not None
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            f"-DHPCPIPE_SOURCES={LOADER['sources_digest'](NATIVE)}",
            f"-DHPCPIPE_VERSION={version[1]}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            *options,
        ]
        ninja = find_tool("ninja")
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if not self.succeeds(configure):
            # A build directory that another CMake or generator left behind is the usual reason.
            shutil.rmtree(build, ignore_errors=True)
            self.check(configure)
        self.check([cmake, "--build", str(build), "--target", "_core"])
        if not target.exists():
            raise BuildFailure(f"cmake made no {target.name}")

    def succeeds(self, command: list[str]) -> bool:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    def check(self, command: list[str]) -> None:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        print(result.stdout)
        if result.returncode != 0:
            lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
            raise BuildFailure(f"{Path(command[0]).name} failed: {telling(lines)}")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            record = Path(self.build_lib, *ext.name.split(".")[:-1], LOADER["BUILD_RECORD"])
            if record.exists():
                shutil.copy(record, NATIVE / record.name)


setup(
    ext_modules=[
        Extension(
            LOADER["MODULE"],
            sources=native_files(".cpp", ".cu"),
            depends=["CMakeLists.txt", *native_files(".h", ".inc")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": CMakeBuild},
    # Only when pip asks what the build needs, and puts it into the build's environment: setuptools itself would
    # download it into the source tree.
    setup_requires=["cmake"] if "egg_info" in sys.argv and find_tool("cmake") is None else [],
)

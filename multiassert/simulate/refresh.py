"""Reads again which operators a vendor's wheel registers, for the lists in `backends/operators`.

    python -m multiassert.simulate.refresh npu --wheel torch_npu-2.13.0-*.whl                              compare
    python -m multiassert.simulate.refresh npu --wheel torch_npu-2.13.0-*.whl --output backends/operators/npu.txt

It takes neither the vendor's toolkit nor a device. The vendor's library is linked so that it loads only if every
function of the toolkit is there; it gets functions that return 0, registers its operators as it loads, and torch's
dispatcher is asked for them. That runs code of the wheel, in a process of its own, since no library can be unloaded.

Exit codes: 0 done, or the list is the same; 1 the list differs; 2 it could not be read, and why.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import email
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable

import torch

from multiassert import backends

TOOLS = ("gcc", "nm", "readelf")
LIBRARY = "torch_npu/lib/libtorch_npu.so"


class CannotRead(Exception):
    """The wheel cannot be read here; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    """Read a wheel, then write the list or compare it with the one that is there; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m multiassert.simulate.refresh",
        description="Read which operators a vendor's wheel registers for its device.",
    )
    parser.add_argument("platform", choices=["npu"], help="musa's list is made by hand, from the YAML of the release")
    parser.add_argument("--wheel", type=pathlib.Path, required=True, help="a torch_npu wheel for this torch")
    parser.add_argument("--output", type=pathlib.Path, help="the file to write; otherwise differences are printed")
    chosen = parser.parse_args(arguments)
    try:
        version, names = read_wheel(chosen.wheel)
    except CannotRead as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if chosen.output is not None:
        chosen.output.write_text(_header(version) + "".join(f"{name}\n" for name in names), encoding="utf-8")
        print(f"{chosen.output}: {len(names)} operators of torch_npu {version}")
        return 0
    operators = backends.named(chosen.platform).operators
    known = operators.native() if operators is not None else frozenset()
    for name in sorted(known ^ set(names)):
        print(f"{'-' if name in known else '+'} {name}")
    print(f"torch_npu {version}: {len(names)} operators, {len(known ^ set(names))} different from the list")
    return int(known != set(names))


def read_wheel(wheel: pathlib.Path) -> tuple[str, list[str]]:
    """The version of a torch_npu wheel, and the ATen operators that it registers for its device, sorted."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise CannotRead(f"this takes {', '.join(TOOLS)} on PATH, and there is no {' and no '.join(missing)}")
    if platform.system() != "Linux":
        raise CannotRead("this takes Linux, which the wheel is for")
    if not zipfile.is_zipfile(wheel):
        raise CannotRead(f"{wheel} is not there, or not a wheel")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        if LIBRARY not in archive.namelist():
            raise CannotRead(f"{wheel} has no {LIBRARY}")
        version, wanted = _versions(archive)
        ours = torch.__version__.partition("+")[0]
        if wanted != ours:
            raise CannotRead(f"{wheel.name} is for torch {wanted}, and this is torch {ours}")
        archive.extractall(folder)
        # Torch would load an installed vendor package by itself.
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        code = f"from multiassert.simulate import refresh; refresh.print_registered({folder!r})"
        child = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
    names = child.stdout.split()
    if child.returncode or not names:
        raise CannotRead(f"the process that loads the library ended with {child.returncode}:\n{child.stderr[-2000:]}")
    return version, names


def print_registered(folder: str) -> None:
    """Load the library of an unpacked wheel into this process and print what it registers; does not return."""
    of_torch = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    libraries = sorted(pathlib.Path(folder, LIBRARY).parent.glob("*.so"))
    _stand_in_for_the_toolkit(libraries, pathlib.Path(folder))
    ctypes.CDLL(str(pathlib.Path(folder, LIBRARY)), mode=ctypes.RTLD_GLOBAL)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    print("\n".join(sorted(name for name in of_torch if has_kernel(name, "PrivateUse1"))))
    sys.stdout.flush()
    os._exit(0)  # at once, without what the library would do at the end


def _stand_in_for_the_toolkit(libraries: list[pathlib.Path], folder: pathlib.Path) -> None:
    """Load libraries of the names, and with the functions, that the wheel's libraries need and nothing here has."""
    needed = {name for library in libraries for name in re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", library))}
    missing = sorted(name for name in needed - {library.name for library in libraries} if not _loads(name))
    present = {name for file in [*_loaded_files(), *libraries] for name in _symbols(file, "--defined-only")}
    functions = sorted({name for file in libraries for name in _symbols(file, "--undefined-only")} - present)
    source = folder / "toolkit.c"
    for number, name in enumerate(missing):
        # One library has all functions; the others only have to be there.
        source.write_text("".join(f"long {function}(void) {{ return 0; }}\n" for function in functions * (not number)))
        built = folder / name
        _run("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", built, source)
        ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


def _loads(name: str) -> bool:
    """Whether a library is there; it is loaded then."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _loaded_files() -> set[pathlib.Path]:
    """The program and the libraries in this process."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {pathlib.Path(line.split(maxsplit=5)[5]) for line in maps if " r-xp " in line and "/" in line}
    return {path for path in paths if path.exists()}


def _symbols(file: pathlib.Path, which: str) -> Iterable[str]:
    """A library's symbols without their versions; of the undefined ones, those that must be there."""
    for line in _run("nm", "-D", which, file).splitlines():
        *_, kind, name = line.split()
        if kind not in ("w", "v"):
            yield name.partition("@")[0]


def _run(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _versions(archive: zipfile.ZipFile) -> tuple[str, str]:
    """A wheel's version, and that of the torch it requires: its own where it names none."""
    (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(file))
    version = metadata["Version"]
    for requirement in metadata.get_all("Requires-Dist", []):
        exact = re.match(r"torch\s*\(?==\s*(\d+(?:\.\d+)*)", requirement)
        if exact:
            return version, exact[1]
    return version, version.partition(".post")[0]


def _header(version: str) -> str:
    return (
        "# The ATen operators that torch_npu registers for its device, one a line, sorted.\n"
        f"# package: torch_npu {version}\n"
        "# source: the release wheel's libtorch_npu.so, loaded over stub functions on "
        f"torch {torch.__version__}, and its dispatcher read\n"
        f"# read on: {datetime.date.today():%Y-%m}\n"
        f"# again: python -m multiassert.simulate.refresh npu --wheel torch_npu-{version}-*.whl\n"
    )


if __name__ == "__main__":
    sys.exit(main())

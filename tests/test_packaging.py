"""The wheel: it holds the backends under their one name and works from another folder."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, since setuptools writes into the folder that it builds from
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("multiassert-*.whl")
    return path


def test_the_wheel_holds_the_backends_and_no_package_named_backends(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"multiassert", "pytest_multiassert.py"}
    assert {"multiassert/py.typed", "multiassert/probes.py", "multiassert/demo/__init__.py"} <= set(names)
    for source in (ROOT / "multiassert").rglob("*.py"):  # without backends, which is a link
        assert source.relative_to(ROOT).as_posix() in names
    for source in (ROOT / "backends").glob("*.py"):
        assert f"multiassert/backends/{source.name}" in names
    assert {"multiassert/backends/operators/npu.txt", "multiassert/simulate/guard.cpp"} <= set(names)


def test_the_wheel_works_from_another_folder(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
import sys, torch, multiassert, multiassert.backends
assert multiassert.__file__.startswith(sys.argv[1]), multiassert.__file__
try:
    import backends
except ImportError:
    pass
else:
    sys.exit("a top-level package named backends")
with multiassert.override("warn"):
    multiassert.maybe_detect_nan(torch.tensor([float("nan")]), "from the wheel")
    print(multiassert.drain()[0].message)
"""
    # -S leaves out the editable install of this repository; torch is found by its folder.
    torch_folder = str(pathlib.Path(torch.__file__).parent.parent)
    path = f"import sys; sys.path[:0] = [sys.argv[1], {torch_folder!r}]\n"
    command = [sys.executable, "-I", "-S", "-c", path + code, str(tmp_path / "site")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "from the wheel\n"), run.stderr

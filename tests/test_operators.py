"""The lists of the vendors' operators, and the command that reads them again from a wheel."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

from multiassert import backends
from multiassert.backends.vendor import VendorOperators
from multiassert.simulate import refresh

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "backends" / "operators"

# What the lists name and torch 2.13 does not have: operators that the vendor adds to torch's own, and older ones.
NOT_IN_TORCH_2_13 = {
    "npu": set(),
    "musa": {
        "aten::_fused_cross_entropy_loss_2d_backward",
        "aten::_fused_cross_entropy_loss_2d_forward",
        "aten::_fused_rmsnorm_backward",
        "aten::_fused_rmsnorm_forward",
        "aten::_fused_rope_backward",
        "aten::_fused_rope_forward",
        "aten::_fused_swiglu_backward",
        "aten::_fused_swiglu_forward",
        "aten::_scaled_dot_product_attention_flash_musa",
        "aten::_scaled_dot_product_attention_flash_musa_backward",
        "aten::_scaled_dot_product_attention_math_musa",
        "aten::_scaled_dot_product_attention_math_musa_backward",
        "aten::cross_entropy_loss_2d_choice",
        "aten::gated_silu",
        "aten::log_softmax.Dimname",
        "aten::max.names_dim",
        "aten::max.names_dim_max",
        "aten::mean.names_dim",
        "aten::mean.names_out",
        "aten::min.names_dim",
        "aten::min.names_dim_min",
        "aten::softmax.Dimname",
    },
}


@pytest.fixture(params=NOT_IN_TORCH_2_13)
def vendor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def operators_of(vendor: str) -> VendorOperators:
    operators = backends.named(vendor).operators
    assert operators is not None
    return operators


def test_every_list_is_of_a_vendor() -> None:
    assert {operators_of(vendor).file for vendor in NOT_IN_TORCH_2_13} == {path.name for path in FOLDER.glob("*")}


def test_a_list_has_its_provenance_and_then_sorted_names(vendor: str) -> None:
    lines = (FOLDER / operators_of(vendor).file).read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    names = lines[len(comments) :]
    assert lines[: len(comments)] == comments  # all in front
    assert [name for name in names if not re.fullmatch(r"aten::\w+(\.\w+)?", name)] == []
    assert names == sorted(set(names))
    assert operators_of(vendor).native() == set(names)
    provenance = operators_of(vendor).provenance()
    assert list(provenance) == ["package", "source", "read on", "again"]
    assert re.fullmatch(rf"torch_{vendor} \d+(\.\d+)+", provenance["package"])
    assert re.fullmatch(r"20\d\d-[01]\d", provenance["read on"])


def test_torch_has_the_listed_operators(vendor: str) -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("which of them torch has was written down for torch 2.13")
    in_torch = set(torch._C._dispatch_get_all_op_names())
    assert operators_of(vendor).native() - in_torch == NOT_IN_TORCH_2_13[vendor]


def test_operators_that_wait_are_listed(vendor: str) -> None:
    operators = operators_of(vendor)
    assert set(operators.waiting) <= operators.native()


# ---------------------------------------------------------------------------------------------------------------------
# Reading a wheel.

# A library as torch_npu's is: it takes a function of a toolkit that is not here, and registers an operator as it loads.
PRETENDED_LIBRARY = """
int aclInit(const char *config);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
int PyRun_SimpleString(const char *code);

__attribute__((constructor)) static void load(void) {
  int failed = aclInit(0);
  int state = PyGILState_Ensure();
  if (!failed)
    PyRun_SimpleString(
        "import torch\\n"
        "library = torch.library.Library('aten', 'IMPL')\\n"
        "for name in ('abs', 'add.out'):\\n"
        "    library.impl(name, lambda *args, **kwargs: None, 'PrivateUse1')\\n"
        "torch.library.define('aten::one_of_the_vendor', '(Tensor x) -> Tensor')\\n");
  PyGILState_Release(state);
}
"""


def build_wheel(folder: pathlib.Path, requires: str, library: bytes | None) -> pathlib.Path:
    wheel = folder / "torch_npu-9.8.7-cp311-cp311-linux.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = f"Metadata-Version: 2.4\nName: torch_npu\nVersion: 9.8.7\nRequires-Dist: numpy\n{requires}"
        archive.writestr("torch_npu-9.8.7.dist-info/METADATA", metadata)
        if library is not None:
            archive.writestr("torch_npu/lib/libtorch_npu.so", library)
    return wheel


def requirement() -> str:
    return f"Requires-Dist: torch=={torch.__version__.partition('+')[0]}\n"


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    missing = [tool for tool in refresh.TOOLS if shutil.which(tool) is None]
    if missing or sys.platform != "linux":
        pytest.skip(f"reading a wheel takes Linux with {', '.join(refresh.TOOLS)}")
    toolkit, library = tmp_path / "toolkit", tmp_path / "libtorch_npu.so"
    toolkit.mkdir()
    (tmp_path / "toolkit.c").write_text("int aclInit(const char *config) { return 1; }\n")
    (tmp_path / "library.c").write_text(PRETENDED_LIBRARY)
    shared = ["gcc", "-shared", "-fPIC"]
    subprocess.run([*shared, "-o", toolkit / "libascendcl.so", tmp_path / "toolkit.c"], check=True)
    needs = [f"-L{toolkit}", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-z,now"]
    subprocess.run([*shared, "-o", library, tmp_path / "library.c", *needs], check=True)
    return build_wheel(tmp_path, requirement(), library.read_bytes())


def test_a_wheel_is_read_and_written(
    wheel: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "npu.txt"
    assert refresh.main(["npu", "--wheel", str(wheel), "--output", str(written)]) == 0
    assert capsys.readouterr().out == f"{written}: 2 operators of torch_npu 9.8.7\n"
    lines = written.read_text().splitlines()
    committed = (FOLDER / "npu.txt").read_text().splitlines()
    assert lines[0] == committed[0]
    assert [line.partition(": ")[0] for line in lines[:5]] == [line.partition(": ")[0] for line in committed[:5]]
    assert lines[1] == "# package: torch_npu 9.8.7"
    assert f"on torch {torch.__version__}," in lines[2]
    assert re.fullmatch(r"# read on: 20\d\d-[01]\d", lines[3])
    assert lines[4] == "# again: python -m multiassert.simulate.refresh npu --wheel torch_npu-9.8.7-*.whl"
    assert lines[5:] == ["aten::abs", "aten::add.out"]


def test_a_wheel_is_compared(wheel: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = operators_of("npu").native()
    assert refresh.main(["npu", "--wheel", str(wheel)]) == 1
    *differences, total = capsys.readouterr().out.splitlines()
    assert differences == [f"- {name}" for name in sorted(listed - {"aten::abs", "aten::add.out"})]
    assert total == f"torch_npu 9.8.7: 2 operators, {len(differences)} different from the list"


@pytest.mark.skipif(sys.platform != "linux", reason="reading a wheel takes Linux")
def test_what_cannot_be_read_says_why(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(wheel: pathlib.Path) -> str:
        assert refresh.main(["npu", "--wheel", str(wheel), "--output", str(tmp_path / "npu.txt")]) == 2
        assert not (tmp_path / "npu.txt").exists()
        return capsys.readouterr().err

    for tool in refresh.TOOLS:
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "is not there, or not a wheel" in refusal(tmp_path / "torch_npu-2.0.0-none.whl")
    assert "has no torch_npu/lib/libtorch_npu.so" in refusal(build_wheel(tmp_path, requirement(), None))
    other = build_wheel(tmp_path, "Requires-Dist: torch==1.2.3.*\n", b"")
    assert f"is for torch 1.2.3, and this is torch {torch.__version__.partition('+')[0]}" in refusal(other)
    broken = build_wheel(tmp_path, requirement(), b"no library")
    assert "the process that loads the library ended with 1:" in refusal(broken)
    (tmp_path / "nm").unlink()
    assert "this takes gcc, nm, readelf on PATH, and there is no nm" in refusal(broken)


@pytest.mark.skipif(
    os.environ.get("MULTIASSERT_TEST_DOWNLOAD") != "1",
    reason="it downloads the vendor's wheel: MULTIASSERT_TEST_DOWNLOAD=1 runs it",
)
def test_the_npu_list_is_what_the_released_wheel_registers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = operators_of("npu").provenance()["package"].replace(" ", "==")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, package]
    subprocess.run(download, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert refresh.main(["npu", "--wheel", str(wheel)]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.endswith(" operators, 0 different from the list\n")

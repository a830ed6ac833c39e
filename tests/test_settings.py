"""Which mode is in force: the environment, SGLang's names, configure, override."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import multiassert
from conftest import ChildRun
from multiassert import AsyncAssertionError, dispatch, maybe_detect_nan, settings
from multiassert.settings import Mode, read_environment

NAN = torch.full((2, 2), float("nan"))


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("off", "off"), ("0", "off"), ("false", "off"), ("", "off"), ("none", "off"), ("OFF", "off"),
        ("auto", "auto"), ("1", "auto"), ("true", "auto"), ("on", "auto"), (" True ", "auto"),
        ("warn", "warn"), ("log", "warn"), ("raise", "raise"), ("strict", "raise"),
        ("trap", "trap"), ("native", "trap"),
    ],
)  # fmt: skip
def test_every_spelling(value: str, mode: str) -> None:
    assert read_environment({"MULTIASSERT": value}, []).of("npu") is Mode(mode)


def test_the_default_is_off() -> None:
    modes = read_environment({}, [])
    assert modes.of("cuda") is Mode.OFF
    assert not modes.any_on


@pytest.mark.parametrize("name", ["MULTIASSERT", "MULTIASSERT_NPU"])
def test_a_bad_value_names_the_variable_and_the_good_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='loud' is no mode.*off.*auto.*warn.*raise.*trap"):
        read_environment({name: "loud"}, [])


def test_a_platforms_variable_wins_over_the_one_for_all() -> None:
    modes = read_environment({"MULTIASSERT": "raise", "MULTIASSERT_CUDA": "off", "MULTIASSERT_HPU": "warn"}, [])
    assert (modes.of("cuda"), modes.of("hpu"), modes.of("npu")) == (Mode.OFF, Mode.WARN, Mode.RAISE)
    assert (modes.source("cuda"), modes.source("npu")) == ("MULTIASSERT_CUDA", "MULTIASSERT")


def test_one_platform_can_be_on_alone() -> None:
    modes = read_environment({"MULTIASSERT_NPU": "warn"}, [])
    assert (modes.of("npu"), modes.of("cuda"), modes.any_on) == (Mode.WARN, Mode.OFF, True)


def test_a_variable_of_no_known_device_type_warns() -> None:
    with pytest.warns(UserWarning, match="MULTIASSERT_CUDAA names no device type"):
        read_environment({"MULTIASSERT_CUDAA": "raise"}, [])


def test_the_test_suites_own_variables_are_no_platforms() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not read_environment({"MULTIASSERT_TEST_PLATFORMS": "cpu,npu"}, []).any_on


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "1"}, "auto"),
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "true"}, "auto"),
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "0"}, "off"),
        ({"SGLANG_INVARIANT_CHECK": "off"}, "off"),
        ({"SGLANG_INVARIANT_CHECK": "warn"}, "warn"),
        ({"SGLANG_INVARIANT_CHECK": "strict"}, "raise"),
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "1", "SGLANG_INVARIANT_CHECK": "off"}, "auto"),
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "1", "MULTIASSERT": "off"}, "off"),
    ],
)
def test_sglangs_names(environment: dict[str, str], mode: str) -> None:
    assert read_environment(environment, []).of("cuda") is Mode(mode)


@pytest.mark.parametrize(
    ("environment", "name"),
    [({"SGLANG_ENABLE_ASYNC_ASSERT": "maybe"}, "SGLANG_ENABLE_ASYNC_ASSERT"),
     ({"SGLANG_INVARIANT_CHECK": "loud"}, "SGLANG_INVARIANT_CHECK")],
)  # fmt: skip
def test_a_bad_value_of_sglangs_names(environment: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*Good values"):
        read_environment(environment, [])


@pytest.mark.parametrize("retired", ["SGLANG_SPEC_NAN_DETECTION", "SGLANG_SPEC_OOB_DETECTION"])
def test_retired_names_still_work_and_warn_with_the_new_one(retired: str) -> None:
    with pytest.warns(FutureWarning, match=rf"{retired} is retired.*MULTIASSERT=auto"):
        assert read_environment({retired: "1"}, []).of("cuda") is Mode.AUTO


def test_the_retired_flag_still_works_and_warns() -> None:
    with pytest.warns(FutureWarning, match=r"--enable-nan-detection is retired.*MULTIASSERT=auto"):
        assert read_environment({}, ["--model", "m", "--enable-nan-detection"]).of("cuda") is Mode.AUTO


def test_all_retired_names_together_warn_once() -> None:
    with pytest.warns(FutureWarning) as caught:
        read_environment(
            {"SGLANG_SPEC_NAN_DETECTION": "1", "SGLANG_SPEC_OOB_DETECTION": "1"}, ["--enable-nan-detection"]
        )
    assert len(caught) == 1


def test_configure_sets_all_then_the_named_ones() -> None:
    multiassert.configure("raise", cuda="trap", npu="warn")
    current = settings.current
    assert [current.of(p) for p in ("cpu", "cuda", "npu")] == [Mode.RAISE, Mode.TRAP, Mode.WARN]
    multiassert.configure(npu="off")
    assert [settings.current.of(p) for p in ("cpu", "cuda", "npu")] == [Mode.RAISE, Mode.TRAP, Mode.OFF]
    multiassert.configure("warn")
    assert [settings.current.of(p) for p in ("cpu", "cuda", "npu")] == [Mode.WARN, Mode.WARN, Mode.WARN]
    multiassert.configure("off")
    assert not settings.active


def test_configure_takes_effect_at_the_next_probe() -> None:
    maybe_detect_nan(NAN)
    multiassert.configure(cpu="auto")
    with pytest.raises(AsyncAssertionError):
        maybe_detect_nan(NAN)
    multiassert.configure(cpu="off", npu="warn")
    maybe_detect_nan(NAN)


@pytest.mark.parametrize("bad", ["loud", 7, None])
def test_configure_with_an_unknown_mode_changes_nothing(bad: object) -> None:
    multiassert.configure("warn")
    before = settings.current
    with pytest.raises(ValueError, match="npu=.*Good values"):
        multiassert.configure("raise", npu=bad)  # type: ignore[arg-type]
    assert settings.current is before


@pytest.mark.parametrize("name", ["npu", "musa", "mps", "hpu"])
def test_trap_is_refused_where_it_would_be_silent_or_would_wait(name: str) -> None:
    with pytest.raises(ValueError, match=rf"mode trap is refused on {name}.*Use raise"):
        multiassert.configure(**{name: "trap"})


def test_override_nests_and_restores_also_when_the_body_raises() -> None:
    with multiassert.override("warn", npu="raise"):
        outer = settings.current
        with pytest.raises(KeyError), multiassert.override(cpu="auto"):
            assert settings.current.of("cpu") is Mode.AUTO
            assert settings.current.of("npu") is Mode.RAISE
            raise KeyError
        assert settings.current is outer
        multiassert.configure("off")
    assert not settings.active


def test_override_with_a_bad_mode_leaves_all_as_it_was() -> None:
    before = settings.current
    with pytest.raises(ValueError, match="Good values"), multiassert.override("loud"):
        raise NotImplementedError
    assert settings.current is before


def test_override_as_a_decorator_works_call_by_call() -> None:
    @multiassert.override("auto")
    def probe() -> None:
        maybe_detect_nan(NAN)

    for _ in range(2):
        with pytest.raises(AsyncAssertionError):
            probe()
        maybe_detect_nan(NAN)


def test_the_environment_is_read_at_import(run_child: ChildRun) -> None:
    code = "import torch, multiassert; multiassert.maybe_detect_nan(torch.tensor(float('nan')), 'from the environment')"
    assert run_child(code).returncode == 0
    run = run_child(code, MULTIASSERT_CPU="auto")
    assert run.returncode == 1
    assert "AsyncAssertionError: NaN detected! from the environment" in run.stderr


def test_a_bad_environment_fails_at_import_in_one_clear_line(run_child: ChildRun) -> None:
    run = run_child("import multiassert", MULTIASSERT="loud")
    assert run.returncode == 1
    assert "MULTIASSERT='loud' is no mode of multiassert. Good values: off (0, false)" in run.stderr.splitlines()[-1]


def test_trap_from_the_environment_is_refused_at_import(run_child: ChildRun) -> None:
    run = run_child("import multiassert", MULTIASSERT_NPU="trap")
    assert run.returncode == 1
    assert "MULTIASSERT_NPU: mode trap is refused on npu" in run.stderr.splitlines()[-1]


def test_the_import_needs_torch_and_the_standard_library_only(run_child: ChildRun) -> None:
    run = run_child(
        """
        import sys, torch
        before = set(sys.modules)
        import multiassert
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(sorted(new - {"multiassert"} - set(sys.stdlib_module_names)))
        """
    )
    assert run.stdout == "[]\n", run.stdout + run.stderr


def test_a_route_that_is_being_found_does_not_outlive_a_change_of_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the probes of that device would stay off, in silence."""
    threads = [threading.Thread(target=multiassert.configure, args=("raise",))]

    class ChangedMeanwhile(dict[torch.device, dispatch.Route]):
        def __setitem__(self, device: torch.device, route: dispatch.Route) -> None:
            if not threads[0].ident:
                threads[0].start()
                threads[0].join(0.3)  # it has to wait until the route is kept, and then drops it
            super().__setitem__(device, route)

    monkeypatch.setattr(dispatch, "_routes", ChangedMeanwhile())
    with multiassert.override("off"):
        dispatch.route_of(torch.device("cpu"))
        threads[0].join()
        maybe_detect_nan(torch.tensor([float("nan")]), "after the change")
        with pytest.raises(AsyncAssertionError, match="after the change"):
            multiassert.drain()


def test_kernels_are_set_by_variable_and_at_run_time() -> None:
    assert read_environment({"MULTIASSERT_KERNELS": " Torch "}, []).kernels == "torch"
    assert read_environment({}, []).kernels == "auto"
    with multiassert.override("warn", kernels="torch"):
        assert settings.current.kernels == "torch"
        with multiassert.override("raise"):
            assert settings.current.kernels == "torch"
    assert settings.current.kernels == "auto"
    with pytest.raises(
        ValueError, match="MULTIASSERT_KERNELS='cuda' names no kernels. Good values: auto, triton, torch"
    ):
        read_environment({"MULTIASSERT_KERNELS": "cuda"}, [])
    with pytest.raises(ValueError, match="kernels='fast' names no kernels"):
        multiassert.configure(kernels="fast")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["-m", "multiassert", "ci"], 2),
        (["-um", "multiassert", "ci"], 2),
        (["-mmultiassert", "ci"], 2),
        (["-c", "import multiassert"], 1),
        (["-m", "importing"], 1),
    ],
)
def test_a_bad_value_is_a_line_on_our_command_line_and_an_error_elsewhere(
    command: list[str], code: int, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "importing").mkdir()
    (tmp_path / "importing" / "__init__.py").write_text("import multiassert")
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(multiassert.__file__).parent.parent)])
    environment = {**os.environ, "MULTIASSERT": "bogus", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == code
    assert "MULTIASSERT='bogus' is no mode of multiassert. Good values: off" in run.stderr.splitlines()[-1]
    assert (len(run.stderr.splitlines()) == 1) is (code == 2)

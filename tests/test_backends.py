"""What is claimed of each platform, and that dispatch looks at the tensor's device type alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
from typing import Any

import pytest
import torch

import multiassert
from conftest import ChildRun
from multiassert import backends, dispatch
from multiassert.backends import Backend, Mechanism, NativeAssert
from multiassert.backends.rocm import native_assert

DEVICE_TYPES = ("cpu", "cuda", "npu", "musa", "xpu", "mps", "hpu")


@pytest.mark.parametrize(
    ("name", "native", "auto"),
    [
        ("cpu", NativeAssert.RAISES, Mechanism.IMMEDIATE),
        ("cuda", NativeAssert.FIRES, Mechanism.NATIVE),
        ("npu", NativeAssert.MISSING, Mechanism.DEFERRED),
        ("musa", NativeAssert.WAITS, Mechanism.DEFERRED),
        ("xpu", NativeAssert.ABORTS, Mechanism.DEFERRED),
        ("hpu", NativeAssert.UNKNOWN, Mechanism.DEFERRED),
    ],
)
def test_what_auto_chooses(name: str, native: NativeAssert, auto: Mechanism) -> None:
    backend = backends.named(name)
    assert (backend.name, backend.native, backend.auto()) == (name, native, auto)
    assert backend.native_facts in backend.why()
    assert f"auto is {auto.value}" in backend.why()


@pytest.mark.parametrize(
    ("version", "configuration", "native", "trap"),
    [
        ("2.6.0", "USE_ROCM=ON, USE_ROCM_KERNEL_ASSERT=OFF", NativeAssert.COMPILED_OUT, False),
        ("2.7.1+rocm6.3", "USE_ROCM=ON", NativeAssert.COMPILED_OUT, False),
        ("2.7.1+rocm6.3", "USE_ROCM_KERNEL_ASSERT=ON", NativeAssert.FIRES, True),
        ("2.8.0+rocm6.4", "USE_ROCM=ON, USE_ROCM_KERNEL_ASSERT=OFF", NativeAssert.ABORTS, True),
        ("2.13.0", "USE_ROCM_KERNEL_ASSERT=1, BLAS=x", NativeAssert.FIRES, True),
        ("2.13.0", "USE_ROCM_KERNEL_ASSERT=10", NativeAssert.ABORTS, True),
        ("built by hand", "", NativeAssert.UNKNOWN, False),
    ],
)
def test_rocm_is_decided_by_the_build(
    version: str, configuration: str, native: NativeAssert, trap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_assert(version, configuration) is native
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.__config__, "show", lambda: configuration)
    backend = backends.RocmBackend()
    assert backend.auto() is (Mechanism.NATIVE if native is NativeAssert.FIRES else Mechanism.DEFERRED)
    assert (backend.trap_refusal() is None) is trap


@pytest.mark.parametrize(("version", "native"), [("2.13.0", NativeAssert.MISSING), ("2.14.1", NativeAssert.UNKNOWN)])
def test_mps_is_decided_by_the_version(version: str, native: NativeAssert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    backend = backends.MpsBackend()
    assert (backend.native, backend.auto()) == (native, Mechanism.DEFERRED)
    assert backend.trap_refusal() is not None


def test_rocm_tensors_say_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.for_device_type("cuda").name == "cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backends.for_device_type("cuda").name == "rocm"
    assert backends.for_device_type("cpu").name == "cpu"


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_only_the_device_type_decides(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vendor's shim loaded, everything else says "cuda"."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.for_device_type(device_type).name == device_type
    with multiassert.override("auto"), pytest.raises(multiassert.AsyncAssertionError):
        multiassert.maybe_detect_nan(torch.tensor([float("nan")]))


@pytest.mark.parametrize(
    ("device_type", "mode", "mechanism", "raises"),
    [
        ("cuda", "auto", Mechanism.NATIVE, True),
        ("cuda", "raise", Mechanism.DEFERRED, True),
        ("cuda", "warn", Mechanism.DEFERRED, False),
        ("cuda", "trap", Mechanism.NATIVE, True),
        ("xpu", "trap", Mechanism.NATIVE, True),
        ("hpu", "auto", Mechanism.DEFERRED, True),
        ("hpu", "off", None, False),
        ("meta", "auto", None, False),
    ],
)
def test_the_route_of_a_device(device_type: str, mode: str, mechanism: Mechanism | None, raises: bool) -> None:
    with multiassert.override(mode):
        route = dispatch.route_of(torch.device(device_type, 0))
    assert (route.mechanism, route.raises) == (mechanism, raises)


def test_a_route_found_while_the_modes_change_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    find, cpu = dispatch._find_route, torch.device("cpu")

    def find_slowly(*arguments: Any) -> dispatch.Route:
        route = find(*arguments)
        multiassert.configure("warn")  # as another thread may
        return route

    with multiassert.override("off"):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_find_route", find_slowly)
            assert dispatch.route_of(cpu).mechanism is None
        assert dispatch.route_of(cpu).mechanism is Mechanism.DEFERRED


def test_prewarm_beside_a_native_assert_allocates_for_maybe_warn_nan() -> None:
    with multiassert.override("trap"):
        multiassert.prewarm("cpu")
        (state,) = multiassert.state.all_states()
        assert len(state._pages) == 2


def test_trap_for_all_is_refused_at_the_probe_of_a_platform_that_has_none() -> None:
    with multiassert.override("trap"), pytest.raises(ValueError, match="configure: mode trap is refused on hpu"):
        dispatch.route_of(torch.device("hpu", 0))


def test_the_package_has_one_name_only() -> None:
    folder = pathlib.Path(multiassert.__file__).parent / "backends"
    spec = importlib.util.spec_from_file_location("backends", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"multiassert\.backends"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_third_partys_backend_is_taken_from_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cards(Backend):
        name = "cards"
        native = NativeAssert.FIRES

    class EntryPoint:
        value = "cards.multiassert:Cards"

        def load(self) -> object:
            return Cards

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [EntryPoint()] if (group, name) == ("multiassert.backends", "cards") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert backends.named("cards").auto() is Mechanism.NATIVE
    monkeypatch.setattr(EntryPoint, "load", lambda self: object())
    backends.named.cache_clear()
    with pytest.raises(TypeError, match="must be a subclass"):
        backends.named("cards")
    backends.named.cache_clear()


def test_no_vendor_package_is_imported(run_child: ChildRun) -> None:
    run = run_child(
        """
        import sys, importlib.abc

        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] in ("torch_npu", "torch_musa", "torchada", "intel_extension_for_pytorch"):
                    sys.exit(f"imported {name}")

        import torch
        sys.meta_path.insert(0, Refuse())
        import multiassert
        from multiassert import backends
        for platform in ("cpu", "cuda", "rocm", "npu", "musa", "xpu", "mps", "hpu"):
            backends.named(platform).why()
        multiassert.maybe_detect_nan(torch.zeros(2))
        """,
        MULTIASSERT="raise",
    )
    assert run.returncode == 0, run.stderr


def test_mps_has_one_stream_without_a_name() -> None:
    """torch.mps has neither current_stream nor stream (torch 2.13, read), so the backend does without."""
    backend = backends.named("mps")
    assert backend.current_stream(torch.device("mps:0")) is None
    with backend.on_stream(None):
        pass

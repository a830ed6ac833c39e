"""A simulated npu or musa device on the CPU: real tensors of a real `torch.device`, for tests without the hardware.

    from multiassert import simulate
    device = simulate.install("npu")           # once in a process
    x = torch.zeros(4, device="npu")           # queued, runs later
    with device.no_sync():                     # a host wait raises here, at the line that would wait
        ...
    device.run_all()                           # time passes

Which operators run on the device, which fall back to the CPU, raise or wait, comes from the vendors' own lists in
`backends/operators`. What is not modelled: numerics, the dtypes a vendor lacks, its run-time errors, memory pools,
collectives, autocast's choice of dtypes, sparse tensors, graphs over several streams or with new random numbers at each
replay; convolutions only where the vendor lists `aten::convolution`. A pass says that the vendor's lists agree with us,
not that the vendor's hardware does.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.utils import backend_registration

from multiassert import backends
from multiassert.backends import NativeAssert
from multiassert.simulate import compiled, device_module
from multiassert.simulate.kernels import SimulatedOperators
from multiassert.simulate.timeline import DeviceFault, Graph, HiddenSync, HostWait, Ledger, Simulator

__all__ = [
    "DeviceFault",
    "Graph",
    "HiddenSync",
    "HostWait",
    "Ledger",
    "Simulator",
    "install",
    "installed",
]

DEVICES = 2

# A device of no vendor: it has every operator that the CPU has, and an assert that works as CUDA's does.
GENERIC = "generic"

_simulator: Simulator | None = None
_operators: SimulatedOperators | None = None


def installed() -> Simulator | None:
    """The simulated device of this process, if there is one."""
    return _simulator


def install(name: str, *, use_compiler: bool | None = None) -> Simulator:
    """Give this process a simulated device of that name: "npu", "musa", or "generic" with an assert that works.

    Torch has one slot for an out-of-tree device and gives it a name once, so a process simulates one vendor, and none
    where a real out-of-tree package is loaded. The compiled half is built where a compiler is found (some seconds, the
    first time) and otherwise missing, with a warning that says what is missing with it; `use_compiler=False` leaves it
    out, `True` insists on it. Returns the same object when called again.

    Raises ValueError for a name that cannot be simulated, RuntimeError where torch's slot is taken.
    """
    global _simulator, _operators
    backend = backends.named(name)
    if backend.operators is None and name != GENERIC:
        raise ValueError(f"cannot simulate {name!r}: good names are npu, musa and {GENERIC}")
    if _simulator is not None:
        if _simulator.name == name:
            return _simulator
        raise RuntimeError(f"this process simulates {_simulator.name} already, and can simulate one vendor only")
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(f"torch's slot for an out-of-tree device is taken in this process, by {taken}")
    simulator = Simulator(name)
    guard = None if use_compiler is False else compiled.load()
    if guard is None and use_compiler is not False:
        if use_compiler:
            raise RuntimeError(f"no C++ compiler was found. {compiled.WITHOUT_IT}")
        warnings.warn(f"no C++ compiler was found. {compiled.WITHOUT_IT}", stacklevel=2)
    graph_class = "CUDAGraph" if backend.operators is None else backend.operators.graph_class
    simulator.device_count = DEVICES if guard is not None else 1
    module = device_module.make(simulator, guard, graph_class)
    native_assert = NativeAssert.FIRES if backend.operators is None else backend.native
    _operators = SimulatedOperators(simulator, backend.operators, native_assert)
    if guard is not None:
        backend_registration.rename_privateuse1_backend(name)
        guard.install(simulator, DEVICES)
        simulator.current_device = guard.current_device
        backend_registration.generate_methods_for_privateuse1_backend()
        torch._register_device_module(name, module)
    else:
        backend_registration._setup_privateuseone_for_python_backend(name, backend_module=module)
        pinned = device_module.OwnPinnedMemory()
        _operators.implement_on_cpu("is_pinned", pinned.is_pinned)
        _operators.implement_on_cpu("_pin_memory", pinned.pin)
        _operators.implement_on_cpu("empty.memory_format", pinned.empty)
    sys.modules[f"torch.{name}"] = module
    _operators.register()
    simulator.compiled_half = guard is not None
    _simulator = simulator
    return simulator

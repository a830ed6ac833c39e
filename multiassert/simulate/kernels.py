"""The simulated device's operators: what the dispatcher calls for a tensor of it.

An operator that the vendor has infers its result with torch's own meta kernel, allocates it, and queues the work; the
CPU kernel runs on host views of the memory when the queue gets there. So shape errors are raised at once and index
errors late, as on hardware. Operators that the vendor lacks follow the vendor's policy.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations  # kernels for the meta device, which infer results
from torch import Tensor

from multiassert.backends import NativeAssert
from multiassert.backends.vendor import VendorOperators
from multiassert.simulate.memory import allocate, host_view
from multiassert.simulate.timeline import Simulator

aten = torch.ops.aten
META, HOST = torch.device("meta"), torch.device("cpu")
CPU_KEY = torch._C.DispatchKey.CPU

VIEWS = ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex")
# Torch's own composites stay in charge of these: they end in the operators of this file.
LEFT_TO_TORCH = {
    f"aten::{name}"
    for name in [
        "copy_",
        "_to_copy",
        "is_pinned",
        "_pin_memory",
        "contiguous",
        "detach",
        "_copy_from_and_resize",
        "clone",
        "empty_like",
        "lift_fresh",
        "resize_as_",
    ]
}
# Composites in torch, of which a vendor has a kernel, and which autograd does not need to see through.
WITHOUT_GRADIENT = {"aten::isfinite", "aten::isclose"}
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::_index_put_impl_")
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OnHost:
    """A scope for plain CPU work: below autograd and inference mode, outside of Python dispatch and function modes."""

    KINDS = (
        torch._C._AutoDispatchBelowADInplaceOrView,
        torch._C._DisableTorchDispatch,
        torch._C.DisableTorchFunction,
    )

    def __enter__(self) -> None:
        self._scopes: list[Any] = []
        for kind in self.KINDS:
            scope = kind()  # some of torch's scopes begin here and not where they are entered
            scope.__enter__()
            self._scopes.append(scope)

    def __exit__(self, *error: object) -> None:
        for scope in reversed(self._scopes):
            scope.__exit__(*error)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with its tensors and devices changed; generators are dropped, a kernel has its seed (`_seeded`)."""
    if isinstance(value, (Tensor, torch.device)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    return None if isinstance(value, torch.Generator) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class Layout:
    """What is known of a result before it is computed."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype


def on_host(value: Any) -> Any:
    """A tensor as the CPU sees it: device memory as a view with the shape that the tensor has now."""
    if isinstance(value, torch.device):
        return HOST
    return value if value.device.type == "cpu" else host_view(value)


def _by_value(value: Any) -> Any:
    """The same, with a host tensor's contents of now: a kernel takes host scalars by value, when it is called."""
    return value.clone() if isinstance(value, Tensor) and value.device.type == "cpu" else on_host(value)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """A scope in which the CPU's random numbers come from a seed; they go on as before after it."""
    if seed is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def write(destination: Tensor, source: Tensor) -> None:
    """Copy a CPU tensor into the CPU's view of device memory."""
    with OnHost():
        destination.copy_(source)


# The layouts of an operator's results and the written arguments that change shape; None without a meta kernel.
Inferred = tuple[list[Any], dict[int, Any]] | None


class Operator:
    """One overload: what its schema says, and how a call of it is put on the device."""

    def __init__(self, device: SimulatedOperators, overload: torch._ops.OpOverload) -> None:
        schema = overload._schema
        self.device = device
        self.overload = overload
        self.name = str(overload.name())
        self.takes_device = any(argument.name == "device" for argument in schema.arguments)
        self.tensor_positions = {
            i for i, argument in enumerate(schema.arguments) if str(argument.type) in ("Tensor", "Optional[Tensor]")
        }
        aliases: list[tuple[int, str, Any]] = [
            (i, a.name, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None
        ]
        self.written = [(i, name) for i, name, alias in aliases if alias.is_write]
        self.is_view = False
        # For each result, the argument that it is, or None where it is new.
        self.results: list[tuple[int, str] | None] = []
        for result in schema.returns:
            source = None
            owners = result.alias_info.before_set if result.alias_info is not None else set()
            for i, name, alias in aliases:
                if alias.before_set & owners:
                    source = i, name
                    self.is_view |= not alias.is_write
            self.results.append(source)
        self.indexes = self.name.startswith(INDEXING)
        self.data_dependent = bool(DATA_DEPENDENT & set(overload.tags)) and not self.indexes
        self.random = torch.Tag.nondeterministic_seeded in overload.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Queue the work; the results exist now, what is in them appears when the queue gets there."""
        simulator = self.device.simulator
        arguments = self._with_numbers_as_tensors(list(args))
        index = self._device_index(arguments, kwargs)
        waits = self.device.waiting(self.name, tuple(arguments), kwargs)
        for _ in range(waits):
            simulator.wait_for_stream("in the kernel", self.name, index)
        by_mask = self.indexes and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in arguments[1])
        if self.data_dependent or by_mask:
            if not waits:
                simulator.wait_for_stream("data dependent", self.name, index)
            return self.run_now(arguments, kwargs, index)
        inferred = self._infer(arguments, kwargs)
        if inferred is None:  # a limit of the simulation, not a host wait
            if simulator.capture is not None:
                raise NotImplementedError(
                    f"torch has no meta kernel for {self.name}, so the simulator cannot capture it"
                )
            self.device.without_meta_kernel.add(self.name)
            with simulator.lock:
                simulator.queue(index, simulator.current_stream(index)).run_all()
            return self.run_now(arguments, kwargs, index)
        layouts, resized = inferred
        for position, (name, shape, stride) in resized.items():
            resize(simulator, _argument((position, name), arguments, kwargs), shape, stride)
        results = [
            _argument(source, arguments, kwargs) if source else _allocate(layout, index)
            for layout, source in zip(layouts, self.results, strict=True)
        ]
        with OnHost():
            # As a launched kernel has it: addresses and shapes of now, whatever becomes of the tensors until it runs.
            launched = map_leaves(_by_value, arguments), map_leaves(_by_value, kwargs)
            destinations = [
                [] if source else [host_view(tensor) for tensor in tensors_in(result)]
                for result, source in zip(results, self.results, strict=True)
            ]
        seed = self._draw_seed(arguments, kwargs)

        def run() -> None:
            computed = self._compute(*launched, seed)
            for tensors, value, source in zip(destinations, self._as_list(computed), self.results, strict=True):
                if source is None:
                    for destination, content in zip(tensors, tensors_in(value), strict=True):
                        # Of some results that nobody needs, one of CPU kernel and meta kernel makes nothing.
                        if content.numel() and destination.numel():
                            write(destination, content)

        simulator.submit(run, self.name, index)
        return _unpack(results)

    def run_now(self, args: list[Any], kwargs: dict[str, Any], index: int) -> Any:
        """Compute at once, for what has to know the data."""
        self.device.simulator.raise_fault()
        self.device.simulator.kernels.append(self.name)
        seed = self._draw_seed(args, kwargs)
        with OnHost():
            computed = self._compute(map_leaves(on_host, args), map_leaves(on_host, kwargs), seed)
        results = [
            _argument(source, args, kwargs) if source else map_leaves(lambda t: _upload(t, index), value)
            for value, source in zip(self._as_list(computed), self.results, strict=True)
        ]
        return _unpack(results)

    def fall_back(self, *args: Any, **kwargs: Any) -> Any:
        """What torch_npu does with an operator that it has no kernel for: a copy to the CPU and back."""
        if os.environ.get("TORCH_NPU_FALLBACK_CPU_DISABLE") == "1":
            raise RuntimeError(
                f"The operator '{self.name}' has no kernel on {self.device.simulator.name}, and its fallback to the "
                "CPU is disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1."
            )
        if self.name not in self.device.warned:
            self.device.warned.add(self.name)
            warnings.warn(
                f"CAUTION: The operator '{self.name}' is not currently supported on the "
                f"{self.device.simulator.name.upper()} backend and will fall back to run on the CPU.",
                UserWarning,
                stacklevel=2,
            )
        simulator = self.device.simulator
        simulator.fallbacks.append(self.name)
        arguments = self._with_numbers_as_tensors(list(args))
        index = self._device_index(arguments, kwargs)
        simulator.wait_for_stream("cpu fallback", self.name, index)
        return self.run_now(arguments, kwargs, index)

    def _compute(self, args: list[Any], kwargs: dict[str, Any], seed: int | None) -> Any:
        """The CPU's result; the tensors among the arguments are on the CPU."""
        if self.takes_device:
            kwargs = {**kwargs, "device": HOST}
            kwargs.pop("pin_memory", None)
        with OnHost(), _seeded(seed):
            return self.overload(*args, **kwargs)

    def _draw_seed(self, args: list[Any], kwargs: dict[str, Any]) -> int | None:
        """A random kernel's seed, drawn when it is queued: what it gives does not depend on when it runs."""
        if not self.random:
            return None
        generators = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
        generator = next(generators, self.device.simulator.generator)
        on_cpu = torch.Generator()  # a device's generator draws on its device only, and its state is the CPU's
        on_cpu.set_state(generator.get_state())
        with OnHost():
            seed = int(torch.randint(2**62, (), generator=on_cpu, device=HOST))
        generator.set_state(on_cpu.get_state())
        return seed

    def _as_list(self, computed: Any) -> list[Any]:
        if len(self.results) == 1:
            return [computed]
        return list(computed or ())

    def _with_numbers_as_tensors(self, args: list[Any]) -> list[Any]:
        """A number that torch wrapped into a tensor reaches a Python kernel as a number: wrap it again."""
        for position in self.tensor_positions:
            if position < len(args) and isinstance(args[position], (bool, int, float, complex)):
                number = args[position]
                dtype = next((t.dtype for t in tensors_in(args)), torch.get_default_dtype())
                if isinstance(number, complex) and not dtype.is_complex:
                    dtype = torch.complex64
                elif isinstance(number, float) and not (dtype.is_floating_point or dtype.is_complex):
                    dtype = torch.get_default_dtype()
                elif isinstance(number, int) and not isinstance(number, bool) and dtype is torch.bool:
                    dtype = torch.int64
                with OnHost():
                    args[position] = torch.full((), number, dtype=dtype, device=HOST)
        return args

    def _device_index(self, args: list[Any], kwargs: dict[str, Any]) -> int:
        """The device of a call; host tensors may only ride along as scalars, and as indices where torch allows it."""
        simulator = self.device.simulator
        index: int | None = None
        stranger: Tensor | None = None
        for tensor in tensors_in([args, kwargs]):
            if tensor.device.type != simulator.name:
                stranger = tensor if tensor.dim() else stranger
            elif index is None:
                index = tensor.device.index
            elif tensor.device.index != index and tensor.dim():
                stranger = tensor
        if index is None:
            return self.device.index_of(kwargs.get("device"))
        if stranger is not None:
            if not (self.indexes and any(stranger is tensor for tensor in args[1])):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, "
                    f"{simulator.name}:{index} and {stranger.device}! ({self.name})"
                )
            simulator.note_wait("copy to device", f"{self.name}: an index tensor on the host")
        return index

    def _infer(self, args: list[Any], kwargs: dict[str, Any]) -> Inferred:
        """What a call leads to, by torch's meta kernel."""
        key: Any = None
        try:
            key = self.name, _signature(args), _signature(kwargs), torch.get_default_dtype()
            if key in self.device.inferred:
                known: Inferred = self.device.inferred[key]
                return known
        except TypeError:
            key = None
        with OnHost():
            meta_args, meta_kwargs = map_leaves(_on_meta, args), map_leaves(_on_meta, kwargs)
            if self.takes_device:
                meta_kwargs["device"] = META
            meta_kwargs.pop("pin_memory", None)
            try:
                computed = self.overload(*meta_args, **meta_kwargs)
            except NotImplementedError:
                inferred = None
            else:
                layouts = [
                    map_leaves(Layout, value) if source is None else None
                    for value, source in zip(self._as_list(computed), self.results, strict=True)
                ]
                resized = {}
                for position, name in self.written:
                    before = _argument((position, name), args, kwargs)
                    after = _argument((position, name), meta_args, meta_kwargs)
                    if isinstance(before, Tensor) and before.shape != after.shape:
                        resized[position] = name, tuple(after.shape), after.stride()
                inferred = layouts, resized
        if key is not None:
            self.device.inferred[key] = inferred
        return inferred


def _argument(source: tuple[int, str], args: list[Any], kwargs: dict[str, Any]) -> Any:
    position, name = source
    return args[position] if position < len(args) else kwargs.get(name)


def _unpack(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results) if results else None


def _allocate(layout: Any, index: int) -> Any:
    if isinstance(layout, Layout):
        return allocate(layout.shape, layout.stride, layout.dtype, index)
    return type(layout)([_allocate(item, index) for item in layout]) if isinstance(layout, (list, tuple)) else layout


def _upload(value: Any, index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensor = allocate(tuple(value.shape), value.stride(), value.dtype, index)
    write(on_host(tensor), value)
    return tensor


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def _signature(value: Any) -> Any:
    """A hashable stand-in for arguments that lead to the same layouts."""
    if isinstance(value, Tensor):
        return value.device.type, value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def resize(simulator: Simulator, tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Give a device tensor another shape; in memory of its own where it takes more, which its views do not follow."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    there = storage.nbytes() // tensor.element_size() - offset
    if span <= there:
        _set(tensor, storage, offset, shape, stride)
        return
    grown = allocate(tuple(shape), tuple(stride), tensor.dtype, tensor.device.index)
    kept = min(there, grown.numel())
    if kept:
        with OnHost():
            before, after = tensor.as_strided((kept,), (1,), offset), grown.as_strided((kept,), (1,))
            read, written = on_host(before), on_host(after)
        simulator.submit(lambda: write(written, read), "aten::copy_", tensor.device.index)
    _set(tensor, grown.untyped_storage(), 0, shape, stride)


def _set(tensor: Tensor, storage: Any, offset: int, shape: Any, stride: Any = ()) -> Any:
    set_on_cpu = aten.set_.source_Storage_storage_offset._op_dk
    return set_on_cpu(CPU_KEY, tensor, storage, offset, list(shape), list(stride))


class SimulatedOperators:
    """All operators of the simulated device, and the registration that puts them into torch's dispatcher."""

    def __init__(self, simulator: Simulator, vendor: VendorOperators | None, native_assert: NativeAssert) -> None:
        self.simulator = simulator
        self.vendor = vendor
        self.native_assert = native_assert
        self.inferred: dict[Any, Any] = {}
        self.warned: set[str] = set()
        self.without_meta_kernel: set[str] = set()
        self._operators: dict[Any, Operator] = {}
        self._libraries = [torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")]

    def waiting(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        waits = self.vendor.waiting.get(name) if self.vendor is not None else None
        return 0 if waits is None else waits(args, kwargs)

    def operator(self, overload: torch._ops.OpOverload) -> Operator:
        operator = self._operators.get(overload)
        if operator is None:
            operator = self._operators[overload] = Operator(self, overload)
        return operator

    def register(self) -> None:
        """Register everything; once in a process."""
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        special = self._special_operators()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where a Python kernel replaces one of its own
            for name, kernel in special.items():
                self._implement(name, kernel)
            for name in self._native_names():
                if name in special or name in LEFT_TO_TORCH or name.startswith("aten::_assert_async"):
                    continue
                overload = _overload(name)
                if overload is None:
                    continue  # the vendor's torch has it, this one has not
                if torch.Tag.inplace_view in overload.tags:
                    continue  # no work: it changes the tensor itself, which torch does
                if has_kernel(name, "CompositeImplicitAutograd") and name not in WITHOUT_GRADIENT:
                    continue  # torch's decomposition, so that autograd sees through it
                operator = self.operator(overload)
                if not operator.is_view:
                    self._implement(name, operator)
                elif has_kernel(name, "CPU"):
                    self._implement(name, _view(overload))
            for key in ("Conjugate", "Negative"):  # the copy sees to these bits itself, see host_view
                self._libraries[0].impl("_copy_from", torch.library.fallthrough_kernel, key)
            fallbacks = self._libraries[1]
            fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
            if self.vendor is not None and self.vendor.falls_back_to_cpu:

                def fall_back(overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
                    return self.operator(overload).fall_back(*args, **kwargs)

                fallbacks.fallback(fall_back, "PrivateUse1")

    def implement_on_cpu(self, name: str, kernel: Callable[..., Any]) -> None:
        """Replace a kernel of the CPU's, for what the compiled half would do."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._libraries[0].impl(name, kernel, "CPU")

    def _implement(self, name: str, kernel: Callable[..., Any]) -> None:
        self._libraries[0].impl(name.removeprefix("aten::"), kernel, "PrivateUse1")

    def _native_names(self) -> Iterator[str]:
        if self.vendor is not None:
            yield from sorted(self.vendor.native())
            return
        for name in torch._C._dispatch_get_all_op_names():  # a device of no vendor has whatever the CPU has
            if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                yield name

    def _special_operators(self) -> dict[str, Callable[..., Any]]:
        special: dict[str, Callable[..., Any]] = {
            "aten::empty.memory_format": self._empty,
            "aten::empty_strided": self._empty_strided,
            "aten::resize_": self._resize,
            "aten::set_.source_Storage_storage_offset": _set,
            "aten::set_.source_Storage": lambda tensor, storage: _set(
                tensor, storage, 0, (storage.nbytes() // tensor.element_size(),), (1,)
            ),
            "aten::set_.source_Tensor": lambda tensor, source: _set(
                tensor, source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
            ),
            "aten::set_": self._set_to_nothing,
            "aten::_copy_from": self._copy,
            "aten::_local_scalar_dense": self._item,
            "aten::equal": self._equal,
            "aten::record_stream": lambda tensor, stream: None,
            **{f"aten::{name}": _view(getattr(aten, name).default) for name in VIEWS},
        }
        asserts = {NativeAssert.WAITS: self._assert_by_reading, NativeAssert.FIRES: self._assert_on_device}
        if self.native_assert in asserts:
            special["aten::_assert_async"] = special["aten::_assert_async.msg"] = asserts[self.native_assert]
        return special

    # The operators that are no kernels.

    def _empty(
        self,
        size: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: torch.device | None = None,
        pin_memory: object = None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        like = torch.empty(
            size,
            dtype=dtype or torch.get_default_dtype(),
            device=META,
            memory_format=memory_format or torch.contiguous_format,
        )
        return allocate(tuple(like.shape), like.stride(), like.dtype, self.index_of(device))

    def _empty_strided(
        self,
        size: Any,
        stride: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: torch.device | None = None,
        pin_memory: object = None,
    ) -> Tensor:
        return allocate(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), self.index_of(device))

    def index_of(self, device: torch.device | None) -> int:
        return self.simulator.index_of(None if device is None else device.index)

    def _set_to_nothing(self, tensor: Tensor) -> Any:
        return _set(tensor, allocate((0,), (1,), tensor.dtype, tensor.device.index).untyped_storage(), 0, (0,))

    def _resize(self, tensor: Tensor, size: Any, memory_format: torch.memory_format | None = None) -> Tensor:
        like = torch.empty(size, device=META, memory_format=memory_format or torch.contiguous_format)
        resize(self.simulator, tensor, tuple(like.shape), like.stride())
        return tensor

    def _copy(self, source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
        with OnHost():
            read, written = on_host(source).expand(destination.shape), on_host(destination).detach()
        if destination.device.type == "cpu":
            self._copy_to_host(read, written, source.device.index, non_blocking)
        elif source.device.type == "cpu":
            pinned = non_blocking and source.is_pinned()
            self._copy_to_device(read, written, destination.device.index, non_blocking, pinned)
        else:
            self._copy_on_device(read, written, source.device.index, destination.device.index)
        return destination

    # The copies, between CPU views.

    def _copy_on_device(self, read: Tensor, written: Tensor, start: int, end: int) -> None:
        simulator = self.simulator
        # Between two devices, the current streams of both meet before the copy and after it.
        before = None
        if start != end:
            before = simulator.queue(start, simulator.current_stream(start)), simulator.submit(None, "barrier", start)
        work = simulator.submit(lambda: write(written, read), "aten::copy_", end, after=before)
        if start != end:
            arrived = simulator.queue(end, simulator.current_stream(end)), work
            simulator.submit(None, "barrier", start, after=arrived)

    def _copy_to_host(self, read: Tensor, written: Tensor, index: int, non_blocking: bool) -> None:
        self.simulator.submit(lambda: write(written, read), "copy to host", index)
        # The vendors stage a strided destination in unpinned memory, and unpinned memory waits (on musa, or races).
        if not (non_blocking and written.is_contiguous() and written.is_pinned()):
            why = ", although non_blocking: the destination is not contiguous pinned memory" if non_blocking else ""
            self.simulator.wait_for_stream("copy to host", f"a copy from device to host{why}", index)

    def _copy_to_device(self, read: Tensor, written: Tensor, index: int, non_blocking: bool, pinned: bool) -> None:
        with OnHost():
            content = read if pinned else read.clone()
        self.simulator.submit(lambda: write(written, content), "copy to device", index)
        if not non_blocking or (not pinned and self.vendor is not None and self.vendor.unpinned_upload_waits):
            why = ", although non_blocking: the source is not pinned" if non_blocking else ""
            self.simulator.wait_for_stream("copy to device", f"a copy from host to device{why}", index)

    def _item(self, tensor: Tensor) -> Any:
        self.simulator.wait_for_stream("item", "a value read by the host", tensor.device.index)
        with OnHost():
            return host_view(tensor).item()

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        if one.device != other.device:
            raise RuntimeError(f"Cannot compare two tensors on different devices. Got: {one.device} and {other.device}")
        self.simulator.wait_for_stream("item", "aten::equal, read by the host", one.device.index)
        with OnHost():
            return torch.equal(host_view(one), host_view(other))

    # The assert, as the vendors have it.

    def _assert_by_reading(self, condition: Tensor, message: str = "") -> None:
        """As torch_musa 2.7.1: the host reads the value and raises on the spot."""
        _require_one_element(condition)
        if not bool(aten._local_scalar_dense(condition)):
            raise RuntimeError(message or "Expected Tensor with single nonzero value, but got zero")

    def _assert_on_device(self, condition: Tensor, message: str = "") -> None:
        """As CUDA: checked on the device; surfaces at a later wait, and stays."""
        _require_one_element(condition)
        with OnHost():
            read = host_view(condition)

        def run() -> None:
            with OnHost():
                holds = bool(read)
            if not holds:
                raise RuntimeError(f"device-side assert triggered: {message}")

        self.simulator.submit(run, "aten::_assert_async.msg", condition.device.index)


def _require_one_element(condition: Tensor) -> None:
    if condition.numel() != 1:
        count = "no values" if condition.numel() == 0 else "more than one value"
        raise RuntimeError(f"Boolean value of Tensor with {count} is ambiguous")


def _view(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    on_cpu = overload._op_dk
    return lambda *args, **kwargs: on_cpu(CPU_KEY, *args, **kwargs)


def _overload(name: str) -> torch._ops.OpOverload | None:
    packet_name, _, overload_name = name.removeprefix("aten::").partition(".")
    packet = getattr(aten, packet_name, None)
    overload: torch._ops.OpOverload | None = getattr(packet, overload_name or "default", None)
    return overload

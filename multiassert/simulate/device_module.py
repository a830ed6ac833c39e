"""The module that torch finds under the device's name, such as `torch.npu`: streams, events, graphs."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multiassert.simulate.timeline import Graph, Simulator


def make(simulator: Simulator, guard: Any | None, graph_class: str) -> types.ModuleType:
    """The device module, over the compiled half (`guard`) or without it."""
    name = simulator.name
    module = types.ModuleType(f"torch.{name}")
    streams = _torch_streams(name, guard) if guard is not None else _own_streams(simulator)
    current_device: Callable[[], int] = guard.current_device if guard is not None else lambda: 0
    set_device: Callable[[int], object] = guard.set_device if guard is not None else lambda index: None

    def index_of(device: Any) -> int:
        is_number = device is None or isinstance(device, int)
        return simulator.index_of(device if is_number else torch.device(device).index)

    @contextlib.contextmanager
    def device_scope(device: Any) -> Iterator[None]:
        before = current_device()
        set_device(index_of(device))
        try:
            yield
        finally:
            set_device(before)

    @contextlib.contextmanager
    def stream_scope(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with device_scope(stream.device_index):
            before = simulator.exchange_stream(stream.device_index, stream.stream_id)
            try:
                yield
            finally:
                simulator.exchange_stream(stream.device_index, before)

    @contextlib.contextmanager
    def graph_scope(graph: Graph, pool: object = None, stream: Any = None, **ignored: object) -> Iterator[None]:
        simulator.wait_for_device("the beginning of a capture")  # as the vendors' own graph() does
        with stream_scope(streams["Stream"]() if stream is None else stream):
            graph.capture_begin()
            try:
                yield
            finally:
                graph.capture_end()

    def is_capturing() -> bool:
        index = current_device()
        queue = simulator.queue(index, simulator.current_stream(index))
        return simulator.capture is not None and simulator.capture.queue is queue

    def default_stream(device: Any = None) -> Any:
        return streams["of"](0, index_of(device))

    def current_stream(device: Any = None) -> Any:
        index = index_of(device)
        return streams["of"](simulator.current_stream(index), index)

    def set_sync_debug_mode(mode: int | str) -> None:
        simulator.forbid_waits(mode in (2, "error"))

    module.__dict__.update(
        Stream=streams["Stream"],
        Event=streams["Event"],
        stream=stream_scope,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=lambda stream: simulator.exchange_stream(stream.device_index, stream.stream_id),
        synchronize=lambda device=None: simulator.wait_for_device("synchronize"),
        graph=graph_scope,
        is_current_stream_capturing=is_capturing,
        set_sync_debug_mode=set_sync_debug_mode,
        device=device_scope,
        device_count=lambda: simulator.device_count,
        current_device=current_device,
        set_device=lambda device: set_device(index_of(device)),
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        manual_seed=simulator.generator.manual_seed,
        manual_seed_all=simulator.generator.manual_seed,
        get_rng_state=lambda device=None: simulator.generator.get_state(),
        set_rng_state=lambda state, device=None: simulator.generator.set_state(state),
        get_device_name=lambda device=None: f"simulated {name}",
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        empty_cache=lambda: None,
    )
    setattr(module, graph_class, lambda *args, **kwargs: Graph(simulator))
    return module


def _torch_streams(name: str, guard: Any) -> dict[str, Any]:
    """Streams and events that are torch's own, answered by the simulator through the compiled half."""
    device_type = int(torch._C._autograd.DeviceType.PrivateUse1.value)

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Any:
            if ids:
                return super().__new__(cls, priority=priority, **ids)
            return super().__new__(cls, device=name if device is None else device, priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, device: Any = None) -> Any:
            return super().__new__(
                cls, device=name if device is None else device, enable_timing=enable_timing, blocking=blocking
            )

    def stream_of(stream_id: int, index: int) -> Any:
        return Stream(stream_id=stream_id, device_index=index, device_type=device_type)

    return {"Stream": Stream, "Event": Event, "of": stream_of}


def _own_streams(simulator: Simulator) -> dict[str, Any]:
    """Streams and events for a machine without a compiler: the same names, and torch's own know nothing of them."""

    class Stream:
        device_index = 0

        def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None) -> None:
            self.stream_id = simulator.new_stream(0) if stream_id is None else stream_id
            self.device = torch.device(simulator.name, 0)

        def query(self) -> bool:
            return simulator.stream_query(0, self.stream_id)

        def synchronize(self) -> None:
            simulator.stream_sync(0, self.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, device: Any = None) -> None:
            self._number = 0

        def _stream_id(self, stream: Any) -> int:
            stream_id: int = simulator.current_stream(0) if stream is None else stream.stream_id
            return stream_id

        def record(self, stream: Any = None) -> None:
            self._number = simulator.event_record(self._number, 0, self._stream_id(stream))

        def wait(self, stream: Any = None) -> None:
            if self._number:
                simulator.event_block(self._number, 0, self._stream_id(stream))

        def query(self) -> bool:
            return not self._number or simulator.event_query(self._number)

        def synchronize(self) -> None:
            if self._number:
                simulator.event_sync(self._number)

        def elapsed_time(self, end: Any) -> float:
            return 0.0

        def __del__(self) -> None:
            simulator.event_destroy(self._number)

    return {"Stream": Stream, "Event": Event, "of": lambda stream_id, index: Stream(stream_id=stream_id)}


class OwnPinnedMemory:
    """Pinned memory without the compiled half: the CPU's own kernels, and a list of the storages that are pinned."""

    def __init__(self) -> None:
        self._pinned: dict[int, StorageWeakRef] = {}

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        if tensor.device.type != "cpu":
            return False
        address = tensor.untyped_storage().data_ptr()
        storage = self._pinned.get(address)
        if storage is not None and storage.expired():
            del self._pinned[address]
            return False
        return storage is not None

    def pin(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        pinned.copy_(tensor)
        storage = pinned.untyped_storage()
        if storage.nbytes():
            self._pinned[storage.data_ptr()] = StorageWeakRef(storage)
        return pinned

    def empty(
        self,
        size: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: object = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        like = torch.empty(
            size,
            dtype=dtype or torch.get_default_dtype(),
            device="meta",
            memory_format=memory_format or torch.contiguous_format,
        )
        on_cpu = torch.ops.aten.empty_strided.default._op_dk
        key = torch._C.DispatchKey.CPU
        tensor = on_cpu(key, list(like.shape), list(like.stride()), dtype=like.dtype, device=torch.device("cpu"))
        return self.pin(tensor) if pin_memory else tensor

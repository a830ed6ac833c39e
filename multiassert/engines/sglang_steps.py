"""Steps in SGLang: each batch that its scheduler runs is one.

In overlap mode the results of a batch are looked at while the next one runs, so the launch (`run_batch`) is what tells
one batch's probes from another's. What a batch probes after it (a sampling that waits for a grammar) counts with the
next batch.

In that mode a batch runs on a stream of its own, and its captured graphs there update what they see. `run_batch` has
left that stream when it returns, so what was seen is sent with it current again: only then is the sending put between
the graphs of this batch and those of the next one.

An index that crashes the device takes the state on the device with it. So in each batch what was seen is sent on its
way at the first index probe of each kind, before the work that would crash, and not only at the end of the step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

import multiassert
from multiassert import delivery, dispatch, state
from multiassert.backends import Mechanism
from multiassert.engines import sglang_switches as switches

RUN_BATCH = "Scheduler.run_batch"
REQUESTS_NAMED = 8


logger = logging.getLogger(__name__)

T = TypeVar("T")
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


class _Batch:
    """The batch that the scheduler runs."""

    def __init__(self, scheduler: Any, batch: Any) -> None:
        self.tag = _told(_tag, scheduler, batch)
        self.row_names = _told(_row_names, scheduler, batch)
        self.sent: set[str] = set()


def _tag(scheduler: Any, batch: Any) -> str:
    requests = [str(request.rid) for request in batch.reqs]
    more = len(requests) - REQUESTS_NAMED
    named = " ".join(requests[:REQUESTS_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"batch {scheduler.forward_ct + 1}, {batch.forward_mode.name.lower()} of {named}"


def _row_names(scheduler: Any, batch: Any) -> tuple[object, ...] | None:
    """Only in plain decoding: the rows of a prefill are tokens, those of a draft its tokens, or other ranks'."""
    is_plain = batch.forward_mode.is_decode() and batch.spec_algorithm.is_none() and batch.global_num_tokens is None
    return tuple(request.rid for request in batch.reqs) if is_plain else None


def _stream_scope(scheduler: Any, batch: Any) -> Scope:
    """A scope in which the stream is current on which the scheduler's batches run."""
    streams = scheduler.device_module
    if scheduler.enable_overlap:
        return functools.partial(streams.stream, scheduler.forward_stream)
    if not hasattr(streams, "current_stream"):  # MPS has but one
        return contextlib.nullcontext
    return functools.partial(streams.stream, streams.current_stream())


_warned = False


def _told(what: Callable[[Any, Any], T], scheduler: Any, batch: Any) -> T | None:
    """What SGLang's objects tell; None where this SGLang's are others, which must not end its scheduler."""
    global _warned
    try:
        return what(scheduler, batch)
    except Exception as error:
        if not _warned:
            _warned = True
            logger.warning(
                "this SGLang's scheduler or batch is not as in 0.5.23 (%s): records lack the tag of the batch, the "
                "names of rows, or in overlap mode the order with the batch's stream",
                error,
            )
        return None


_running: _Batch | None = None
# Of the last batch: what probes see after it, or before the next one, is sent in it, too.
_on_stream_of_batches: Scope = contextlib.nullcontext


def around_run_batch(run_batch: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
    """Run a batch, then end a step with its requests as the names of its rows; a few small kernels, no host wait.

    In modes `raise` and `auto` a violation raises here, and SGLang's scheduler ends with it. So it does where the batch
    itself fails, of what the bad value did later, and the violation has arrived.
    """
    global _running, _on_stream_of_batches
    __tracebackhide__ = True
    if not state.all_states() and not switches.any_is_on():
        return run_batch(scheduler, *arguments, **named)
    batch = arguments[0] if arguments else named.get("batch")
    outer, running = _running, _Batch(scheduler, batch)  # one that holds an idle batch runs that inside
    _running = running
    _on_stream_of_batches = _told(_stream_scope, scheduler, batch) or contextlib.nullcontext
    try:
        result = run_batch(scheduler, *arguments, **named)
    except RuntimeError as failure:
        cause = None if isinstance(failure, multiassert.AsyncAssertionError) else delivery.look()
        if isinstance(cause, multiassert.AsyncAssertionError):
            raise cause from failure
        raise
    finally:
        _running = outer
    with _on_stream_of_batches():
        multiassert.step(running.tag, running.row_names)
    return result


def send_before_use(indices: Tensor, kind: str) -> RuntimeError | None:
    """Send what was seen before the work that a bad index would crash; returns the error to raise, and never waits.

    Once for each kind in a batch, and at each call outside of batches. On the CPU there is nothing to lose.
    """
    if is_compiling() or indices.device.type == "cpu":
        return None
    route = dispatch.route_of(indices.device, asked_for=True)
    if route.mechanism is not Mechanism.DEFERRED or route.backend.is_capturing(indices.device):
        return None
    if _running is None:
        with _on_stream_of_batches():
            return delivery.send()
    if kind in _running.sent:
        return None
    _running.sent.add(kind)
    with _on_stream_of_batches():
        return delivery.send(_running.tag, _running.row_names)

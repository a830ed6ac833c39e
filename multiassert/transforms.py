"""What a probe may meet besides a plain tensor: torch.func transforms, tracers, and tensors that wrap others.

A probe looks at data. Under a transform that is the data below all its layers; a tensor without data (meta, fake, being
exported) holds nothing to check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

# The innermost torch.func transform (vmap, grad, jvp, functionalize) that is running; None where there is none.
innermost = _functorch.peek_interpreter_stack


def below_transforms(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call with every tensor unwrapped, outside of all transforms.

    Under vmap that is the whole batch at once: rows are then those of the unwrapped tensor's dimension 0.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return call(*_unwrapped(arguments))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_unwrapped(item) for item in value)
    while isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def with_data(tensor: Tensor) -> Tensor | None:
    """The tensor that holds a wrapping tensor's data on this rank, or None where there is none.

    Of a DTensor that is the local shard, of a jagged nested tensor its values: rows are theirs. Other subclasses are
    probed as they are.
    """
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return None
    if tensor.is_nested:
        return tensor.values() if tensor.layout is torch.jagged else tensor
    if isinstance(tensor, _distributed_tensor_class()):
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
    return tensor


def _distributed_tensor_class() -> type | tuple[()]:
    """DTensor, where torch has been asked for it; nothing is imported for a tensor that cannot be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module.DTensor if module is not None else ()

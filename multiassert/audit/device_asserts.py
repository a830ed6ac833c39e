"""Calls of torch's own device assert, with and without a message."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.finding import Found
from multiassert.audit.module import Module, Scope
from multiassert.audit.suggestion import probe_for

WORDS = ("_assert_async",)
NAMES = ("torch._assert_async", "torch.ops.aten._assert_async")
WITHOUT_MESSAGE, WITH_MESSAGE = "torch.ops.aten._assert_async.default", "torch.ops.aten._assert_async.msg"


def without_message(module: Module) -> Iterator[Found]:
    """Calls that pass the condition only."""
    return _calls(module, with_message=False)


def with_message(module: Module) -> Iterator[Found]:
    """Calls that pass a message, or arguments that cannot be counted."""
    return _calls(module, with_message=True)


def _calls(module: Module, with_message: bool) -> Iterator[Found]:
    for scope in module.scopes:
        if not scope.mentions(WORDS):
            continue
        for node in scope.nodes:
            if isinstance(node, ast.Call) and is_device_assert(module, node):
                _, message = _arguments(node)
                if (message is not None or _unpacks(node)) is with_message:
                    yield Found(node, probe_of(scope, node))


def is_device_assert(module: Module, call: ast.Call) -> bool:
    """Whether the call is one of `torch._assert_async`, by whatever name."""
    return module.full_name(call.func) in (*NAMES, WITHOUT_MESSAGE, WITH_MESSAGE)


def probe_of(scope: Scope, call: ast.Call) -> str:
    """The probe to call instead."""
    condition, message = _arguments(call)
    if condition is None or _unpacks(call):
        return "maybe_assert_async(condition, msg)"
    return probe_for(scope, condition, message=message)


def _arguments(call: ast.Call) -> tuple[ast.expr | None, ast.expr | None]:
    """The condition and the message."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    condition = call.args[0] if call.args else named.get("input", named.get("self"))
    return condition, call.args[1] if len(call.args) > 1 else named.get("assert_msg")


def _unpacks(call: ast.Call) -> bool:
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return starred or any(keyword.arg is None for keyword in call.keywords)

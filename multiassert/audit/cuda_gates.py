"""Probes that run only on CUDA, since an `if` right around them, or a `return` before them, asks for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.device_asserts import is_device_assert, probe_of
from multiassert.audit.finding import Found
from multiassert.audit.module import Module, Scope
from multiassert.audit.suggestion import LONGEST

WORDS = ("maybe_detect_", "maybe_assert_", "_assert_async")
PROBES = ("maybe_detect_", "maybe_assert_", "maybe_warn_nan", "_assert_async", "sanitize_nan_logits")
GATES = ("is_cuda", "_is_cuda", "is_cuda_alike", "_is_cuda_alike")
AVAILABLE = "torch.cuda.is_available"


def cuda_gates(module: Module) -> Iterator[Found]:
    """The conditions that let a probe run on CUDA only."""
    for scope in module.scopes:
        if not scope.mentions(WORDS):
            continue
        for block in scope.blocks():
            for number, statement in enumerate(block):
                if not isinstance(statement, ast.If):
                    continue
                if (call := _probe(module, statement.body)) and not _probe(module, statement.orelse):
                    gates = _gates(module, statement.test, positive=True)
                elif _leaves(statement.body) and (call := _probe(module, block[number + 1 :])):
                    gates = _gates(module, statement.test, positive=False)
                else:
                    continue
                yield from (Found(gate, _without_gate(scope, call)) for gate in gates)


def _probe(module: Module, block: list[ast.stmt]) -> ast.Call | None:
    """The first call of a probe that is a statement of the block."""
    for statement in block:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call):
            name = module.full_name(call.func).rpartition(".")[2]
            if name.startswith(PROBES):
                return call
    return None


def _leaves(block: list[ast.stmt]) -> bool:
    return len(block) == 1 and isinstance(block[0], ast.Return | ast.Continue)


def _gates(module: Module, test: ast.expr, positive: bool) -> Iterator[ast.expr]:
    """The parts of a condition that ask for CUDA, where the condition needs them to be true, or to be false."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _gates(module, test.operand, not positive)
    elif isinstance(test, ast.BoolOp):
        # In `is_cuda or is_npu` another platform is asked for too: one that is not named has no probe all the same.
        for value in test.values:
            yield from _gates(module, value, positive)
    elif positive and _asks_for_cuda(module, test):
        yield test


def _asks_for_cuda(module: Module, test: ast.expr) -> bool:
    asked = test.func if isinstance(test, ast.Call) and not test.args else test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = [test.left, test.comparators[0]]
        is_cuda = any(isinstance(side, ast.Constant) and side.value == "cuda" for side in sides)
        return is_cuda and any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
    name = module.full_name(asked)
    last = asked.attr if isinstance(asked, ast.Attribute) else name.rpartition(".")[2]
    return name == AVAILABLE or last in GATES


def _without_gate(scope: Scope, call: ast.Call) -> str:
    if is_device_assert(scope.module, call):
        return f"{probe_of(scope, call)}, without a condition around it"
    written = scope.module.source_of(call)
    return f"{written if len(written) <= LONGEST else ast.unparse(call.func) + '(...)'}, without a condition around it"

"""Checks for which the host waits: an `assert` or an `if` that decides by the value of a tensor.

An `if` counts as a check where its branch raises or, if it asks for NaN or Inf, tells somebody or heals the tensor.
Any other branch is control flow, which no probe can stand in for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.finding import Found
from multiassert.audit.module import MODULE_NAME, Module, Scope
from multiassert.audit.suggestion import probe_for
from multiassert.audit.tensors import BOOLEAN_FUNCTIONS, non_finite_call, on_host, parts, verdict_call, waits

WORDS = (".any(", ".all(", "isnan", "isinf", "isfinite", ".equal(", ".allclose(")
ONCE = {"init", "setup", "main", "load", "loader", "loading", "weight", "weights", "checkpoint", "pretrained", "repack"}
ONCE |= {"convert", "warmup", "test", "benchmark"}
"""Words in the names of functions that run once, or to test something: there it does no harm to wait."""
ONCE_FOLDERS = {"model_loader", "tools", "scripts", "examples", "benchmark", "benchmarks"}
TELLING = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log", "print", "exit", "abort")
SEVERAL = "maybe_assert_async(condition, msg), with a condition of both joined by & or |"
HEALING = ("nan_to_num", "nan_to_num_")


def host_checks(module: Module) -> Iterator[Found]:
    """Each part of such a condition for which the host waits."""
    if ONCE_FOLDERS & set(module.folders):
        return
    for scope in module.scopes:
        once = scope.name == MODULE_NAME or ONCE & set(scope.name.split("_"))
        if once or not scope.mentions(WORDS):
            continue
        on_cpu = {id(node) for branch in scope.nodes if isinstance(branch, ast.If) for node in _for_cpu(branch)}
        for node in scope.nodes:
            if id(node) in on_cpu:
                continue
            if isinstance(node, ast.Assert):
                yield from _in_condition(scope, node.test, good=True, non_finite_only=False)
            elif isinstance(node, ast.If):
                yield from _in_branch(scope, node)


def _in_branch(scope: Scope, node: ast.If) -> Iterator[Found]:
    if _raises(node.body):
        yield from _in_condition(scope, node.test, good=False, non_finite_only=False)
    elif node.orelse and _raises(node.orelse):
        yield from _in_condition(scope, node.test, good=True, non_finite_only=False)
    elif _tells_or_heals(node.body):
        yield from _in_condition(scope, node.test, good=False, non_finite_only=True)


def _in_condition(scope: Scope, test: ast.expr, good: bool, non_finite_only: bool) -> Iterator[Found]:
    """What the host waits for in a condition that is met where all is well, or where it is not."""
    together = _decided_together(scope, test, good)
    for part, holds in waits(scope, test):
        if on_host(scope, part) or _of_weights(scope, part):
            continue
        written = list(parts(scope, part))
        non_finite = any(non_finite_call(scope, each) for each in written)
        verdict = any(verdict_call(scope, each) or _compares(scope, each) for each in written)
        if non_finite or (verdict and not non_finite_only):
            yield Found(part, SEVERAL if together else probe_for(scope, part, good=holds is good))


def _decided_together(scope: Scope, test: ast.expr, good: bool) -> bool:
    """Whether it takes several tensors to be bad at once, so that a probe of one of them would say too much."""
    joint = ast.Or if good else ast.And
    joints = [node for node in ast.walk(test) if isinstance(node, ast.BoolOp) and isinstance(node.op, joint)]
    return any(sum(any(waits(scope, value)) for value in node.values) > 1 for node in joints)


def _for_cpu(branch: ast.If) -> Iterator[ast.AST]:
    """All that runs on the CPU only, if the condition asks for it."""
    compared = branch.test
    if isinstance(compared, ast.Compare) and len(compared.ops) == 1:
        asks = isinstance(compared.ops[0], ast.Eq) and isinstance(compared.comparators[0], ast.Constant)
        asks = asks and isinstance(compared.left, ast.Attribute) and compared.left.attr == "type"
        cpu = asks and isinstance(compared.comparators[0], ast.Constant) and compared.comparators[0].value == "cpu"
    else:
        cpu = isinstance(compared, ast.Attribute) and compared.attr == "is_cpu"
    if cpu:
        for statement in branch.body:
            yield from ast.walk(statement)


def _of_weights(scope: Scope, node: ast.expr) -> bool:
    """Whether it is about weights, which are looked at when they are loaded: `topk_weights` are none."""
    for part in parts(scope, node, all_values=True):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if "weight" in name.split("_"):
            return True
    return False


def _compares(scope: Scope, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and scope.module.full_name(node.func) in BOOLEAN_FUNCTIONS


def _raises(block: list[ast.stmt]) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in block)


def _tells_or_heals(block: list[ast.stmt]) -> bool:
    for statement in block:
        call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name.lower() in (*TELLING, *HEALING):
                return True
    return False

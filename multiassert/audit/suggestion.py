"""Which probe to call in place of a condition that is written out."""

from __future__ import annotations

import ast

from multiassert.audit.module import Scope
from multiassert.audit.tensors import VERDICTS, non_finite_call, parts

LONGEST = 60  # characters of an expression that is repeated in a suggestion


def probe_for(scope: Scope, condition: ast.expr, good: bool = True, message: ast.expr | None = None) -> str:
    """The call that checks the same; `good` tells whether all is well where the condition is true."""
    msg = "msg" if message is None else _text(scope, message, "msg")
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Invert):
        condition, good = condition.operand, not good
    condition = _read_by_host(scope, condition)
    return (
        _for_non_finite(scope, condition, msg)
        or _for_bounds(scope, condition, msg)
        or (_for_sum(scope, condition, msg) if good else "")
        or f"maybe_assert_async({_as_tensor(scope, condition, good)}, {msg})"
    )


def _for_non_finite(scope: Scope, condition: ast.expr, msg: str) -> str:
    nodes = list(parts(scope, condition))
    calls = [call for node in nodes if (call := non_finite_call(scope, node))]
    # `(torch.isfinite(x) & (x > 0)).all()` asks for more; `torch.isnan(x).sum() == 0` does not.
    more = [node for node in nodes if isinstance(node, ast.Compare) and _text(scope, node.comparators[0], "") != "0"]
    more += [node for node in nodes if isinstance(node, ast.Compare) and not _counts(node.left)]
    if not calls or more:
        return ""
    kinds, tensors = {kind for kind, _ in calls}, {_text(scope, tensor, "tensor"): None for _, tensor in calls}
    names = ["maybe_detect_nan"] if {"isnan", "isfinite"} & kinds else []
    names += ["maybe_detect_inf"] if kinds - {"isnan"} else []
    return "; ".join(f"{name}({tensor}, {msg})" for tensor in tensors for name in names)


def _counts(node: ast.expr) -> bool:
    """Whether it is a number of elements, such as `torch.isnan(x).sum()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("sum", "count_nonzero") or (node.func.attr == "item" and _counts(node.func.value))
    return False


def _for_bounds(scope: Scope, condition: ast.expr, msg: str) -> str:
    """The call for `((x >= low) & (x < high)).all()`, or for `((x < low) | (x >= high)).any()`."""
    name, pair = _verdict(condition)
    if not isinstance(pair, ast.BinOp):
        return ""
    expected = {"all": (ast.BitAnd, ast.GtE, ast.Lt), "any": (ast.BitOr, ast.Lt, ast.GtE)}[name]
    low, high = pair.left, pair.right
    if not (isinstance(pair.op, expected[0]) and isinstance(low, ast.Compare) and isinstance(high, ast.Compare)):
        return ""
    if [type(operator) for operator in (*low.ops, *high.ops)] != [*expected[1:]]:
        return ""
    if ast.dump(low.left) != ast.dump(high.left):
        return ""
    bounds = f"{_text(scope, low.comparators[0], 'low')}, {_text(scope, high.comparators[0], 'high')}"
    return f"maybe_detect_oob({_text(scope, low.left, 'indices')}, {bounds}, {msg})"


def _verdict(condition: ast.expr) -> tuple[str, ast.expr | None]:
    """`any` or `all`, and what it is asked of; None if it is no such call."""
    if not isinstance(condition, ast.Call) or not isinstance(condition.func, ast.Attribute) or condition.keywords:
        return "", None
    if condition.func.attr not in VERDICTS or len(condition.args) > 1:
        return "", None
    return condition.func.attr, condition.args[0] if condition.args else condition.func.value


def _for_sum(scope: Scope, condition: ast.expr, msg: str) -> str:
    """The call for `x.sum() == expected`."""
    if not (isinstance(condition, ast.Compare) and [type(operator) for operator in condition.ops] == [ast.Eq]):
        return ""
    total = condition.left
    if not (isinstance(total, ast.Call) and isinstance(total.func, ast.Attribute) and total.func.attr == "sum"):
        return ""
    if total.args or total.keywords:
        return ""
    expected = _text(scope, condition.comparators[0], "expected")
    return f"maybe_assert_sum({_text(scope, total.func.value, 'tensor')}, {expected}, {msg})"


def _as_tensor(scope: Scope, condition: ast.expr, good: bool) -> str:
    """The condition that is to hold, as a tensor on the device."""
    if isinstance(condition, ast.Call):
        name = scope.module.full_name(condition.func)
        if name in ("torch.equal", "torch.allclose") and len(condition.args) >= 2:
            left, right = (_text(scope, argument, "...") for argument in condition.args[:2])
            written = f"({left} == {right}).all()" if name == "torch.equal" else f"torch.isclose({left}, {right}).all()"
            return written if good else f"~{written}"
    written = _text(scope, condition, "condition")
    if any(reading in written for reading in (".item()", ".tolist()", "bool(", "torch.equal(", "torch.allclose(")):
        return "condition"
    if good or written == "condition":
        return written
    operator = isinstance(condition, ast.Compare | ast.BinOp | ast.IfExp | ast.UnaryOp)
    return f"~({written})" if operator else f"~{written}"


def _read_by_host(scope: Scope, condition: ast.expr) -> ast.expr:
    """What the host reads: without a `bool(...)` around it, an `.item()` behind it, or a name for all that."""
    while True:
        value = scope.values.get(condition.id) if isinstance(condition, ast.Name) else condition
        if not isinstance(value, ast.Call):
            return condition
        if isinstance(value.func, ast.Name) and value.func.id == "bool" and len(value.args) == 1:
            condition = value.args[0]
        elif isinstance(value.func, ast.Attribute) and value.func.attr == "item":
            condition = value.func.value
        elif isinstance(condition, ast.Name) and scope.module.full_name(value.func) in (
            "torch.equal",
            "torch.allclose",
        ):
            condition = value
        else:
            return condition


def _text(scope: Scope, node: ast.expr, otherwise: str) -> str:
    written = scope.module.source_of(node)
    return written if len(written) <= LONGEST else otherwise

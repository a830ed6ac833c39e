"""What can be told of an expression without running it: that it is a tensor, and that the host waits for it.

Only what is certain counts: an array of numpy has `any` and `all` too. So a tensor is what torch returned, what has a
method that only tensors have, what is annotated as one, and what is computed from a tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.module import Scope

NON_FINITE = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
VERDICTS = ("any", "all")
BOOLEAN_FUNCTIONS = ("torch.equal", "torch.allclose")
"""They compare on the device and return a Python bool."""

FROM_TENSORS = frozenset(
    f"torch.{name}"
    for name in (
        *NON_FINITE,
        *VERDICTS,
        *("abs", "add", "amax", "amin", "bitwise_and", "bitwise_or", "cat", "clamp", "count_nonzero", "cumsum", "diff"),
        *(
            "empty_like",
            "eq",
            "full_like",
            "gather",
            "ge",
            "gt",
            "index_select",
            "isclose",
            "isin",
            "le",
            "logical_and",
        ),
        *("logical_not", "logical_or", "logical_xor", "lt", "masked_select", "matmul", "max", "mean", "min", "mul"),
        *("nan_to_num", "ne", "ones_like", "remainder", "signbit", "softmax", "sort", "sqrt", "stack", "sub", "sum"),
        *("where", "zeros_like"),
    )
)
FACTORIES = frozenset(
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "empty", "full", "linspace", "ones"),
        *("rand", "randint", "randn", "tensor", "zeros"),
    )
)
"""Without a device their result is on the CPU, as a rule."""

TO_PYTHON = ("item", "tolist", "equal", "allclose")
"""Methods that wait and return no tensor."""
NOT_TENSORS = frozenset(
    (
        *(*TO_PYTHON, "numpy", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride"),
        *("get_device", "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "data_ptr", "storage_offset"),
    )
)
"""All methods that return no tensor."""
TENSOR_ATTRIBUTES = ("T", "mT", "H", "data", "grad", "real", "imag")
ANNOTATIONS = frozenset(
    text.format(name)
    for text in ("{}", "Optional[{}]", "typing.Optional[{}]", "{} | None", "None | {}")
    for name in ("torch.Tensor", "Tensor")
)


def parts(scope: Scope, node: ast.expr, all_values: bool = False) -> Iterator[ast.AST]:
    """Every node of an expression, and of what the names in it are assigned: those with one value, or all of them."""
    names: set[str] = set()
    expressions = [node]
    while expressions:
        for part in ast.walk(expressions.pop()):
            yield part
            if isinstance(part, ast.Name) and part.id not in names:
                names.add(part.id)
                once = [scope.values[part.id]] if part.id in scope.values else []
                expressions += scope.all_values.get(part.id, []) if all_values else once


def is_tensor(scope: Scope, node: ast.expr) -> bool:
    """Whether the expression is certainly a tensor."""
    if node not in scope.tensors:
        scope.tensors[node] = False  # what a name is, if its value is computed from itself
        scope.tensors[node] = _is_tensor(scope, node)
    return scope.tensors[node]


def _is_tensor(scope: Scope, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        if node.id in scope.values:
            return is_tensor(scope, scope.values[node.id])
        if any(not is_tensor(scope, value) for value in scope.all_values.get(node.id, [])):
            return False
        return scope.annotations.get(node.id, "").strip("'\"") in ANNOTATIONS
    if isinstance(node, ast.Call):
        name = scope.module.full_name(node.func)
        if name in FROM_TENSORS | FACTORIES:
            return True
        if not isinstance(node.func, ast.Attribute):
            return False
        if is_non_finite_method(scope, node):
            return True
        return node.func.attr not in NOT_TENSORS and is_tensor(scope, node.func.value)
    if isinstance(node, ast.Attribute):
        return node.attr in TENSOR_ATTRIBUTES and is_tensor(scope, node.value)
    if isinstance(node, ast.Subscript):
        return is_tensor(scope, node.value)
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and is_tensor(scope, node.operand)
    if isinstance(node, ast.BinOp):
        return is_tensor(scope, node.left) or is_tensor(scope, node.right)
    if isinstance(node, ast.Compare):
        compared = not any(isinstance(operator, ast.Is | ast.IsNot | ast.In | ast.NotIn) for operator in node.ops)
        return compared and any(is_tensor(scope, side) for side in (node.left, *node.comparators))
    return isinstance(node, ast.NamedExpr) and is_tensor(scope, node.value)


def is_non_finite_method(scope: Scope, node: ast.AST) -> bool:
    """Whether it is a call such as `x.isnan()`, a method that only tensors have; `np.isnan(x)` is none."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in NON_FINITE
        and not node.args
        and not scope.module.is_module(node.func.value)
    )


def non_finite_call(scope: Scope, node: ast.AST) -> tuple[str, ast.expr] | None:
    """`isnan`, `isinf` and so on with the tensor that is looked at, if the node is such a call."""
    if not isinstance(node, ast.Call):
        return None
    if is_non_finite_method(scope, node) and isinstance(node.func, ast.Attribute):
        return node.func.attr, node.func.value
    package, _, name = scope.module.full_name(node.func).rpartition(".")
    return (name, node.args[0]) if package == "torch" and name in NON_FINITE and node.args else None


def verdict_call(scope: Scope, node: ast.AST) -> bool:
    """Whether it is `torch.any(x)`, `torch.all(x)`, or such a method of a tensor."""
    if not isinstance(node, ast.Call):
        return False
    if scope.module.full_name(node.func) in ("torch.any", "torch.all"):
        return True
    method = isinstance(node.func, ast.Attribute) and node.func.attr in VERDICTS
    return method and isinstance(node.func, ast.Attribute) and is_tensor(scope, node.func.value)


def on_host(scope: Scope, node: ast.expr) -> bool:
    """Whether the expression is computed, or may be, from something that is on the host already."""
    for part in parts(scope, node, all_values=True):
        if not isinstance(part, ast.Call):
            continue
        name = scope.module.full_name(part.func)
        method = part.func.attr if isinstance(part.func, ast.Attribute) else ""
        devices = [ast.unparse(keyword.value) for keyword in part.keywords if keyword.arg == "device"]
        if any("cpu" in device for device in devices) or name == "torch.from_numpy":
            return True
        if name in FACTORIES and not devices and not any(keyword.arg is None for keyword in part.keywords):
            return True
        if method in ("cpu", "numpy") or _to_cpu(part, method):
            return True
    return False


def _to_cpu(call: ast.Call, method: str) -> bool:
    return method == "to" and any("cpu" in ast.unparse(argument) for argument in call.args[:1])


def waits(scope: Scope, node: ast.expr, holds: bool = True) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a condition for which the host waits, and whether each helps the condition to hold by being true."""
    function = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    argument = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from waits(scope, node.operand, not holds)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from waits(scope, value, holds)
    elif function == "bool" and argument is not None:
        yield from waits(scope, argument, holds)
    elif function in VERDICTS and isinstance(argument, ast.GeneratorExp | ast.ListComp):
        yield from waits(scope, argument.elt, holds)
    elif is_tensor(scope, node) or _reads_tensor(scope, node):
        yield node, holds
    elif isinstance(node, ast.Name) and _reads_tensor(scope, scope.values.get(node.id, node)):
        # `found = bool(torch.isnan(x).any())` has waited where it stands; it is told where it decides something.
        yield node, holds


def _reads_tensor(scope: Scope, node: ast.expr) -> bool:
    """Whether the expression holds a call that waits for a tensor and gives the host its value."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if scope.module.full_name(part.func) in BOOLEAN_FUNCTIONS:
            return True
        if isinstance(part.func, ast.Attribute) and part.func.attr in TO_PYTHON and is_tensor(scope, part.func.value):
            return True
        if isinstance(part.func, ast.Name) and part.func.id in ("bool", "int", "float") and part.args:
            return is_tensor(scope, part.args[0])
    return False

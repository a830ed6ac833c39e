"""Index tensors that are allocated and not filled before they are used as an index."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.finding import Found
from multiassert.audit.module import Module, Scope

WORDS = ("torch.empty", "import empty", "new_empty")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int", "long", "short")
INDEX_ARGUMENT = {
    "torch.index_select": 2,
    "torch.gather": 2,
    "torch.take": 1,
    "torch.take_along_dim": 1,
    "torch.nn.functional.embedding": 0,
}
"""Functions, and the place of the index among their arguments."""
INDEX_METHODS = {"index_select": 1, "gather": 1, "take": 0, "take_along_dim": 0, "index_copy_": 1, "index_add_": 1}
INDEX_METHODS |= {"scatter_": 1, "scatter_add_": 1, "index_put_": 0}


def unfilled_indices(module: Module) -> Iterator[Found]:
    """The allocations of tensors whose first use is as an index."""
    for scope in module.scopes:
        if not scope.mentions(WORDS):
            continue
        for name, value in scope.values.items():
            if isinstance(value, ast.Call) and _allocates_integers(scope, value):
                use = _first_use(scope, name, value)
                if use is not None and _is_index(scope, use):
                    yield Found(value, _instead(module, value))


def _allocates_integers(scope: Scope, call: ast.Call) -> bool:
    """Whether the call is `torch.empty` or the like; of an integer kind, or of one that its use as an index proves."""
    dtypes = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    name = scope.module.full_name(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name != "torch.empty" and name != "torch.empty_like" and method != "new_empty":
        return False
    if any(keyword.arg in (None, "out") for keyword in call.keywords):
        return False
    if dtypes:
        return scope.module.full_name(dtypes[0]).removeprefix("torch.") in INTEGERS
    return name != "torch.empty"


def _first_use(scope: Scope, name: str, value: ast.Call) -> ast.Name | None:
    """The first mention of the name after its assignment; None if a function in the function mentions it."""
    inner = (ast.walk(node) for node in scope.nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda))
    if any(isinstance(node, ast.Name) and node.id == name for nodes in inner for node in nodes):
        return None
    after = (value.end_lineno or value.lineno, value.end_col_offset or 0)
    names = [node for node in scope.nodes if isinstance(node, ast.Name) and node.id == name]
    uses = [node for node in names if isinstance(node.ctx, ast.Load)]
    # Of a loop, what comes before in the text may come after in time.
    if any((use.lineno, use.col_offset) < after for use in uses):
        return None
    return min(uses, key=lambda use: (use.lineno, use.col_offset), default=None)


def _is_index(scope: Scope, use: ast.Name) -> bool:
    for node in scope.nodes:
        if isinstance(node, ast.Subscript):
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if use in indices:
                return True
        elif isinstance(node, ast.Call):
            name = scope.module.full_name(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            place = INDEX_ARGUMENT.get(name, None if name.startswith("torch.") else INDEX_METHODS.get(method))
            named = any(keyword.arg == "index" and keyword.value is use for keyword in node.keywords)
            known = name in INDEX_ARGUMENT or (method in INDEX_METHODS and not name.startswith("torch."))
            if (place is not None and len(node.args) > place and node.args[place] is use) or (known and named):
                return True
    return False


def _instead(module: Module, call: ast.Call) -> str:
    function = module.source_of(call.func).replace("empty", "zeros")
    return f"{function}(...), so that what is not filled is slot 0, and maybe_detect_oob(...) before the use"

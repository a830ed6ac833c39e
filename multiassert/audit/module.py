"""One source file as the checks see it: its tree, what its names stand for, and the code of each function by itself."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
INNER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
MODULE_NAME = "<module>"


@dataclasses.dataclass(frozen=True)
class Module:
    """A file that could be read."""

    path: str
    text: str
    tree: ast.Module
    folders: tuple[str, ...] = ()
    """The folders in which it lies, from the one that was searched."""

    @functools.cached_property
    def lines(self) -> list[str]:
        """The lines as Python counts them."""
        return self.text.split("\n")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """What the imported names stand for, wherever in the file they are imported: `F` for torch.nn.functional."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {name.asname: name.name for name in node.names if name.asname}
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                found |= {name.asname or name.name: f"{origin}.{name.name}" for name in node.names}
        return found

    @functools.cached_property
    def scopes(self) -> list[Scope]:
        """The module's own code, and that of each function in it."""
        functions = [node for node in self.nodes if isinstance(node, FunctionNode)]
        return [Scope(self, node) for node in (self.tree, *functions)]

    def source_of(self, node: ast.expr) -> str:
        """The expression as it is written, on one line."""
        written = ast.get_source_segment(self.text, node) or ""
        if "\n" not in written:
            return written
        # What spans lines can hold comments, and texts in which a line break counts.
        return (
            ast.unparse(node)
            if {"#", "'", '"'} & set(written)
            else " ".join(written.split()).replace("( ", "(").replace(" )", ")")
        )

    def full_name(self, node: ast.AST) -> str:
        """The dotted name that an expression stands for, such as `torch.isnan`; empty if it is no name."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(attributes)])

    def is_module(self, node: ast.AST) -> bool:
        """Whether the expression is an imported name, such as `np` in `np.isnan`."""
        return isinstance(node, ast.Name) and (node.id in self._plainly_imported or node.id in self.imports)

    @functools.cached_property
    def _plainly_imported(self) -> set[str]:
        imports = [node for node in self.nodes if isinstance(node, ast.Import)]
        return {name.name.partition(".")[0] for node in imports for name in node.names if not name.asname}


@dataclasses.dataclass(frozen=True)
class Scope:
    """The code of a module or a function without that of the functions and classes in it."""

    module: Module
    node: ast.Module | FunctionNode
    tensors: dict[ast.expr, bool] = dataclasses.field(default_factory=dict)
    """Whether an expression is certainly a tensor, as far as that was asked before."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return MODULE_NAME if isinstance(self.node, ast.Module) else self.node.name

    def mentions(self, words: tuple[str, ...]) -> bool:
        """Whether one of the words is in the text of the code, or of the functions in it."""
        if isinstance(self.node, ast.Module):
            return any(word in self.module.text for word in words)
        text = "\n".join(self.module.lines[self.node.lineno - 1 : self.node.end_lineno])
        return any(word in text for word in words)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the code, in the order in which they are written."""
        found: list[ast.AST] = []
        waiting: list[ast.AST] = [*reversed(self.node.body)]
        while waiting:
            node = waiting.pop()
            found.append(node)
            if not isinstance(node, INNER_SCOPES):
                waiting += reversed(list(ast.iter_child_nodes(node)))
        return found

    def blocks(self) -> Iterator[list[ast.stmt]]:
        """Each sequence of statements: the body, and those of the branches and loops in it."""
        yield self.node.body
        for node in self.nodes:
            if not isinstance(node, INNER_SCOPES):
                for field in ("body", "orelse", "finalbody"):
                    block = getattr(node, field, None)
                    if isinstance(block, list) and block:
                        yield block

    @functools.cached_property
    def values(self) -> dict[str, ast.expr]:
        """The value of each name that is bound once, by a plain assignment."""
        parameters = {parameter.arg for parameter in self._parameters}
        bound = {name: values[0] for name, values in self._bindings.items() if len(values) == 1}
        return {name: value for name, value in bound.items() if value is not None and name not in parameters}

    @functools.cached_property
    def all_values(self) -> dict[str, list[ast.expr]]:
        """All values that plain assignments bind to a name."""
        return {name: [value for value in values if value is not None] for name, values in self._bindings.items()}

    @functools.cached_property
    def annotations(self) -> dict[str, str]:
        """The annotation of each parameter."""
        annotated = {parameter.arg: parameter.annotation for parameter in self._parameters}
        return {name: ast.unparse(annotation) for name, annotation in annotated.items() if annotation is not None}

    @property
    def _parameters(self) -> list[ast.arg]:
        if isinstance(self.node, ast.Module):
            return []
        declared = self.node.args
        return [*declared.posonlyargs, *declared.args, *declared.kwonlyargs]

    @functools.cached_property
    def _bindings(self) -> dict[str, list[ast.expr | None]]:
        """What each name is bound to; None where it is not bound by a plain assignment."""
        plain: dict[int, ast.expr] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                plain |= {id(target): node.value for target in node.targets}
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                plain[id(node.target)] = node.value
        bound: dict[str, list[ast.expr | None]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                bound.setdefault(node.id, []).append(plain.get(id(node)))
            elif isinstance(node, ast.Global | ast.Nonlocal):
                for name in node.names:
                    bound.setdefault(name, []).append(None)
        return bound

"""Settings that engines have retired, by their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multiassert.audit.finding import Found
from multiassert.audit.module import Module

VARIABLES = ("SGLANG_SPEC_NAN_DETECTION", "SGLANG_SPEC_OOB_DETECTION")
FLAG = "--enable-nan-detection"
OPTION = "enable_nan_detection"
WORDS = (*VARIABLES, FLAG, OPTION)
INSTEAD = "MULTIASSERT=raise (or another mode) in the environment, or multiassert.configure(...)"


def retired_settings(module: Module) -> Iterator[Found]:
    """The places that name one: as an attribute, a name, a keyword, or a text of its own."""
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A sentence that speaks of a setting is no use of it; `NAME=1` is.
            name, _, value = node.value.partition("=")
            if name in (*VARIABLES, FLAG) and " " not in value:
                yield Found(node, INSTEAD)
        elif isinstance(node, ast.Attribute):
            if node.attr in (*VARIABLES, OPTION):
                yield Found(node, INSTEAD)
        elif isinstance(node, ast.Name):
            if node.id in (*VARIABLES, OPTION):
                yield Found(node, INSTEAD)
        elif isinstance(node, ast.keyword) and node.arg in (*VARIABLES, OPTION):
            yield Found(node.value, INSTEAD)

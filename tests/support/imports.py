"""The imports of a Python file, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, int, bool]]:
    """(imported module, line, at module level) of every import, wherever it stands, TYPE_CHECKING
    blocks included.
    """
    local = set()
    for function in filter(is_function, ast.walk(tree)):
        local |= {id(node) for node in ast.walk(function)}
    typing_only = set()
    for block in filter(is_typing_block, ast.walk(tree)):
        typing_only |= {id(node) for node in ast.walk(block)}
    for node in ast.walk(tree):
        at_start = id(node) not in local and id(node) not in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_start
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: -node.level]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, at_start
        elif isinstance(node, ast.Call) and is_import_call(node):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno, at_start


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def is_import_call(node: ast.Call) -> bool:
    return ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module")

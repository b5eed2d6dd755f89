"""Answers of a model read as data by scorers of `reasoning-gym`, some of which hand them to `eval`, or to sympy, which does.

What they do there is kept as far as it needs no code: literals, arithmetic, and for sympy the functions of mathematics.
Anything else is refused with a `ValueError`, which such a scorer takes for an answer that cannot be read.
"""

import ast
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
_ROOTS = ("sqrt", "cbrt", "root")  # of sympy's functions those that are no classes


def literal(text: str) -> Any:
    """Returns the value of a Python literal, or of arithmetic with numbers; takes the place of `eval`.

    Raises:
        ValueError, SyntaxError, TypeError: it is neither.
    """
    try:
        return ast.literal_eval(text)
    except ValueError:
        tree = ast.parse(text.strip(), mode="eval")
        _check(tree, names=False)
        return eval(
            compile(tree, "<arithmetic>", "eval"), {"__builtins__": {}}
        )  # numbers and operators, nothing to call


def expression(text: str, *args: Any, **kwargs: Any) -> Any:
    """Returns what `sympy.parse_expr` returns for an expression of numbers, symbols and functions of mathematics.

    Raises:
        ValueError, SyntaxError, TypeError: it holds anything else, such as an attribute, a text or another call.
    """
    from sympy.parsing.sympy_parser import parse_expr  # pyright: ignore[reportMissingImports]

    _check(ast.parse(text.strip(), mode="eval"), names=True)
    return parse_expr(text.strip(), *args, **kwargs)


def read_as_data(classes: Iterable[type]) -> None:
    """Makes the modules of these classes use `literal` and `expression` in place of `eval` and `parse_expr`."""
    import sympy  # pyright: ignore[reportMissingImports]

    for name in {cls.__module__ for cls in classes}:
        module = vars(sys.modules[name])
        module["eval"] = literal
        for key, value in [*module.items()]:
            if value is sympy:
                module[key] = _Sympy("sympy")
            elif value is sympy.parse_expr:
                module[key] = expression


class _Sympy(ModuleType):
    """sympy, but for `parse_expr`."""

    parse_expr = staticmethod(expression)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["sympy"], name)


def _check(tree: ast.AST, *, names: bool) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            allowed = type(node.value) in (int, float)
        elif isinstance(node, ast.Name):
            allowed = names and not node.id.startswith("_")
        elif isinstance(node, ast.Call):
            allowed = names and isinstance(node.func, ast.Name) and not node.keywords and _is_function(node.func.id)
        else:
            allowed = isinstance(node, _ARITHMETIC)
        if not allowed:
            raise ValueError(f"an answer with {type(node).__name__} is not read: it might run as code")


def _is_function(name: str) -> bool:
    import sympy  # pyright: ignore[reportMissingImports]
    from sympy.core.function import Application  # pyright: ignore[reportMissingImports]

    value = getattr(sympy, name, None)
    return name in _ROOTS or (isinstance(value, type) and issubclass(value, Application))

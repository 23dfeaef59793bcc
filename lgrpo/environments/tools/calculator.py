"""Calculator: evaluates arithmetic without running code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, final

from lgrpo.checks import check_count

Number: TypeAlias = int | float

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_MAX_BITS = 4096


@final
class Calculator:
    """Tool that evaluates an arithmetic expression.

    >>> Calculator().calculate("(12 + 30) * 2^3 / 7")
    '48'
    >>> Calculator().calculate("9 ** 9 ** 9")
    Traceback (most recent call last):
    ValueError: the result of a power is too large
    """

    def __init__(self, max_chars: int = 500) -> None:
        """
        Args:
            max_chars: Length of an expression.
        """
        check_count("max_chars", max_chars, at_least=1)
        self._max_chars = max_chars

    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Expression of numbers, + - * / // % **, parentheses, and functions such as sqrt, log and round.

        Returns:
            The value of the expression.
        """
        if len(expression) > self._max_chars:
            raise ValueError(f"the expression is longer than {self._max_chars} characters")
        try:
            value = evaluate(_parsed(expression.strip().rstrip("=").translate(_SIGNS).strip()))
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{expression!r} is not an arithmetic expression") from None
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        except OverflowError:
            raise ValueError("a number is too large") from None
        return format_number(value)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except ValueError as error:  # a null byte, before Python 3.11.4
        raise SyntaxError(str(error)) from error


def evaluate(node: ast.expr) -> Number:
    """Return the value of an expression, or raise a ``ValueError`` in plain words."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return checked(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return power(evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return checked(_OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ValueError(f"{node.func.id} takes no named arguments")
        return call_function(node.func.id, [evaluate(argument) for argument in node.args])
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic; the functions are {', '.join(_FUNCTIONS)}")


def call_function(name: str, arguments: list[Number]) -> Number:
    if name == "round" and len(arguments) == 2 and abs(arguments[1]) > 100:  # the time grows with this number
        raise ValueError("round takes at most 100 digits")
    try:
        return checked(_FUNCTIONS[name](*arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}({', '.join(map(str, arguments))}) is not defined ({error})") from None


def power(base: Number, exponent: Number) -> Number:
    """Return a power, or raise an error before a large one is computed."""
    are_integers = isinstance(base, int) and isinstance(exponent, int)
    if are_integers and abs(base) > 1 and int(base).bit_length() * exponent > 2 * _MAX_BITS:
        raise ValueError("the result of a power is too large")
    return checked(base**exponent)


def checked(value: Any) -> Number:
    """Return a number that is real, finite and not too large."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("a number is too large")
    return value


def format_number(value: Number) -> str:
    """Return a number as text, with 12 digits at most after rounding, and without a fraction of zero.

    >>> format_number(0.1 + 0.2), format_number(3.0), format_number(10**20)
    ('0.3', '3', '100000000000000000000')
    """
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"

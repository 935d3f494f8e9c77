"""A calculator, as a tool that is a function; no more of Python than arithmetic runs."""

from __future__ import annotations

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers with + - * / // % and brackets, such as 12 * (3 + 4)
    """
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    value = _value(ast.parse(expression, mode="eval").body)
    return f"{value:g}" if isinstance(value, float) and value % 1 else str(int(value))


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")

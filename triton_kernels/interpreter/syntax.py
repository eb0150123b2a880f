"""Functions: Python's syntax with the meaning that it has in a kernel."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from pagedmla.triton_kernels.interpreter.builder import SEMANTIC


@functools.cache
def rewritten(fn: types.FunctionType) -> types.FunctionType:
    """The function that runs in place of `fn`: assignments make tensors, loop variables and min/max are Triton's.

    It shares the globals and the closure of `fn`. What the rewriting needs comes in further closure cells, so that the
    module of `fn` stays as it is.
    """
    lines, start = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    bound = {**_REWRITER_NAMES, **{name: value for name, value in _BUILTINS.items() if name not in fn.__globals__}}
    cells = {name: types.CellType(value) for name, value in bound.items()}
    cells.update(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
    enclosing = ast.parse(f"def enclosing({', '.join(cells)}): pass")
    assert isinstance(enclosing.body[0], ast.FunctionDef)
    enclosing.body[0].body = [_Rewriter().visit(definition)]
    ast.increment_lineno(ast.fix_missing_locations(enclosing), start - 1)
    code = compile(enclosing, fn.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("enclosing", fn.__name__):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    closure = tuple(cells[name] for name in code.co_freevars)
    twin = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


class _Rewriter(ast.NodeTransformer):
    """Assignments of numbers make tensors; `and`, `or` and `not` of tensors are elementwise."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = _call_to("_to_tensor", node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        self.generic_visit(node)
        thunks = [ast.Lambda(args=_NO_ARGUMENTS, body=value) for value in node.values]
        return _call_to("_both" if isinstance(node.op, ast.And) else "_either", *thunks)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call_to("_negation", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        if len(node.ops) > 1:
            raise NotImplementedError(
                f"{ast.unparse(node)}: Triton before 3.9 compiles no chain, join comparisons with &"
            )
        self.generic_visit(node)
        return node


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _call_to(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])


def _to_tensor(value: Any) -> Any:
    """What an assignment stores: a Python number becomes a tensor, as in compiled code."""
    return SEMANTIC.to_tensor(value, check_type=False)


def _both(left: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`and`: of tensors elementwise, with every operand evaluated; of Python values as in Python."""
    value = left()
    for operand in rest:
        if isinstance(value, tl.tensor):
            value = value.logical_and(operand())
        elif value:
            value = operand()
    return value


def _either(left: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    value = left()
    for operand in rest:
        if isinstance(value, tl.tensor):
            value = value.logical_or(operand())
        elif not value:
            value = operand()
    return value


def _negation(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


def loop(*bounds: Any) -> Iterator[tl.tensor]:
    """`range` in a kernel: the loop variable is an integer tensor of the bounds' type, as in compiled code."""
    tensors = [SEMANTIC.to_tensor(bound) for bound in bounds]
    dtype = functools.reduce(SEMANTIC.integer_promote_impl, [tensor.dtype for tensor in tensors])
    for value in range(*map(operator.index, tensors)):
        yield SEMANTIC.scalar_constant(value, dtype)


def _least(*args: Any) -> Any:
    return functools.reduce(tl.minimum, args) if any(isinstance(a, tl.tensor) for a in args) else min(*args)


def _greatest(*args: Any) -> Any:
    return functools.reduce(tl.maximum, args) if any(isinstance(a, tl.tensor) for a in args) else max(*args)


# What the output of _Rewriter calls.
_REWRITER_NAMES = {"_to_tensor": _to_tensor, "_both": _both, "_either": _either, "_negation": _negation}
# Names of Python that mean something else in a kernel.
_BUILTINS = {"range": loop, "min": _least, "max": _greatest}


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value

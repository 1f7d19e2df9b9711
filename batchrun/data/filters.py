"""`input.filter`: a condition on a row's columns, written like Python and never run as Python."""

from __future__ import annotations

import ast
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchrun.data.schemas import column_list
from batchrun.errors import InputError

ROW = "row"
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: lambda left, right: pc.divide(left.cast(pa.float64()), right.cast(pa.float64())),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lower": pc.utf8_lower,
    "upper": pc.utf8_upper,
    "abs": pc.abs_checked,
    "startswith": lambda text, start: pc.starts_with(text, pattern=start),
    "endswith": lambda text, end: pc.ends_with(text, pattern=end),
    "contains": lambda text, part: pc.match_substring(text, pattern=part),
    "matches": lambda text, pattern: pc.match_substring_regex(text, pattern=pattern),
}
ALLOWED = (
    "columns (or row['a name with blanks']), constants, and, or, not, == != < <= > >=, in [...], is None, + - * /, "
    f"len() and {', '.join(FUNCTIONS)}()"
)


class Filter:
    """A compiled condition. `columns` are those it needs, whether the job reads them or not.

    Raises InputError naming the place for text that is no condition of the kind.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"input.filter={text}: {error}: a filter is made of {ALLOWED}") from error
        self.columns = list(dict.fromkeys(name for node in ast.walk(self._tree) if (name := _column(node)) is not None))

    def check(self, schema: pa.Schema) -> None:
        """Raises InputError for columns that are not in the schema, and for operations that their types do not have."""
        if missing := [name for name in self.columns if name not in schema.names]:
            raise InputError(
                f"input.filter uses {', '.join(missing)}, and there is no such column: {column_list(schema.names)}"
            )
        fields = [schema.field(name) for name in self.columns]
        self.mask(pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in fields], schema=pa.schema(fields)))

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows meet the condition; one that comes to null does not, as in SQL."""
        values = {name: batch.column(name) for name in self.columns}
        schema = batch.schema
        with_types = {name: schema.field(name).type for name in self.columns}
        try:
            found = _Walk(self.text, values, with_types).visit(self._tree)
        except pa.ArrowException as error:
            raise InputError(f"input.filter={self.text}: {error}") from error
        if not isinstance(found, (pa.Array, pa.Scalar)) or not pa.types.is_boolean(found.type):
            raise InputError(f"input.filter={self.text} is not a condition: compare it with something")
        if isinstance(found, pa.Scalar):
            return pa.array([bool(found.as_py())] * batch.num_rows, pa.bool_())
        return pc.fill_null(found, False)

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """The same condition for pyarrow.dataset, which compares it with statistics."""
        fields = {name: pc.field(name) for name in self.columns}
        return _Walk(self.text, fields, {name: schema.field(name).type for name in self.columns}).visit(self._tree)


def _column(node: ast.AST) -> str | None:
    """The column that a node stands for: a name that is not a function's, or row["name"]."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == ROW:
        named = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return named if isinstance(named, str) else None
    if isinstance(node, ast.Name) and node.id != ROW and node.id != "len" and node.id not in FUNCTIONS:
        return node.id
    return None


class _Walk:
    """Evaluates a tree over arrays, or over expressions that stand for them. Whatever has no method is refused."""

    def __init__(self, text: str, values: dict[str, Any], types: dict[str, pa.DataType]) -> None:
        self.text = text
        self.values = values
        self.types = types
        # Compute functions take a constant beside an expression as an expression only.
        self.lift = pc.scalar if any(isinstance(value, pc.Expression) for value in values.values()) else _same

    def visit(self, node: ast.AST) -> Any:
        if (name := _column(node)) is not None:
            return self.values[name]
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._refused(node)
        return method(node)

    def _refused(self, node: ast.AST) -> InputError:
        shown = ast.unparse(node)
        return InputError(f"input.filter={self.text}: {shown} is not allowed: a filter is made of {ALLOWED}")

    def _boolop(self, node: ast.BoolOp) -> Any:
        join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        found = self.visit(node.values[0])
        for value in node.values[1:]:
            found = join(found, self.visit(value))
        return found

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return pc.invert(self.visit(node.operand))
        if isinstance(node.op, ast.USub):
            return pc.negate_checked(self.visit(node.operand))
        raise self._refused(node)

    def _binop(self, node: ast.BinOp) -> Any:
        if type(node.op) not in ARITHMETIC:
            raise self._refused(node)
        left, right = self._pair(node.left, node.right)
        return ARITHMETIC[type(node.op)](left, right)

    def _compare(self, node: ast.Compare) -> Any:
        found = None
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            one = self._comparison(node, left, op, right)
            found = one if found is None else pc.and_kleene(found, one)
        return found

    def _comparison(self, node: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(op, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._refused(node)
            missing = pc.is_null(self.visit(left))
            return missing if isinstance(op, ast.Is) else pc.invert(missing)
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(right, (ast.List, ast.Tuple, ast.Set)):
                raise self._refused(node)
            type = self._type(left)
            values = [_scalar(self._constant_value(item), type) for item in right.elts]
            inside = pc.is_in(self.visit(left), value_set=pa.array([value.as_py() for value in values], type))
            return inside if isinstance(op, ast.In) else pc.and_kleene(pc.invert(inside), pc.is_valid(self.visit(left)))
        return COMPARISONS[type_of(op)](*self._pair(left, right))

    def _pair(self, left: ast.expr, right: ast.expr) -> tuple[Any, Any]:
        """Both sides, a constant in the type of the column that it is held against."""
        sides = []
        for side, other in ((left, right), (right, left)):
            if isinstance(side, ast.Constant):
                sides.append(self.lift(_scalar(side.value, self._type(other))))
            else:
                sides.append(self.visit(side))
        return sides[0], sides[1]

    def _constant(self, node: ast.Constant) -> Any:
        return self.lift(_scalar(self._constant_value(node), None))

    def _constant_value(self, node: ast.expr) -> Any:
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
        if not isinstance(inner, ast.Constant) or not isinstance(inner.value, (str, int, float, bool, type(None))):
            raise self._refused(node)
        return -inner.value if negative else inner.value  # type: ignore[operator]

    def _call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if node.keywords or not node.args or (name != "len" and name not in FUNCTIONS):
            raise self._refused(node)
        value = self.visit(node.args[0])
        if name == "len" and len(node.args) == 1:
            type = self._type(node.args[0])
            is_text = type is None or pa.types.is_string(type) or pa.types.is_large_string(type)
            return pc.utf8_length(value) if is_text else pc.list_value_length(value)
        try:
            if name == "len":
                raise self._refused(node)
            return FUNCTIONS[name](value, *(self._constant_value(argument) for argument in node.args[1:]))
        except TypeError as error:
            raise self._refused(node) from error

    def _type(self, node: ast.expr) -> pa.DataType | None:
        """The type of a column, of what is in a dictionary for one that is; None for anything computed."""
        name = _column(node)
        type = None if name is None else self.types[name]
        return type.value_type if isinstance(type, pa.DictionaryType) else type


type_of: Callable[[Any], Any] = type


def _same(value: Any) -> Any:
    return value


def _scalar(value: Any, type: pa.DataType | None) -> pa.Scalar:
    """A constant: as a decimal beside one, as a date or time where its text is compared with one."""
    if type is not None and pa.types.is_decimal(type) and isinstance(value, (int, float)):
        return pa.scalar(Decimal(repr(value)))
    scalar = pa.scalar(value)
    if type is None or not isinstance(value, str) or pa.types.is_string(type):
        return scalar
    if isinstance(type, pa.TimestampType) and type.tz is not None:
        # Text without an offset is meant in the column's zone.
        try:
            return scalar.cast(type)
        except pa.ArrowInvalid:
            return pc.assume_timezone(scalar.cast(pa.timestamp(type.unit)), type.tz)
    return scalar.cast(type) if pa.types.is_temporal(type) else scalar

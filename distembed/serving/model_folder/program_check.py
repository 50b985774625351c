"""Whether a program is plain: tensors and PyTorch's operations on them, so that loading runs no code of its maker.

``torch.export.load`` is not safe by itself. In torch 2.13 a crafted file makes it run code in each of these ways:

- it unpickles weights that are marked as pickles, constants, sample inputs, and all formats of earlier versions;
- it loads shared libraries of AOTInductor from the archive;
- it evaluates texts as Python: expressions of sizes, and guards.

So the archive is first read here, by torch's own reader, and compared with the output of
:func:`~distembed.serving.export.programs.save_program`: records of known names, raw tensors, operators of ATen, and
names and expressions of a few characters. (Names become variables in the source of a function, and operators are looked
up among all operators of the process.) This is no sandbox: a program may still compute for long or take much memory,
and the libraries that read it may have faults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader

from distembed.base.errors import UserError

_MODEL = "models/model.json"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"
_RECORDS = re.compile(
    r"models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)|data/sample_inputs/model\.pt"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|(archive_)?version|archive_format|byteorder"
    r"|\.data/(version|serialization_id|alignment)",
    re.ASCII,
)

_WORDS = re.compile(r"[\w.+\-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*|", re.ASCII)
_FUNCTIONS = (
    "Integer Add Mul Max Min Eq Ne Equality Unequality GreaterThan LessThan StrictGreaterThan StrictLessThan And Or "
    "Not FloorDiv ModularIndexing PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv TruncToInt RoundToInt ToFloat "
    "IntTrueDiv"
)
_SYMBOL = r"Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)"
_EXPRESSION = re.compile(
    rf"(?: |\d++|[su]\d++|{_SYMBOL}|(?:{'|'.join(_FUNCTIONS.split())})\(|[-+/()<>=,&|~]|\*(?!\*)|true|false)*", re.ASCII
)
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)", re.ASCII)
_READS_FILES = {"from_file"}
_ON_NUMBERS = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|torch\.sym_(max|min|not|float|int|sum)|math\.(trunc|ceil|floor)",
    re.ASCII,
)
_CODE = {"as_graph", "as_operator", "as_custom_obj", "custom_obj", "token"}
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


def require_plain_program(file: Path) -> None:
    """Makes sure that the program of a file runs no code when it is loaded, and has operators of PyTorch alone.

    Raises:
        UserError: It holds anything else, is damaged, or cannot be read.
    """
    try:
        reader = PT2ArchiveReader(str(file))
        names = reader.get_file_names()
        for name in names:
            if not _RECORDS.fullmatch(name):
                raise _Foreign("the record", name)
        if reader.read_bytes(_SAMPLE_INPUTS):
            raise _Foreign("pickled sample inputs in", _SAMPLE_INPUTS)
        for name in (_MODEL, *_CONFIGS):
            _check(name, json.loads(reader.read_bytes(name)), "")
    except _Foreign as found:
        raise UserError(
            f"{file} is not loaded: it has {found}, which `distembed export` does not write and which may run code. "
            "Export the run again, and take exported models from people alone whose code you would run."
        ) from None
    except (OSError, RuntimeError, AssertionError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is no program of torch.export, or it is damaged ({error}); export again.") from error


class _Foreign(Exception):
    """A part that no exported model has."""

    def __init__(self, kind: str, text: object) -> None:
        shown = repr(text)
        super().__init__(f"{kind} {shown if len(shown) < 100 else shown[:100] + '...'}")


def _check(record: str, value: Any, key: str) -> None:
    """Raises :class:`_Foreign` unless a value of a JSON record, and all values within, are allowed.

    A key with a rule (:data:`_RULES`) decides on the whole value. Otherwise names and texts have to be plain words, no
    key may be in :data:`_CODE`, and the entries of a list are checked under the list's key.
    """
    rule = _RULES.get(key)
    if rule is not None:
        if not rule(value):
            raise _Foreign(f"the {key} in {record}", value)
    elif isinstance(value, dict):
        for name, entry in value.items():
            if name in _CODE or not _WORDS.fullmatch(name):
                raise _Foreign(f"in {record}", name)
            _check(record, entry, name)
    elif isinstance(value, list):
        for entry in value:
            _check(record, entry, key)
    elif isinstance(value, str) and not _WORDS.fullmatch(value):
        raise _Foreign(f"the {key} in {record}", value)


def _is_identifier(value: Any) -> bool:
    return value is None or isinstance(value, str) and _IDENTIFIER.fullmatch(value) is not None


def _is_expression(value: Any) -> bool:
    return isinstance(value, str) and _EXPRESSION.fullmatch(value) is not None


def _is_operator(value: Any) -> bool:
    """Returns whether a target is an ATen operator with a kernel, which reads no files, or an operator on numbers."""
    if not isinstance(value, str):
        return False
    if _ON_NUMBERS.fullmatch(value):
        return True
    matched = _ATEN.fullmatch(value)
    if matched is None or matched[1] in _READS_FILES:
        return False
    name, overload = matched.groups()
    try:
        operator = getattr(getattr(torch.ops.aten, name), overload)
    except (AttributeError, RuntimeError):
        return False
    return isinstance(operator, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(operator.name())


def _is_tree(value: Any) -> bool:
    """Returns whether a text is torch's JSON of nested tuples, lists and dictionaries of inputs or outputs."""
    try:
        protocol, tree = json.loads(value)
    except (TypeError, ValueError):
        return False
    return protocol == 1 and _is_plain_tree(tree)


def _is_plain_tree(tree: Any) -> bool:
    if not isinstance(tree, dict) or tree.keys() != {"type", "context", "children_spec"}:
        return False
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if kind not in _TREES or not isinstance(children, list):
        return False
    names = context if context is None or isinstance(context, str) else ""
    return re.fullmatch(r'[\w", \[\]]*', names or "", re.ASCII) is not None and all(map(_is_plain_tree, children))


def _is_ranges(value: Any) -> bool:
    """Returns whether a value maps size expressions to their bounds, for example ``{"s0": {"min_val": 2}}``."""
    if not isinstance(value, dict):
        return False
    bounds = [number for range_ in value.values() for number in range_.values()]
    return all(number is None or isinstance(number, int) for number in bounds) and all(map(_is_expression, value))


def _is_empty(value: Any) -> bool:
    return value in (None, {}, [])


def _is_raw_tensor(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(weight|tensor)_\d+", value, re.ASCII) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_RULES: Mapping[str, Callable[[Any], bool]] = {
    "name": _is_identifier,
    "as_name": _is_identifier,
    "forward_arg_names": lambda names: names is None or isinstance(names, list) and all(map(_is_identifier, names)),
    "expr_str": _is_expression,
    "range_constraints": _is_ranges,
    "target": _is_operator,
    "in_spec": _is_tree,
    "out_spec": _is_tree,
    "metadata": _is_empty,
    "guards_code": _is_empty,
    "treespec_namedtuple_fields": _is_empty,
    "path_name": _is_raw_tensor,
    "use_pickle": lambda value: value is False,
    "as_string": _is_text,  # arguments such as messages, which are written as quoted texts
}
"""The rule for the value of a key; other keys have numbers, words, and lists and dictionaries of these."""

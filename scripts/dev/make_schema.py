"""Writes tpplan/plan/plan.schema.json from the dataclasses of tpplan.plan.plan, which are what is read; the tests
compare.

python scripts/dev/make_schema.py
"""

import dataclasses
import inspect
import json
import types
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Union, get_args, get_origin, get_type_hints

from tpplan.core.strict_json import Above, AtLeast, Text
from tpplan.plan.plan import SCHEMA_VERSION
from tpplan.plan.plan_entries import PlanEntries

SCHEMA_PATH = Path(__file__).resolve().parents[2] / "tpplan" / "plan" / "plan.schema.json"

Schema = dict[str, object]


def plan_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a plan."""
    definitions: dict[str, Schema] = {}
    root = _object(PlanEntries, definitions)
    properties = root["properties"]
    assert isinstance(properties, dict)
    properties["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tpplan plan",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(hint: object, definitions: dict[str, Schema]) -> Schema:
    """The schema of a type as tpplan.core.strict_json reads it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(_schema(arguments[0], definitions), arguments[1]) if not _is_text(hint) else _text(arguments[1])
    if origin in (Union, types.UnionType):
        (inner,) = (option for option in arguments if option is not type(None))
        return _schema(inner, definitions)
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    assert isinstance(hint, type)
    if dataclasses.is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if issubclass(hint, StrEnum):
        return {"enum": [str(member) for member in hint]}
    return {
        str: {"type": "string", "minLength": 1},
        int: {"type": "integer"},
        float: {"type": "number"},
        bool: {"type": "boolean"},
    }[hint].copy()


def _is_text(hint: object) -> bool:
    return isinstance(get_args(hint)[1], Text)


def _text(text: Text) -> Schema:
    return {"type": "string", "pattern": f"^(?:{text.pattern})$"}


def _bounded(schema: Schema, bound: object) -> Schema:
    match bound:
        case AtLeast():
            return {**schema, "minimum": _number(bound.bound)}
        case Above():
            return {**schema, "exclusiveMinimum": _number(bound.bound)}
        case _:
            raise TypeError(f"no JSON Schema for {bound}")


def _number(bound: float) -> int | float:
    return int(bound) if bound == int(bound) else bound


def _object(cls: type, definitions: dict[str, Schema]) -> Schema:
    hints = get_type_hints(cls, include_extras=True)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint)}
    return {
        "description": " ".join(inspect.getdoc(cls).split()) if inspect.getdoc(cls) else "",
        "type": "object",
        "properties": {name: _schema(hint, definitions) for name, hint in hints.items()},
        "required": [name for name in hints if name not in optional],
        "additionalProperties": False,
    }


def schema_text() -> str:
    """The file's content."""
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {SCHEMA_PATH}")

"""JSON whose numbers keep their spelling."""

from __future__ import annotations

import json
from typing import Any


class Number(str):
    """A number of a file in its own spelling: text for a template, a number again for an export."""


def loads(text: str) -> Any:
    """Parse JSON; numbers keep their spelling, since an answer of 3.10 must not be learnt as 3.1. NaN is a missing value."""
    return json.loads(
        text, parse_int=Number, parse_float=Number, parse_constant=lambda name: None if name == "NaN" else name
    )


def json_type(value: Any) -> str:
    """JSON's name for a value's type."""
    names = {
        dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number", Number: "number",
    }  # fmt: skip
    return "null" if value is None else names.get(type(value), type(value).__name__)

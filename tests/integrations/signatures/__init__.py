"""Interfaces of other frameworks, recorded as facts, and how to compare a class with them."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any


def recorded(name: str) -> dict[str, Any]:
    """The record of this name."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text())


def parameters(cls: type, method: str) -> list[str]:
    """Parameter names of a method in order, without self; "*" starts the keyword-only ones."""
    names: list[str] = []
    for parameter in list(inspect.signature(getattr(cls, method)).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


def mismatches(cls: type, wanted: dict[str, list[str]]) -> list[str]:
    """Methods whose parameters differ from the record. Further ones may follow if they have defaults."""
    wrong = []
    for method, names in wanted.items():
        got = parameters(cls, method)
        more = [inspect.signature(getattr(cls, method)).parameters[name] for name in got[len(names) :] if name != "*"]
        if got[: len(names)] != names or any(parameter.default is parameter.empty for parameter in more):
            wrong.append(f"{cls.__name__}.{method}{got}, recorded {names}")
    return wrong


def num_returned(result: object) -> int:
    """How many values a call has returned."""
    return len(result) if isinstance(result, tuple) else 1

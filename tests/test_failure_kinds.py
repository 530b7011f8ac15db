"""failure_kinds.toml says for every known kind of fault which test covers it, and names only tests that exist."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = tomllib.loads((ROOT / "tests" / "failure_kinds.toml").read_text())

# the letters are explained in the list
KNOWN = """
A2 A3 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14
B2 B4 B5 B6 B7 B8 B9 B10 B11
C1 C2 C3 C4 C5
D1 D2 D3 D4 D5 D6 D7 D8
E2 E3 E4 E5
F1 F2 F3 F4 F5 F6
G1 G2 G3 G4 G5 G6 G8 G9
H2 H3 H4 H5 H6
I1 I2 I3 I4 I5 I6 I7 I8
J1 J3 J6 J7 J8
K1 K2 K3 K4 K5 K6 K7
L1 L2 L3 L4
M3 M4 M5 M6 M7
N2 N3 N5 N6 N7
O2 O3 O4 O6 O7
P3 P4 P5
Q4 Q5 Q6 Q7 Q8 Q9 Q10
R2 R3 R4 R5
S2 S3 S4 S5 S6 S7
T2 T3 T4 T5 T6
U1 U2 U3 U4 U5
V2 V3 V4 V5 V6 V7 V8
W1 W2 W3 W4 W5 W6
X1 X2 X3 X4 X5 X6 X7
Y1 Y2 Y3 Y4 Y5 Y6 Y7 Y8
""".split()  # noqa: SIM905


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [("", node) for node in tree.body]
    found += [(f"{group.name}::", node) for group in classes for node in group.body]
    return {
        f"{group}{node.name}" for group, node in found if isinstance(node, ast.FunctionDef) and "test_" in node.name
    }


def test_every_kind_is_listed_once() -> None:
    assert list(KINDS) == KNOWN  # a second entry of one id is no TOML


@pytest.mark.parametrize("kind", KNOWN)
def test_kind(kind: str) -> None:
    entry = KINDS[kind]
    said = set(entry) - {"meaning"}
    assert said in ({"tests"}, {"not_here"}, {"tests", "not_yet"}), entry
    assert all(len(entry[name]) > 20 for name in {"meaning", *said - {"tests"}})
    if "tests" not in entry:
        return
    assert entry["tests"]
    for name in entry["tests"]:
        path, _, test = name.partition("::")
        assert test in names_in(path), f"{name} does not exist"

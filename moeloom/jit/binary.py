"""What a compilation gives: machine code, and what each kernel uses, as read from the compiler's output."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, dataclass, fields

# A parameter's type in PTX and its code in `struct`. PTX does not tell signed from unsigned; ours are signed.
_CODES = {"8": "b", "16": "h", "32": "i", "64": "q", "f32": "f", "f64": "d"}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\s[^,\[]*(?:\[(\d+)\])?")
_FUNCTION = re.compile(r"Function properties for (?:'?)([\w$]+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_COMPILING = re.compile(r"Compiling entry function '([\w$]+)'")
_KNOWN = re.compile(r"bytes gmem|Compile time =|^\s*$")


@dataclass(frozen=True)
class Usage:
    """One kernel's use of the machine.

    symbol: its name in the machine code. parameters: the `struct` code of each ("q", "i", "f", ...; "64s": 64 bytes by
    value). registers: per thread. stack_bytes: local memory per thread, spills included. shared_bytes: static only.
    max_threads, min_blocks: its launch bounds, 0 if it has none.
    """

    symbol: str
    parameters: tuple[str, ...]
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    max_threads: int
    min_blocks: int

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """The size of each parameter."""
        return tuple(struct.calcsize("=" + code) for code in self.parameters)


FORMAT = " ".join(field.name for field in fields(Usage))  # of what the cache keeps


@dataclass(frozen=True)
class Binary:
    """Machine code for `ARCHITECTURE`. kernels: by C++ expression. notes: what else the compiler said."""

    name: str
    cubin: bytes
    kernels: dict[str, Usage]
    notes: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """As kept in the cache: one line of JSON, then the machine code."""
        kernels = {expression: asdict(usage) for expression, usage in self.kernels.items()}
        head = {"name": self.name, "kernels": kernels, "notes": self.notes}
        return json.dumps(head).encode() + b"\n" + self.cubin

    @classmethod
    def from_bytes(cls, data: bytes) -> Binary:
        """The inverse of `to_bytes`."""
        line, _, cubin = data.partition(b"\n")
        head = json.loads(line)
        kernels = {
            expression: Usage(**{**usage, "parameters": tuple(usage["parameters"])})
            for expression, usage in head["kernels"].items()
        }
        return cls(head["name"], cubin, kernels, tuple(head["notes"]))


def read_usage(symbols: dict[str, str], ptx: str, log: str) -> tuple[dict[str, Usage], tuple[str, ...]]:
    """Usage of each kernel (expression to symbol in `symbols`), and the log's other lines."""
    entries = {name: (parameters, bounds) for name, parameters, bounds in _ENTRY.findall(ptx)}
    measured, notes = _read_log(log)
    kernels = {}
    for expression, symbol in symbols.items():
        parameters, bounds = entries[symbol]
        codes = tuple(
            f"{size}s" if size else _CODES.get(kind + bits) or _CODES[bits]
            for kind, bits, size in _PARAMETER.findall(parameters)
        )
        kernels[expression] = Usage(
            symbol,
            codes,
            **measured[symbol],
            max_threads=_product(re.search(r"\.(?:max|req)ntid\s+([\d, ]+)", bounds)),
            min_blocks=_product(re.search(r"\.minnctapersm\s+(\d+)", bounds)),
        )
    return kernels, notes


def _product(match: re.Match[str] | None) -> int:
    product = 1 if match else 0
    for number in match[1].split(",") if match else ():
        product *= int(number)
    return product


def _read_log(log: str) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    """Numbers by symbol, and every line that is not about a kernel's numbers."""
    measured: dict[str, dict[str, int]] = {}
    notes = []
    kernel = function = ""
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            kernel = match[1]
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            frame, stores, loads = map(int, match.groups())
            if function == kernel:
                measured[kernel] = {"stack_bytes": frame, "spill_store_bytes": stores, "spill_load_bytes": loads}
            else:
                notes.append(f"{function} is not inlined: {match[0]}")
        elif match := re.search(r"Used (\d+) registers", line):
            numbers = measured[kernel]
            numbers["registers"] = int(match[1])
            stack = re.search(r"(\d+) bytes cumulative stack size", line)
            local = re.search(r"(\d+) bytes lmem", line)
            shared = re.search(r"(\d+) bytes smem", line)
            numbers["stack_bytes"] = max(numbers["stack_bytes"], *(int(m[1]) if m else 0 for m in (stack, local)))
            numbers["shared_bytes"] = int(shared[1]) if shared else 0
        elif not _KNOWN.search(line):
            notes.append(line)
    return measured, tuple(notes)

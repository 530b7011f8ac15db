"""NVRTC: one source in, one binary out. The headers go in as texts; no folder is searched."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from moeloom.errors import CapabilityError, KernelError
from moeloom.jit.binary import Binary, read_usage
from moeloom.jit.bindings import INSTALL, nvrtc
from moeloom.jit.source import ARCHITECTURE, Source

MIN_VERSION = (13, 0)


@functools.cache
def version() -> str:
    """The compiler's release and build, such as "V13.0.88 CL-36424714".

    `nvrtcVersion` tells neither; they are in what it writes for an empty source (10 ms, once per process).
    """
    found = tuple(_value(nvrtc().nvrtcVersion()))
    if found < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise CapabilityError(f"kernels need NVRTC {needed}, found {'.'.join(map(str, found))}; {INSTALL}")
    with _Program("version", "", {}) as program:
        program.compile(("--gpu-architecture=compute_90a",))
        return " ".join(re.findall(r"V\d[\d.]+|CL-\d+", program.ptx()))


def run(source: Source, headers: dict[str, str]) -> Binary:
    """Compile without any cache. Releases the interpreter lock meanwhile. Raises KernelError with the log."""
    with _Program(f"{source.name}.cu", source.text, headers) as program:
        for expression in source.kernels:
            program.want(expression)
        try:
            program.compile(source.all_options)
        except KernelError:
            raise KernelError(_explanation(source, headers, program.log())) from None
        symbols = {expression: program.symbol(expression) for expression in source.kernels}
        kernels, notes = read_usage(symbols, program.ptx(), program.log())
        return Binary(source.name, program.cubin(), kernels, notes)


def _explanation(source: Source, headers: dict[str, str], log: str) -> str:
    lines = [f"{number:4} | {line}" for number, line in enumerate(source.text.splitlines(), 1)]
    about = f"{source.name} does not compile for {ARCHITECTURE} by NVRTC {version()}"
    known = f"kernels: {', '.join(source.kernels)}; headers found: {', '.join(headers) or 'none'}"
    return "\n".join([about, log.strip(), f"{source.name}.cu:", *lines, known])


def _value(result: tuple[Any, ...]) -> Any:
    """A call's result without its status; raises KernelError if that is not success."""
    status, *values = result
    if int(status):
        raise KernelError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values


class _Program:
    """An `nvrtcProgram`, destroyed at the end of its `with`."""

    def __init__(self, name: str, text: str, headers: dict[str, str]) -> None:
        self._nvrtc = nvrtc()
        texts = [header.encode() for header in headers.values()]
        names = [header.encode() for header in headers]
        self._handle = _value(self._nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(headers), texts, names))

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._nvrtc.nvrtcDestroyProgram(self._handle)

    def want(self, expression: str) -> None:
        _value(self._nvrtc.nvrtcAddNameExpression(self._handle, expression.encode()))

    def compile(self, options: tuple[str, ...]) -> None:
        _value(self._nvrtc.nvrtcCompileProgram(self._handle, len(options), [option.encode() for option in options]))

    def symbol(self, expression: str) -> str:
        return _value(self._nvrtc.nvrtcGetLoweredName(self._handle, expression.encode())).decode()

    def log(self) -> str:
        return self._text(self._nvrtc.nvrtcGetProgramLogSize, self._nvrtc.nvrtcGetProgramLog)

    def ptx(self) -> str:
        return self._text(self._nvrtc.nvrtcGetPTXSize, self._nvrtc.nvrtcGetPTX)

    def cubin(self) -> bytes:
        return self._bytes(self._nvrtc.nvrtcGetCUBINSize, self._nvrtc.nvrtcGetCUBIN)

    def _bytes(self, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
        data = bytearray(_value(size(self._handle)))  # filled in place
        _value(get(self._handle, data))
        return bytes(data)

    def _text(self, size: Callable[..., Any], get: Callable[..., Any]) -> str:
        return self._bytes(size, get).rstrip(b"\0").decode(errors="replace")

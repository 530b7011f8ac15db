"""Kernels on a device, and their launch: what can be prepared is prepared once."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from typing import Any

import torch

from moeloom.errors import CapabilityError, KernelError
from moeloom.jit.binary import Binary, Usage
from moeloom.jit.bindings import driver
from moeloom.jit.source import ARCHITECTURE

FREE_SHARED_BYTES = 48 * 1024  # static and dynamic; more must be asked for
MAX_CONFIGS = 1024  # kept per kernel

Dimensions = int | tuple[int, int, int]
_loaded: dict[tuple[bytes, int], dict[str, Kernel]] = {}
_loading = threading.Lock()


def load(binary: Binary, device: torch.device) -> dict[str, Kernel]:
    """The kernels of a binary on a device, by C++ expression; loaded at once, kept as long as the process lives.

    Raises CapabilityError if the device is not `ARCHITECTURE`, KernelError with the driver's word.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(index)
        raise CapabilityError(f"device {index} ({name}) is sm_{capability[0]}{capability[1]}, needed: {ARCHITECTURE}")
    key = (hashlib.sha256(binary.cubin).digest(), index)
    with _loading, torch.cuda.device(index):
        if key not in _loaded:
            torch.empty(1, device=f"cuda:{index}")  # makes the context
            library = _value(driver().cuLibraryLoadData(binary.cubin, [], [], 0, [], [], 0), f"loading {binary.name}")
            _loaded[key] = {
                expression: Kernel(expression, usage, library, index) for expression, usage in binary.kernels.items()
            }
        return _loaded[key]


class Kernel:
    """A kernel on one device; `load` makes it. Launches are safe from any thread."""

    def __init__(self, expression: str, usage: Usage, library: Any, device: int) -> None:
        self.expression = expression
        self.usage = usage
        self.device = device
        cuda = driver()
        self._kernel = _value(cuda.cuLibraryGetKernel(library, usage.symbol.encode()), expression)
        self._function = _value(cuda.cuKernelGetFunction(self._kernel), expression)
        _value(cuda.cuFuncLoad(self._function), expression)  # not at the first launch, when another may be waiting
        self._start = cuda.cuLaunchKernelEx
        self._layout = struct.Struct("=" + "".join(usage.parameters))
        self._blocks = [(i, int(code[:-1])) for i, code in enumerate(usage.parameters) if code.endswith("s")]
        self._frames = threading.local()
        self._configs: dict[tuple, Any] = {}
        self._shared_allowed = FREE_SHARED_BYTES - usage.shared_bytes

    def launch(
        self,
        stream: int,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        args: tuple,
        cluster: Dimensions | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch on a raw stream of the current device.

        grid: in thread blocks, also with a cluster. args: one per parameter: int for integers and addresses, float,
        bytes for a struct by value (its exact size). Raises ValueError for args that do not fit, KernelError.
        """
        key = (stream, grid, block, shared_bytes, cluster, cooperative)
        config = self._configs.get(key)
        if config is None:
            config = self._configure(key)
        try:
            buffer, addresses = self._frames.of_thread
        except AttributeError:
            buffer, addresses = self._new_frame()
        try:
            self._layout.pack_into(buffer, 0, *args)
        except (struct.error, TypeError) as error:
            raise ValueError(f"args of {self.expression} must fit {self.usage.parameters}: {error}") from None
        for i, size in self._blocks:  # pack_into cuts or fills those silently
            if len(args[i]) != size:
                raise ValueError(f"args[{i}] of {self.expression} has {len(args[i])} bytes, the kernel's has {size}")
        (status,) = self._start(config, self._function, addresses, 0)
        if status:
            raise KernelError(f"{self.expression} with grid {grid}, block {block}, {shared_bytes} B: {status.name}")

    def _new_frame(self) -> tuple[Any, int]:
        """Memory for one thread's arguments, and the address of the list of their addresses."""
        buffer = ctypes.create_string_buffer(max(1, self._layout.size))
        sizes = self.usage.parameter_bytes
        base = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(1, len(sizes)))(*[base + sum(sizes[:i]) for i in range(len(sizes))])
        self._frames.keep = pointers
        self._frames.of_thread = buffer, ctypes.addressof(pointers)
        return self._frames.of_thread

    def _configure(self, key: tuple) -> Any:
        stream, grid, block, shared_bytes, cluster, cooperative = key
        cuda = driver()
        if shared_bytes > self._shared_allowed:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            status = cuda.cuKernelSetAttribute(attribute, shared_bytes, self._kernel, cuda.CUdevice(self.device))
            _value(status, f"{shared_bytes} B of shared memory for {self.expression}")
            self._shared_allowed = shared_bytes
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        attributes = []
        if cluster is not None:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = _three(cluster)
            attributes.append(attribute)
        if cooperative:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        if len(self._configs) >= MAX_CONFIGS:
            self._configs.clear()
        self._configs[key] = config
        return config


def _three(dimensions: Dimensions) -> tuple[int, int, int]:
    return (dimensions, 1, 1) if isinstance(dimensions, int) else dimensions


def _value(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status):
        raise KernelError(f"{what}: {status.name}")
    return values[0] if values else None

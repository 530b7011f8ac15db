"""Source text to loaded kernel, without a build step or a toolkit; it knows nothing of experts.

Example::

    source = jit.Source("scale", '#include "scale.cuh"', ("moeloom::scale<4>",))
    binary = jit.compile(source)                            # NVRTC, or the user's cache; needs no GPU
    scale = jit.load(binary, device)["moeloom::scale<4>"]
    scale.launch(stream, grid, block, shared_bytes, (x.data_ptr(), 7, parameter_block))
"""

from moeloom.jit.binary import Binary, Usage
from moeloom.jit.build import compile, prewarm
from moeloom.jit.declared import Declared, declared_in, problems
from moeloom.jit.kernel import Kernel, load
from moeloom.jit.source import Source

__all__ = ["Source", "Binary", "Usage", "compile", "prewarm", "Kernel", "load", "Declared", "declared_in", "problems"]

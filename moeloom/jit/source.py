"""What is compiled: a few generated lines, the headers they reach, and the kernels wanted from them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
ARCHITECTURE = "sm_90a"
# Two kernels that share source must give the same bits, so nothing is fused or approximated unless it is written so.
OPTIONS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--std=c++20",
    "--fmad=false",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",  # registers, spills and stack into the log
    "--no-cache",  # what NVRTC takes from its own cache comes without that log
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One compilation.

    name: for messages. text: CUDA C++, normally an `#include` and what is generated. kernels: C++ expressions that name
    the kernels, such as "moeloom::scale<4>"; they are instantiated. folder: where headers are. options: more of
    NVRTC's, such as "--generate-line-info".
    """

    name: str
    text: str
    kernels: tuple[str, ...]
    folder: Path = KERNELS
    options: tuple[str, ...] = ()

    @property
    def all_options(self) -> tuple[str, ...]:
        """Every option that NVRTC gets."""
        return OPTIONS + self.options

    def headers(self) -> dict[str, str]:
        """Name to text of every header that the text reaches by `#include "..."`, within comments too.

        NVRTC gets these texts and no folder to search, so what is hashed is what is compiled.
        """
        found: dict[str, str] = {}
        texts = [self.text]
        while texts:
            for name in _INCLUDE.findall(texts.pop()):
                path = self.folder / name
                if name not in found and path.is_file():
                    found[name] = path.read_text()
                    texts.append(found[name])
        return dict(sorted(found.items()))

    def key(self, headers: dict[str, str], compiler: str) -> str:
        """A hash of all that the result depends on."""
        parts = [compiler, str(len(self.all_options)), *self.all_options, str(len(self.kernels)), *self.kernels]
        parts += [self.text, *(part for header in headers.items() for part in header)]
        digest = hashlib.sha256()
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

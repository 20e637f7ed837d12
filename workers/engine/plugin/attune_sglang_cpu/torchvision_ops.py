"""Make torchvision importable where its compiled library cannot be loaded.

SGLang imports torchvision at start-up. The wheel on PyPI is built for CUDA: with a CPU build of torch its operators
are missing and the import fails, although text models never call them. It is enough to declare the operators first.
"""

import importlib.util
from pathlib import Path

import torch

OPERATORS = (
    "nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d",
    "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
)  # fmt: skip

_declared: list[torch.library.Library] = []  # a Library removes its operators when it is garbage-collected


def declare_missing() -> None:
    if _declared or _can_load_compiled_library():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)


def _can_load_compiled_library() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # torchvision is not installed
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return True

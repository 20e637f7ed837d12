"""Lets torchvision be imported where its compiled half cannot load.

SGLang imports torchvision at start. PyPI's wheel is built for CUDA: beside a CPU torch its operators are
missing and the import dies, though text models never call one. Declaring their names is enough, if it comes
first.
"""

import importlib.util
from pathlib import Path

import torch

OPERATORS = (
    "nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d",
    "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
)  # fmt: skip

_declared: list[torch.library.Library] = []  # a Library forgets its operators when it is collected


def declare_missing() -> None:
    if _declared or _compiled_half_loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)


def _compiled_half_loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # no torchvision at all: nothing to stand in for
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return True

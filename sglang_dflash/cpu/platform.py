"""Entry points that run before SGLang imports what exists only on machines with a GPU.

Two moments are early enough, and both are needed:

* `torch.backends`: PyTorch calls it at the end of `import torch`, hence before `sglang.srt.utils.common` imports
  torchvision, which is the first thing that `import sglang` does.
* `sglang.srt.platforms`: SGLang calls it when `sglang.srt.platforms.current_platform` is first read, hence before
  any module of SGLang imports `sgl_kernel`.

Neither does anything unless SGLang's CPU engine is asked for and there is no CUDA device. This module is imported
with torch in every process, so it imports nothing heavy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import torch

# Kept alive: a `Library` takes its definitions back when it is collected.
_torchvision_ops: torch.library.Library | None = None


def cpu_engine() -> bool:
    """Whether SGLang's CPU engine is asked for, on a machine where it is the only choice.

    Reads SGLang's variable as `sglang.srt.platforms._is_cpu_available` does. That function cannot be called here:
    without :func:`declare_torchvision_ops`, importing it fails.
    """
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" and not torch.cuda.is_available()


def declare_torchvision_ops() -> None:
    """Entry point of the group `torch.backends`: make `import torchvision` possible beside a CPU build of PyTorch.

    PyPI has torchvision for CUDA only. Its extension does not load beside a CPU build, and then
    `torchvision._meta_registrations` fails because two operators that it describes do not exist. Their schemas are
    all it needs; nothing that SGLang serves text with calls them.
    """
    global _torchvision_ops
    if _torchvision_ops is not None or not cpu_engine() or _torchvision_extension_loads():
        return
    _torchvision_ops = torch.library.Library("torchvision", "FRAGMENT")
    _torchvision_ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def activate() -> None:
    """Entry point of the group `sglang.srt.platforms`: provide `sgl_kernel`; never claims the platform."""
    declare_torchvision_ops()
    if cpu_engine() and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = importlib.import_module("sglang_dflash.cpu.sgl_kernel")


def _torchvision_extension_loads() -> bool:
    # As `torchvision.extension._load_library` does; importing it would import torchvision.
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
            return True
    except OSError:
        return False
    return False

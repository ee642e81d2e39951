"""Provide the modules that exist only on machines with a GPU, before SGLang imports them.

:func:`activate` is an entry point of two groups, because SGLang has no moment that is early enough for both of its
parts:

* `torch.backends`: PyTorch calls it at the end of `import torch`, hence before `sglang.srt.utils.common`
  imports torchvision, which is among the first things that `import sglang` does.
* `sglang.srt.platforms`: SGLang calls it when `sglang.srt.platforms.current_platform` is first read, hence
  before any module of SGLang imports `sgl_kernel`. It is enough where torchvision works, with PyTorch's
  autoload off.

This module is imported with torch in every process, so it imports nothing heavy. It does not import torch at the top:
torch would call :func:`activate` before it is defined if this module is imported first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Kept alive: a `Library` takes its definitions back when it is collected.
_torchvision_ops: torch.library.Library | None = None


def cpu_engine() -> bool:
    """Return True if SGLang's CPU engine is asked for, on a machine without a GPU.

    Reads the environment variable as `sglang.srt.platforms._is_cpu_available` does, which cannot be called here: its
    import would import torchvision.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    import torch

    return not torch.cuda.is_available()


def activate() -> None:
    """Make `import torchvision` and `import sgl_kernel` work if :func:`cpu_engine`; otherwise do nothing.

    May be called twice. Returns None, as it never claims SGLang's platform.
    """
    if not cpu_engine():
        return
    if _torchvision_ops is None and not _torchvision_extension_loads():
        _declare_torchvision_ops()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = importlib.import_module("sglang_dflash_cpu.sgl_kernel")
        sys.modules["sgl_kernel.mamba"] = importlib.import_module("sglang_dflash_cpu.sgl_kernel_mamba")


def _declare_torchvision_ops() -> None:
    """Declare two operators that `import torchvision` needs; serving text calls neither.

    PyPI has torchvision for CUDA only. Its extension does not load with a CPU build of PyTorch, and then
    `torchvision._meta_registrations` fails because two operators that it describes do not exist.
    """
    import torch

    global _torchvision_ops
    _torchvision_ops = torch.library.Library("torchvision", "FRAGMENT")
    _torchvision_ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchvision_extension_loads() -> bool:
    import torch

    # As in `torchvision.extension._load_library`, whose import would import torchvision.
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

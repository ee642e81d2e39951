"""Hardware and versions, for the head of a report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def hardware(device: str) -> str:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        os.uname().machine,
    )
    cores = f"{cpu}, {len(os.sched_getaffinity(0))} cores"
    if device == "cpu":
        return f"CPU only, float32: {cores}"
    # In another process, because torch would keep memory on the GPU.
    query = "import torch; print(torch.cuda.device_count(), 'x', torch.cuda.get_device_name())"
    gpus = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    return f"{gpus}, bfloat16; {cores}"


def versions() -> str:
    """Return the versions of this package, with a hash of its sources, and of the packages that it runs on."""
    names = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "sglang-kernel")
    package = Path(importlib.util.find_spec("sglang_dflash").origin).parent
    sources = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    digest = hashlib.sha256(sources).hexdigest()[:12]
    others = [f"{name} {version}" for name in names if (version := _installed(name))]
    return ", ".join([f"sglang-dflash {_installed('sglang-dflash')} (sources {digest})", *others])


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

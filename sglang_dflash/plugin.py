"""Entry point of the plugin: SGLang calls :func:`register` once in every process of a server."""

from __future__ import annotations

import importlib.metadata

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash.version import __version__

SUPPORTED_SGLANG = "0.5.17"

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def register() -> None:
    """Hook DFLASH into SGLang, or, on a version this package was not made for, refuse DFLASH and nothing else."""
    installed = importlib.metadata.version("sglang")
    if installed != SUPPORTED_SGLANG:
        HookRegistry.register(CREATE_WORKER, _refuse_version, HookType.AROUND)
        HookRegistry.register(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
            _refuse_version,
            HookType.AROUND,
        )
        return
    from sglang_dflash.integration import register as register_integration

    register_integration()


def _refuse_version(original, algorithm, *args, **kwargs):
    if algorithm.is_dflash():
        raise RuntimeError(
            f"sglang-dflash {__version__} serves DFLASH on SGLang {SUPPORTED_SGLANG}, and SGLang "
            f"{importlib.metadata.version('sglang')} is installed; set SGLANG_PLUGINS=none to serve with SGLang's "
            "in-tree DFLASH worker."
        )
    return original(algorithm, *args, **kwargs)

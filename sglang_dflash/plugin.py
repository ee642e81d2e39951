"""Entry point of the plugin: SGLang calls :func:`register` once in every process of a server."""

from __future__ import annotations

import importlib.metadata

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash.version import __version__

SUPPORTED_SGLANG = "0.5.23"

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
HANDLE_SERVER_ARGS = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args"


def register() -> None:
    """Hook DFLASH into SGLang, or, on a version this package was not made for, refuse DFLASH and nothing else."""
    installed = importlib.metadata.version("sglang")
    if installed != SUPPORTED_SGLANG:
        supported = f"sglang-dflash {__version__} serves DFLASH on SGLang {SUPPORTED_SGLANG}"
        _refuse_dflash(f"{supported}, and SGLang {installed} is installed")
        return
    registered = False
    try:
        from sglang_dflash.integration import register as register_integration

        register_integration()
        registered = True
    finally:
        # SGLang logs what a plugin raises and goes on, which would serve DFLASH with its own worker.
        if not registered:
            _refuse_dflash(f"sglang-dflash {__version__} could not be loaded; SGLang has logged why")


def _refuse_dflash(reason: str) -> None:
    def refuse(original, algorithm, *args, **kwargs):
        if algorithm.is_dflash():
            raise RuntimeError(f"{reason}; set SGLANG_PLUGINS=none to serve with SGLang's in-tree DFLASH worker.")
        return original(algorithm, *args, **kwargs)

    for target in (CREATE_WORKER, HANDLE_SERVER_ARGS):
        HookRegistry.register(target, refuse, HookType.AROUND)

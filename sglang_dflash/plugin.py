"""Entry point of the plugin: SGLang calls :func:`register` once in every process of a server, whatever it serves.

SGLang logs what a plugin raises, and what goes wrong with a hook, and goes on: it would serve DFLASH with its own
worker. So a server that is asked for DFLASH is checked in several places that have little to do with each other: where
an SGLang has moved some of them, the others refuse. Other servers are left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash import hooks, ledger
from sglang_dflash.version import __version__

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
RESOLVE_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
# Where nothing else is hooked.
GUARDED = (
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
    "sglang.srt.managers.scheduler.Scheduler.__init__",
)


def register() -> None:
    """Hook DFLASH into SGLang; where that fails, refuse DFLASH and nothing else."""
    registered = False
    try:
        from sglang_dflash.hook_table import register as register_hook_table

        register_hook_table()
        registered = True
    finally:
        if registered:
            # Their own hooks check too (`hook_table`, `server_args.arguments`).
            _guard(GUARDED, hooks.verify)
        else:
            _guard((CREATE_WORKER, RESOLVE_ARGUMENTS, *GUARDED), _refuse)


def _guard(targets: tuple[str, ...], check: Callable[[], None]) -> None:
    def guard(original, *args, **kwargs):
        if any(map(_asks_for_dflash, (*args, *kwargs.values()))):
            check()
        return original(*args, **kwargs)

    for target in targets:
        HookRegistry.register(target, guard, HookType.AROUND)


def _asks_for_dflash(argument: object) -> bool:
    """Of `ServerArgs` or a `SpeculativeAlgorithm` among the arguments of a function of whatever SGLang this is."""
    name = getattr(argument, "speculative_algorithm", None) or getattr(argument, "name", None)
    return isinstance(name, str) and name.upper() == "DFLASH"


def _refuse() -> None:
    # On another SGLang, what differs is why.
    ledger.verify()
    raise RuntimeError(
        f"sglang-dflash {__version__} could not be loaded; SGLang has logged why. Set SGLANG_PLUGINS=none to serve "
        "with SGLang's in-tree DFLASH worker."
    )

"""Entry point of the plugin. SGLang calls :func:`register` once in every process of a server, with any algorithm.

SGLang logs errors of plugins and hooks and continues, and would then serve DFLASH with its own worker. So a server with
`--speculative-algorithm DFLASH` is checked in several independent functions. If an SGLang has moved some of them, the
others still refuse to serve. Servers without DFLASH are never checked.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash import hooks, ledger
from sglang_dflash.hooks import CREATE_WORKER, RESOLVE_ARGUMENTS
from sglang_dflash.version import __version__

# Functions that are checked and have no other hook of this package.
GUARDED = (
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
    "sglang.srt.managers.scheduler.Scheduler.__init__",
)


def register() -> None:
    """Register the hooks for DFLASH. If that fails, make DFLASH servers fail at start-up, and no others."""
    registered = False
    try:
        from sglang_dflash.hook_table import register as register_hook_table

        register_hook_table()
        registered = True
    finally:
        if registered:
            # The hooks of CREATE_WORKER and RESOLVE_ARGUMENTS check too (`hook_table`, `server_args.arguments`).
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
    """Return whether an argument of a guarded function is a `ServerArgs` or a `SpeculativeAlgorithm` of DFLASH.

    The attributes are read with a default because this must work on every SGLang.
    """
    name = getattr(argument, "speculative_algorithm", None) or getattr(argument, "name", None)
    return isinstance(name, str) and name.upper() == "DFLASH"


def _refuse() -> None:
    # On another SGLang, the symbols that differ are the reason.
    ledger.verify()
    raise RuntimeError(
        f"sglang-dflash {__version__} could not be loaded. SGLang has logged the reason. Set SGLANG_PLUGINS=none to "
        "serve with SGLang's in-tree DFLASH worker."
    )

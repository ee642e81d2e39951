"""Symbols of SGLang that the hooks are bound to. It imports SGLang and the whole package."""

from __future__ import annotations

import inspect
import pkgutil

from sglang_dflash.ledger.source import Source
from sglang_dflash.ledger.uses import Use


def hooked() -> tuple[Use, ...]:
    """Return the targets of all hooks, also those for other devices. Imports SGLang and `sglang_dflash_cpu`."""
    from sglang_dflash.attention.flashinfer_window import FLASHINFER_HOOKS
    from sglang_dflash.hook_table import FA3_HOOKS, HOOKS
    from sglang_dflash_cpu.hooks import CPU_HOOKS

    source, uses = Source.installed(), []
    for hook in (*HOOKS, *FA3_HOOKS, *FLASHINFER_HOOKS, *CPU_HOOKS):
        # Hooks into PyTorch are not in the ledger.
        if hook.target.startswith("sglang."):
            user = hook.function.__module__.removeprefix("sglang_dflash.").replace(".", "/")
            symbol = hook.target
            if source.fingerprint(symbol) is None:
                # The hook's target imports the function from the module that defines it.
                function = inspect.unwrap(pkgutil.resolve_name(symbol))
                symbol = f"{function.__module__}.{function.__qualname__}"
            uses.append(Use(f"{user}.py", f"hooked: {hook.why}", (symbol,)))
    return tuple(uses)

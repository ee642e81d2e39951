"""Registers hooks into SGLang, and proves that each is in effect.

SGLang logs and swallows what goes wrong while it applies hooks (`HookRegistry.apply_hooks`), so a server could
silently run without one. :func:`verify` walks what is really bound at each target and raises if a hook is missing. A
hook around something else than it was written for is worse, so it asks the ledger first.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.common import is_cpu, is_cuda

from sglang_dflash import cpu_support, ledger


@dataclass(frozen=True)
class Hook:
    """One hook: where, how, and why it exists.

    Attributes:
        target: dotted path of the SGLang function or method.
        kind: how `HookRegistry` applies it; AROUND hooks take the original function as their first argument.
        function: the hook itself.
        why: what would not work without it.
        until: what has to change upstream before it can go.
    """

    target: str
    kind: HookType
    function: Callable
    why: str
    until: str


class HookError(RuntimeError):
    """A hook of this package is not in effect, so the server must not claim to run it."""


_registered: list[Hook] = []


def register(hooks: list[Hook]) -> None:
    """Hand hooks to SGLang, which applies them once all plugins are loaded."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
        _registered.append(hook)


def verify() -> None:
    """Make sure that DFLASH may be served in this process.

    Raises:
        LedgerError: SGLang differs from the one that this package was written against; naming every symbol that does.
        HookError: naming every registered hook that is not bound at its target, or the plugin whose hooks are missing.
    """
    ledger.verify()
    if is_cpu() and not is_cuda() and not cpu_support.is_provided():
        raise HookError(
            "SGLang has not loaded the plugin dflash_cpu, which DFLASH needs on a machine without a GPU. Install it "
            "with `pip install --no-deps ./cpu` in a clone of sglang-dflash, and name it in SGLANG_PLUGINS if that is "
            "set. If it is installed, SGLang's log says why it failed."
        )
    missing = [hook.target for hook in _registered if not _is_bound(hook)]
    if missing:
        raise HookError(
            "sglang-dflash could not hook into SGLang at: " + ", ".join(missing) + ". Set SGLANG_PLUGINS=none to "
            "serve with the in-tree DFLASH worker instead."
        )


def _is_bound(hook: Hook) -> bool:
    try:
        bound = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    # `HookRegistry` nests one wrapper per hook; each keeps its hook in a closure and the inner function in
    # `__wrapped__`.
    while bound is not None:
        cells = getattr(bound, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        bound = getattr(bound, "__wrapped__", None)
    return False

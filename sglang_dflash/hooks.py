"""Registration of this package's hooks into SGLang, and the check that each one is in effect.

SGLang logs and swallows errors while it applies hooks (`HookRegistry.apply_hooks`), so a server could silently run
without one. :func:`verify` inspects the function that is bound at each target and raises if a hook is missing. It first
asks the ledger whether SGLang's source is the one that the hooks were written for.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.common import is_cpu, is_cuda

from sglang_dflash import cpu_support, ledger

# Hooked in any case: to serve DFLASH, or to refuse it.
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
RESOLVE_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"


@dataclass(frozen=True)
class Hook:
    """One hook, and why it exists.

    Attributes:
        target: dotted path of the SGLang function or method.
        kind: type of hook in `HookRegistry`. AROUND hooks take the original function as their first argument.
        function: the hook itself.
        why: the purpose of the hook.
        until: the upstream change that makes the hook unnecessary.
    """

    target: str
    kind: HookType
    function: Callable
    why: str
    until: str


class HookError(RuntimeError):
    """Error: a hook of this package is not in effect, so this process must not serve DFLASH."""


_registered: list[Hook] = []


def register(hooks: list[Hook]) -> None:
    """Register hooks with SGLang, which applies them after all plugins are loaded."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
        _registered.append(hook)


def skip_search_for_methods() -> None:
    """Have SGLang search all modules for other names of hooked functions, and not for names of hooked methods.

    It searches for each target, which takes 60 ms on a slow core, or 4 s in every process of a server. Methods are
    looked up in their class, so no module has a name for one. The search is `hook_registry._propagate_patch`.
    """
    search = hook_registry._propagate_patch

    def search_for_functions(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else search(original, wrapped, owner)

    hook_registry._propagate_patch = search_for_functions


def verify() -> None:
    """Check that this process may serve DFLASH.

    Raises:
        LedgerError: SGLang's source differs from the recorded one. The message names every symbol that differs.
        HookError: a registered hook is not in effect, or the plugin dflash_cpu is not loaded. The message names it.
    """
    ledger.verify()
    if is_cpu() and not is_cuda() and not cpu_support.is_provided():
        raise HookError(
            "SGLang has not loaded the plugin dflash_cpu, which DFLASH needs on a machine without a GPU. Install it "
            "with `pip install --no-deps ./cpu` in a clone of sglang-dflash, and name it in SGLANG_PLUGINS if that is "
            "set. If it is installed, SGLang's log says why it failed."
        )
    # Several hooks may have one target.
    missing = dict.fromkeys(hook.target for hook in _registered if not _is_bound(hook))
    if missing:
        raise HookError(
            "sglang-dflash could not hook into SGLang at: " + ", ".join(missing) + ". Set SGLANG_PLUGINS=none to "
            "serve with SGLang's in-tree DFLASH worker."
        )


def _is_bound(hook: Hook) -> bool:
    try:
        bound = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    # `HookRegistry` nests one wrapper per hook. A wrapper has its hook in its closure, and the inner function in
    # `__wrapped__`.
    while bound is not None:
        cells = getattr(bound, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        bound = getattr(bound, "__wrapped__", None)
    return False

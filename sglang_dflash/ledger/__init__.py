"""Comparison of SGLang's source with the source that this package was written against.

A version number says little: a patch release may change what a hook wraps, and most of a release does not concern this
package. So the ledger (:mod:`sglang_dflash.ledger.uses`) lists each symbol that the package replaces, subclasses, reads
by a private name or changes. :mod:`sglang_dflash.ledger.recorded` has a fingerprint of the source of each. A server
serves DFLASH if all fingerprints match, whatever the version. `python -m sglang_dflash.ledger` compares any other
SGLang, which is the first step of a port.

FlashInfer is not in the ledger: `flashinfer_plan` compares its assumptions with FlashInfer's own results.
"""

from __future__ import annotations

from functools import cache

from sglang_dflash.ledger.source import Source
from sglang_dflash.version import __version__

SAME, CHANGED, MISSING = "same", "changed", "missing"
# In the ledger, but without a fingerprint yet.
NEW = "new"


class LedgerError(RuntimeError):
    """Error: SGLang's source differs from the recorded one, so this process must not serve DFLASH."""


def state(source: Source, symbol: str) -> str:
    """Return how a symbol of an SGLang compares with its record: SAME, CHANGED, MISSING or NEW."""
    # Imported here because processes without DFLASH do not need it.
    from sglang_dflash.ledger.recorded import FILES, FINGERPRINTS

    place = source.locate(symbol)
    if place is None:
        return MISSING
    path, _ = place
    # A file with the recorded hash needs no parsing, so a server of the recorded release parses none.
    if symbol in FINGERPRINTS and FILES.get(path) == source.digest(path):
        return SAME
    fingerprint = source.fingerprint(symbol)
    if fingerprint is None:
        return MISSING
    if symbol not in FINGERPRINTS:
        return NEW
    return SAME if fingerprint == FINGERPRINTS[symbol] else CHANGED


@cache
def verify() -> None:
    """Compare the installed SGLang with the recorded one, once per process.

    Raises:
        LedgerError: a symbol differs. The message names every such symbol and both versions.
    """
    from sglang_dflash.ledger.recorded import FINGERPRINTS, SGLANG

    source = Source.installed()
    states = {symbol: state(source, symbol) for symbol in FINGERPRINTS}
    differing = [
        f"{kind}: {', '.join(symbol for symbol in states if states[symbol] == kind)}"
        for kind in (CHANGED, MISSING)
        if kind in states.values()
    ]
    if differing:
        raise LedgerError(
            f"sglang-dflash {__version__} was written against SGLang {SGLANG}, and SGLang {source.version} is "
            f"installed. These symbols that the package relies on differ: {'; '.join(differing)}. Run `python -m "
            "sglang_dflash.ledger` to see what each is for, or set SGLANG_PLUGINS=none to serve with SGLang's in-tree "
            "DFLASH worker."
        )

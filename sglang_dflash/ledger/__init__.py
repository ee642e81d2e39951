"""What of SGLang this package builds on, and the source of it that the package was written against.

A version number says little: a patch release may change what a hook wraps, and most of a release is none of our
business. So each symbol that the package replaces, subclasses, reads by a private name or changes is in a ledger
(:mod:`sglang_dflash.ledger.uses`) with a fingerprint of its source (:mod:`sglang_dflash.ledger.recorded`). A server
serves DFLASH where all of them are the same, whatever the version; `python -m sglang_dflash.ledger` compares any other
SGLang, which is the first step of a port.

FlashInfer is not in the ledger: `flashinfer_plan` compares what it takes for granted with FlashInfer's own results.
"""

from __future__ import annotations

from functools import cache

from sglang_dflash.ledger.source import Source
from sglang_dflash.version import __version__

SAME, CHANGED, MISSING = "same", "changed", "missing"
# In the manifest, and without a fingerprint yet.
NEW = "new"


class LedgerError(RuntimeError):
    """SGLang is not what this package was written against, so the server must not serve DFLASH with it."""


def state(source: Source, symbol: str) -> str:
    """How the symbol of an SGLang compares with what is recorded: SAME, CHANGED, MISSING or NEW."""
    # Imported here: a process that serves something else has no use for it.
    from sglang_dflash.ledger.recorded import FILES, FINGERPRINTS

    place = source.locate(symbol)
    if place is None:
        return MISSING
    path, _ = place
    # A file of which no byte has changed needs no parsing: a server of the recorded release starts without any.
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
    """Compare the installed SGLang, once per process.

    Raises:
        LedgerError: naming every symbol that differs, and both versions.
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
            f"sglang-dflash {__version__} was written against SGLang {SGLANG}, and {source.version} is installed. "
            f"They differ in what this package builds on, {'; '.join(differing)}. `python -m sglang_dflash.ledger` "
            "says what each is for. Set SGLANG_PLUGINS=none to serve with SGLang's in-tree DFLASH worker."
        )

"""`python -m sglang_dflash.ledger`: compare an SGLang with the one that this package was written against.

The exit code is 0 if everything is the same, 1 if something differs, and 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from sglang_dflash.ledger import CHANGED, MISSING, NEW, SAME, recorded, state
from sglang_dflash.ledger.hooked import hooked
from sglang_dflash.ledger.source import Source, SourceError
from sglang_dflash.ledger.uses import Use, manifest
from sglang_dflash.version import __version__

_HEADER = '''"""Record of SGLang's source, written by `python -m sglang_dflash.ledger --write`. Do not edit it.

`FILES` has hashes by path and `FINGERPRINTS` by symbol. `HOOKED` lists the hooks: file, reason and symbol.
"""

# fmt: off
# ruff: noqa: E501
'''


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_dflash.ledger", description=__doc__)
    parser.add_argument(
        "sglang", nargs="?", help="a wheel of SGLang or a directory with its source; default: the installed SGLang"
    )
    parser.add_argument("--all", action="store_true", help="also list the symbols that are the same")
    parser.add_argument("--diff", action="store_true", help="show how the source of changed symbols differs")
    parser.add_argument(
        "--base",
        metavar="SGLANG",
        help="for --diff: the recorded SGLang, a wheel or a directory; default: the installed SGLang",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--write", action="store_true", help="record this SGLang as the one written against, after a port"
    )
    options = parser.parse_args(argv)
    try:
        source = Source.installed() if options.sglang is None else Source.at(options.sglang)
        if options.write:
            return _write(source)
        uses = manifest(tuple(Use(user, why, (symbol,)) for user, why, symbol in recorded.HOOKED))
        base = None
        if options.diff or options.base is not None:
            base = Source.installed() if options.base is None else Source.at(options.base)
        report = {symbol: _entry(symbol, uses[symbol], source, base) for symbol in uses}
    except (SourceError, OSError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_summary(source) | {"symbols": report}, indent=2))
    else:
        _print(source, report, options.all)
    return 0 if all(entry["state"] == SAME for entry in report.values()) else 1


def _entry(symbol: str, uses: list[Use], source: Source, base: Source | None) -> dict:
    entry = {"state": state(source, symbol), "used_by": {use.user: use.why for use in uses}}
    if entry["state"] == MISSING:
        entry["same_name_in"] = source.others_named_like(symbol)
    elif entry["state"] == CHANGED and base is not None:
        if state(base, symbol) != SAME:
            raise SourceError(
                f"{symbol} of SGLang {base.version} ({base.where}) is not the recorded one: give --base the source of "
                f"{recorded.SGLANG}"
            )
        versions = base.version, source.version
        entry["diff"] = list(difflib.unified_diff(base.text(symbol), source.text(symbol), *versions, lineterm=""))
    return entry


def _summary(source: Source) -> dict:
    return {
        "sglang_dflash": __version__,
        "written_against": recorded.SGLANG,
        "compared": {"path": source.where, "version": source.version},
    }


def _print(source: Source, report: dict[str, dict], with_same: bool) -> None:
    for kind in (SAME, NEW, CHANGED, MISSING) if with_same else (NEW, CHANGED, MISSING):
        for symbol, entry in report.items():
            if entry["state"] != kind:
                continue
            print(f"{kind:8}{symbol}")
            for user, why in entry["used_by"].items():
                print(f"{'':8}{user}: {why}")
            for path in entry.get("same_name_in", ()):
                print(f"{'':8}{path} defines something of its last name")
            for line in entry.get("diff", ()):
                print(f"{'':8}{line}".rstrip())
    states = [entry["state"] for entry in report.values()]
    counts = ", ".join(f"{states.count(kind)} {kind}" for kind in (SAME, NEW, CHANGED, MISSING) if kind in states)
    print(
        f"SGLang {source.version} ({source.where}) against {recorded.SGLANG}, which sglang-dflash {__version__} was "
        f"written against: {counts}."
    )


def _write(source: Source) -> int:
    hooks = hooked()
    symbols = list(manifest(hooks))
    fingerprints = {symbol: source.fingerprint(symbol) for symbol in symbols}
    missing = [symbol for symbol in symbols if fingerprints[symbol] is None]
    if missing:
        for symbol in missing:
            print(f"{MISSING:8}{symbol}")
        print(f"Nothing is recorded: SGLang {source.version} ({source.where}) does not define these symbols there.")
        return 1
    files = {path: source.digest(path) for path, _ in map(source.locate, symbols)}
    text = f"{_HEADER}\nSGLANG = {source.version!r}\n"
    for name, hashes in (("FILES", files), ("FINGERPRINTS", fingerprints)):
        text += f"\n{name} = {{\n{_lines(f'{key!r}: {value!r}' for key, value in sorted(hashes.items()))}}}\n"
    text += f"\nHOOKED = (\n{_lines(repr((use.user, use.why, *use.symbols)) for use in hooks)})\n"
    partial = Path(recorded.__file__).with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(recorded.__file__)
    print(f"Recorded {len(symbols)} symbols of SGLang {source.version} ({source.where}).")
    return 0


def _lines(entries: Iterable[str]) -> str:
    return "".join(f"    {entry},\n" for entry in entries)


if __name__ == "__main__":
    sys.exit(main())

"""Source of an SGLang, installed, unpacked or in a wheel: where its symbols are defined, and their fingerprints.

Nothing of it is imported; a file is read and parsed once. A fingerprint is a hash of the syntax tree of a definition.
It leaves out what has no effect: positions, comments, docstrings, and the spelling of literals. It is the same under
every version of Python, so it uses nothing that Python prints of a syntax tree.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

# Fields of syntax trees that follow from other fields, or record only the spelling.
_NOT_HASHED = ("ctx", "kind", "type_comment")
_VERSION = re.compile(r"""^__version__ = version = ['"]([^'"]+)['"]""", re.MULTILINE)


class SourceError(ValueError):
    """Error: a path is not the source of an SGLang."""


class Source:
    """Source of one SGLang.

    Attributes:
        where: the path that it is read from.
        version: the version in its metadata; "of unknown version" without metadata.
    """

    def __init__(self, root: Path | zipfile.Path, where: str, version: str) -> None:
        """
        Args:
            root: directory or archive that contains the package `sglang`.
            where: see the class.
            version: see the class.
        """
        self.where, self.version = where, version
        self._root = root
        self._modules: dict[str, ast.Module] = {}

    @classmethod
    def installed(cls) -> Source:
        """Return the source of the SGLang that this Python would import.

        Raises:
            SourceError: no SGLang is installed.
        """
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise SourceError("no SGLang is installed")
        package = Path(spec.submodule_search_locations[0])
        return cls(package.parent, str(package), importlib.metadata.version("sglang"))

    @classmethod
    def at(cls, path: str) -> Source:
        """Return the source in a wheel or a directory: the package `sglang`, its parent, or the parent of `python/`.

        Raises:
            SourceError: the path is neither. The message says why.
        """
        given = Path(path)
        if given.is_dir():
            for root in (given, given / "python", given.parent):
                package = root / "sglang"
                if (package / "srt").is_dir() and (root != given.parent or given.name == "sglang"):
                    return cls(root, path, _version_of_tree(root))
            raise SourceError(f"{path} is not the source of SGLang: it has no sglang/srt")
        if not given.exists():
            raise SourceError(f"{path} does not exist")
        if not zipfile.is_zipfile(given):
            raise SourceError(f"{path} is neither a wheel nor a directory")
        archive = zipfile.ZipFile(given)
        metadata = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(metadata) != 1:
            raise SourceError(f"{path} is not a wheel: it has no .dist-info/METADATA")
        headers = HeaderParser().parsestr(archive.read(metadata[0]).decode())
        if headers["Name"] != "sglang":
            raise SourceError(f"{path} is a wheel of {headers['Name']}, not of sglang")
        return cls(zipfile.Path(archive), path, headers["Version"])

    def fingerprint(self, symbol: str) -> str | None:
        """Return 16 hexadecimal digits; None if the symbol is not defined there."""
        found = self._definitions(symbol)
        if not found:
            return None
        tokens: list[str] = []
        for definition in found:
            _write(definition, tokens)
        return hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def text(self, symbol: str) -> list[str]:
        """Return the lines of a symbol's definitions, with decorators and comments."""
        lines: list[str] = []
        for definition in self._definitions(symbol):
            path, _ = self.locate(symbol)
            first = min([definition.lineno, *(each.lineno for each in getattr(definition, "decorator_list", ()))])
            lines += self._text(path).splitlines()[first - 1 : definition.end_lineno]
        return lines

    def others_named_like(self, symbol: str) -> list[str]:
        """Return the files that define the symbol's last name, at their top level or in a class."""
        name = re.escape(symbol.rpartition(".")[2])
        pattern = re.compile(rf"^\s*(?:(?:async )?def|class) {name}\b|^\s*{name}\b(?::[^=\n]*)? =", re.MULTILINE)
        texts = ((path, self._text(path)) for path in self._paths())
        return [path for path, text in texts if name in text and pattern.search(text)]

    def _text(self, path: str) -> str:
        return self._root.joinpath(path).read_text("utf-8")

    def _paths(self) -> list[str]:
        if isinstance(self._root, Path):
            return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob("sglang/**/*.py"))
        return sorted(name for name in self._root.root.namelist() if re.fullmatch(r"sglang/.*\.py", name))

    def digest(self, path: str) -> str:
        """Return 16 hexadecimal digits: a hash of the bytes of a file."""
        return hashlib.sha256(self._root.joinpath(path).read_bytes()).hexdigest()[:16]

    def locate(self, symbol: str) -> tuple[str, list[str]] | None:
        """Return the file that must define a symbol, and the symbol's names in it; None if there is no such file."""
        parts = symbol.split(".")
        for i in range(len(parts) - 1, 0, -1):
            for path in ("/".join(parts[:i]) + ".py", "/".join(parts[:i]) + "/__init__.py"):
                if self._root.joinpath(path).is_file():
                    return path, parts[i:]
        return None

    def _definitions(self, symbol: str) -> list[ast.stmt]:
        place = self.locate(symbol)
        if place is None:
            return []
        path, names = place
        if path not in self._modules:
            self._modules[path] = self._parse(path)
        return _definitions(self._modules[path], names)

    def _parse(self, path: str) -> ast.Module:
        # Parsing creates many objects. Without this, Python would search a server's whole heap for cycles many times.
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(self._text(path), path)
        except SyntaxError as error:
            raise SourceError(f"{path} of {self.where} is not Python {platform.python_version()}: {error}") from error
        finally:
            if collects:
                gc.enable()


def _version_of_tree(root: Path) -> str:
    for metadata in root.glob("sglang-*.dist-info/METADATA"):
        return HeaderParser().parsestr(metadata.read_text("utf-8"))["Version"]
    generated = root / "sglang/_version.py"
    found = _VERSION.search(generated.read_text("utf-8")) if generated.is_file() else None
    return "of unknown version" if found is None else found[1]


def _definitions(module: ast.Module, names: list[str]) -> list[ast.stmt]:
    """Return everything that a name is bound to, in order: branches of `if` and `try`, overloads, property setters.

    The last name may also be an attribute that the methods of a class assign.
    """
    scopes: list[ast.AST] = [module]
    for name in names:
        found = [definition for scope in scopes for definition in _named(scope, name)]
        if not found and name == names[-1]:
            found = [each for scope in scopes if isinstance(scope, ast.ClassDef) for each in _assigned(scope, name)]
        scopes = found
    return scopes


def _named(scope: ast.AST, name: str) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == name:
                yield child
        elif isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign):
            if any(isinstance(target, ast.Name) and target.id == name for target in _targets(child)):
                yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _named(child, name)


def _assigned(scope: ast.ClassDef, name: str) -> Iterator[ast.stmt]:
    """Yield the statements in which methods assign `self.name`."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(target, ast.Attribute)
            and target.attr == name
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
            for target in _targets(node)
        ):
            yield node


def _targets(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _write(value: object, tokens: list[str]) -> None:
    """Append tokens for a node or for the value of a field. Different values give different tokens."""
    if isinstance(value, ast.Constant):
        _write_literal(value.value, tokens)
    elif isinstance(value, ast.AST):
        tokens.append(f"{type(value).__name__}(")
        for name, child in ast.iter_fields(value):
            if isinstance(value, ast.JoinedStr):
                # Python versions split the text between the fields of an f-string differently.
                child = _joined(child)
            # Newer Python versions add fields; they are empty unless the new syntax is used.
            if name in _NOT_HASHED or child is None or child == []:
                continue
            tokens.append(f"{name}=")
            _write(child, tokens)
        tokens.append(")")
    elif isinstance(value, list):
        tokens.append("[")
        for each in value:
            if not _is_docstring(each):
                _write(each, tokens)
        tokens.append("]")
    else:
        _write_literal(value, tokens)


def _write_literal(value: object, tokens: list[str]) -> None:
    # `repr` of a string depends on the Unicode version of Python.
    tokens.append(f"str {len(value)} {value}" if isinstance(value, str) else f"{type(value).__name__} {value!r}")


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    joined: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and joined and isinstance(joined[-1], ast.Constant):
            joined[-1] = ast.Constant(joined[-1].value + part.value)
        elif not isinstance(part, ast.Constant) or part.value:
            joined.append(part)
    return joined

"""Location of symbols in a source, and fingerprints that depend only on what acts."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from sglang_dflash.ledger.source import Source, SourceError


@pytest.fixture
def source_of(tmp_path: Path):
    def source_of(module: str) -> Source:
        path = tmp_path / "sglang/srt/module.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(module))
        return Source(tmp_path, str(tmp_path), "1.0")

    return source_of


@pytest.fixture
def fingerprint(source_of):
    return lambda module, name="f": source_of(module).fingerprint(f"sglang.srt.module.{name}")


# --- fingerprints ---------------------------------------------------------------------------------------------------

SAME = {
    "comments and docstrings": (
        'def f(x):\n    """Adds."""\n    return x + 1',
        "# Adds.\ndef f(x):\n    # one\n    return x + 1",
    ),
    "docstrings of attributes": ('class f:\n    a: int = 1\n    """How many."""', "class f:\n    a: int = 1"),
    "line breaks and parentheses": ("def f(x):\n    return (x\n        + 1)", "def f(\n    x,\n):\n    return x + 1"),
    "how literals are spelt": ("f = 'a' \"b\", 1_000, 0x10, 1e3", 'f = ("ab", 1000, 16, 1000.0)'),
    "prefixes of strings": ("f = u'a' r'\\d'", "f = 'a\\\\d'"),
    "how f-strings are put together": ("f = f'a{x}' 'b' f'{y}c'", "f = f'a{x}b{y}c'"),
    "what is around": ("def f(): return 1", "x = 2\n\ndef f(): return 1\n\ndef g(): return 3"),
}


@pytest.mark.parametrize("one, other", SAME.values(), ids=SAME)
def test_what_does_not_act_is_left_out(fingerprint, one, other):
    assert fingerprint(one) == fingerprint(other) is not None


DIFFERENT = {
    "values": ("f = 1", "f = 2"),
    "types of values": ("f = 1", "f = True"),
    "float and integer": ("f = 1.0", "f = 1"),
    "string and bytes": ("f = 'a'", "f = b'a'"),
    "None and nothing": ("def f(): return", "def f(): return None"),
    "operators": ("f = a + b", "f = a - b"),
    "order": ("f = (a, b)", "f = (b, a)"),
    "defaults": ("def f(x=1): pass", "def f(x=2): pass"),
    "whose default": ("def f(x=1, *, y): pass", "def f(x, *, y=1): pass"),
    "names of parameters": ("def f(x): pass", "def f(y): pass"),
    "keyword-only parameters": ("def f(x, y): pass", "def f(x, *, y): pass"),
    "annotations": ("class f:\n    a: int", "class f:\n    a: str"),
    "decorators": ("def f(): pass", "@cache\ndef f(): pass"),
    "async": ("def f(): pass", "async def f(): pass"),
    "base classes": ("class f: pass", "class f(B): pass"),
    "methods": ("class f:\n    def g(self): return 1", "class f:\n    def g(self): return 2"),
    "conversions": ("f = f'{x}'", "f = f'{x!r}'"),
    "format": ("f = f'{x:2}'", "f = f'{x:3}'"),
    "text between fields": ("f = f'{x}-{y}'", "f = f'{x}{y}'"),
    "patterns": (
        "def f(x):\n    match x:\n        case None: pass",
        "def f(x):\n    match x:\n        case True: pass",
    ),
    "a string that is used": ("def f():\n    return 'a'", "def f():\n    return 'b'"),
    "strings that add up to the same": ("f = ['a', 'bc']", "f = ['ab', 'c']"),
    "branches": ("if a:\n    f = 1\nelse:\n    f = 2", "if a:\n    f = 2\nelse:\n    f = 1"),
    "one definition more": ("def f(): return 1", "def f(): return 1\ntry:\n    pass\nexcept E:\n    def f(): return 2"),
}


@pytest.mark.parametrize("one, other", DIFFERENT.values(), ids=DIFFERENT)
def test_what_acts_makes_a_difference(fingerprint, one, other):
    assert None is not fingerprint(one) != fingerprint(other) is not None


def test_every_python_computes_the_same(fingerprint):
    """The module's syntax is valid in all supported versions of Python, whose syntax trees differ."""
    module = '''
    @decorate(1, *args, key=-2.5e-3, **kwargs)
    class f(Base, metaclass=Meta):
        """A docstring."""

        field: dict[str, int | None] = {**others, "é\\u0378": ..., b"\\x00": 1j, 10**30: None}
        """Of an attribute."""

        @overload
        async def method(self, a, /, b: int = 0xFF, *c, d=None, **e) -> f"{x!r:>{width}}{{}}":
            global g
            async with open(a) as file, other: await file
            async for x in (y async for y in z if y if not z): yield x
            return f"""{a=} {b + 1 = :.3f} {'nested'!s}
            {f'{c:{d}}'}""" "tail" rf"\\{e}"

        def pattern(self, value):
            match value:
                case {"key": [1, -2, *_], **rest} | Point(x=0, y=None) if (n := len(value)) > 3: pass
                case (True | "text" as name): del name
                case _: raise ValueError from None

        try:
            lambda *, k=1: (x for x in k)[1:2, ..., ::3]
        except (A, B) as error: assert error, "message"
        else: nonlocal_ = 1 if a else 2
        finally: a @= b; (c, *d), e = not a <= b < c is not d, [x for x in y], {z for z in y}
    '''
    assert fingerprint(module) == "0cb3bc6cb3d7d784"


# --- definitions ----------------------------------------------------------------------------------------------------


def test_definitions_are_found(fingerprint):
    module = """
    import sys
    A, B = 1, 2
    C: int = 3
    C += 1
    if sys.platform == "linux":
        try:
            def conditional(): return 1
        except ImportError:
            def conditional(): return 2
    class Outer(Base):
        field: int
        def __init__(self):
            self.plain = 1
            self.typed: int = 2
            self.one, self.two = 3, 4
            other.elsewhere = 5
        @property
        def size(self): return 1
        @size.setter
        def size(self, value): pass
        class Inner:
            def method(self): return local
    """
    for name in ("A", "B", "C", "conditional", "Outer", "Outer.field", "Outer.__init__", "Outer.plain", "Outer.typed"):
        assert fingerprint(module, name), name
    for name in ("Outer.one", "Outer.two", "Outer.size", "Outer.Inner", "Outer.Inner.method"):
        assert fingerprint(module, name), name
    for name in ("sys", "D", "conditional.x", "Outer.other", "Outer.elsewhere", "Outer.Inner.size", "local", "Base"):
        assert fingerprint(module, name) is None, name
    for old, new in (("return 2", "return 3"), ("C += 1", "C += 2"), ("value): pass", "value): return")):
        changed = [
            n
            for n in ("conditional", "C", "Outer.size")
            if fingerprint(module, n) != fingerprint(module.replace(old, new), n)
        ]
        assert len(changed) == 1, (old, changed)


def test_modules_and_packages(tmp_path):
    package = tmp_path / "sglang/srt/package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from sglang.srt.package.module import imported\ndef own(): pass")
    (package / "module.py").write_text("def imported(): pass")
    source = Source(tmp_path, "", "1.0")
    assert source.locate("sglang.srt.package.own") == ("sglang/srt/package/__init__.py", ["own"])
    assert source.locate("sglang.srt.package.module.imported") == ("sglang/srt/package/module.py", ["imported"])
    assert source.fingerprint("sglang.srt.package.own")
    # The symbol is defined in another module.
    assert source.fingerprint("sglang.srt.package.imported") is None
    assert source.others_named_like("sglang.srt.package.imported") == ["sglang/srt/package/module.py"]
    assert source.locate("sglang.lang.api.function") is None
    assert source.fingerprint("sglang.lang.api.function") is None


def test_text_is_that_of_the_file(source_of):
    module = "x = 1\n\n# Why.\n@first\n@second(\n    1,\n)\ndef f():\n    return 1  # one\n\n\ny = 2\n"
    assert source_of(module).text("sglang.srt.module.f") == module.splitlines()[3:9]


def test_what_is_no_python_is_named(source_of):
    with pytest.raises(SourceError, match=r"sglang/srt/module.py of .* is not Python 3.*: invalid syntax"):
        source_of("def f(:\n").fingerprint("sglang.srt.module.f")

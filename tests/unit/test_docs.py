"""Documentation: links resolve, the README stays short, lines stay within the width of the code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MAX_README_WORDS = 700
MAX_LINE = 120
# Pages that people write. The other files of scripts/results are reports of programs.
WRITTEN = [":(glob)*.md", "docs/*.md", "scripts/results/cycle_notes.md"]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_RESULT = re.compile(r"scripts/results/[\w.-]+\.(?:md|png|json)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def _tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [path for name in names.splitlines() if (path := REPO / name).exists()]


def _name(path: Path) -> str:
    return str(path.relative_to(REPO))


def _links(text: str) -> list[str]:
    """Return the targets of all links to files of this repository and to headings."""
    links = _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def _broken(page: Path, text: str) -> list[str]:
    broken = []
    for link in _links(text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
            broken.append(link)
    return broken


def _long_lines(text: str) -> list[int]:
    """Return the numbers of the lines that are too long. Rows of tables may be."""
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if len(line) > MAX_LINE and not line.startswith("|")]


@pytest.mark.parametrize("page", _tracked("*.md"), ids=_name)
def test_links_resolve(page):
    assert _broken(page, page.read_text()) == []


def test_named_results_exist():
    """A results file that the code or a page names is there."""
    pages = _tracked("*.md", "*.py", "*.sh")
    named = [(_name(page), name) for page in pages for name in _RESULT.findall(page.read_text())]
    assert named
    missing = [(page, name) for page, name in named if not (REPO / name).exists()]
    assert missing == []


def test_results_are_named():
    """Every results file is named in a page or in the code, and tables come without the JSON that they are made of."""
    texts = {page: page.read_text() for page in _tracked("*.md", "*.py")}
    results = _tracked("scripts/results/*")
    unnamed = [_name(file) for file in results if not any(file.name in texts[page] for page in texts if page != file)]
    assert unnamed == []
    assert [_name(file) for file in results if file.suffix == ".json"] == []


def _defines(path: Path, name: str) -> bool:
    """Return whether a module, or a module of a folder, defines a function, a method (`Class.method`) or a class."""
    modules = [path] if path.is_file() else sorted(path.glob("*.py"))
    definition = re.compile(rf"^\s*(?:async )?(?:def|class) {name.rpartition('.')[2]}\b", re.MULTILINE)
    return any(definition.search(module.read_text()) for module in modules)


def test_tour_names_exist():
    """Each name in the last column of the tour of the code is defined in a file that its row links."""
    page = REPO / "docs/how-it-works.md"
    tour = page.read_text().partition("## A request's way")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in tour.splitlines() if "](../" in line]
    assert rows
    missing = []
    for row in rows:
        files = [(page.parent / link).resolve() for link in _links(row[2])]
        names = re.findall(r"`([\w.]+)`", row[3])
        assert names, row
        missing += [name for name in names if not any(_defines(file, name) for file in files)]
    assert missing == []


def test_readme_is_short():
    assert len((REPO / "README.md").read_text().split()) <= MAX_README_WORDS


@pytest.mark.parametrize("page", _tracked(*WRITTEN), ids=_name)
def test_lines_fit(page):
    assert _long_lines(page.read_text()) == []


def test_what_is_checked_can_fail(tmp_path):
    page = tmp_path / "page.md"
    other = tmp_path / "other.md"
    other.write_text("# A `heading`, twice\n\n# A heading twice\n")
    good = "[a](other.md#a-heading-twice) [b](other.md#a-heading-twice-1) [c](https://example.org) `[d](none.md)`"
    assert _broken(page, good) == []
    bad = "[a](none.md) [b](other.md#another) [c](#here)\n"
    page.write_text(bad)
    assert _broken(page, bad) == ["none.md", "other.md#another", "#here"]
    assert _long_lines("x" * 120 + "\n" + "x" * 121 + "\n|" + "x" * 121) == [2]

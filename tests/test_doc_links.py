"""Every relative link of the pages leads to an existing file and heading."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"(?<!\\)\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
_ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)")


def links(text: str) -> list[str]:
    """Return the link targets of a page, without those in code."""
    plain = _CODE.sub("", _FENCED.sub("", text))
    return [inline or reference for inline, reference in _LINK.findall(plain)]


def anchors(text: str) -> set[str]:
    """Return a page's anchors as GitHub makes them from its headings.

    They are in lower case, without punctuation, with hyphens for blanks, and ``-1`` after the second heading of a name.
    """
    found: dict[str, int] = {}
    names = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def broken(page: Path, text: str) -> list[str]:
    """Return what is wrong with the relative links of a page."""
    wrong = []
    for target in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(text if file == page else file.read_text("utf-8"))):
            wrong.append(f"{target}: no such heading")
    return wrong


def test_links_lead_somewhere() -> None:
    assert [f"{page.relative_to(ROOT)}: {problem}" for page in PAGES for problem in broken(page, page.read_text("utf-8"))] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# It is `here`, now\n\n## Two\n\n## Two\n", "utf-8")
    text = (
        "[a](other.md#it-is-here-now) [b](other.md#two-1) [c](https://x.example/y#z) `[d](nowhere.md)`\n"
        "[e](nowhere.md) [f](other.md#there) [g](#here)\n\n```\n[h](nowhere.md)\n# here\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert broken(page, text) == ["nowhere.md: no such file", "other.md#there: no such heading", "#here: no such heading"]

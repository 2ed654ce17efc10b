"""The pages as a site (scripts/site): every page is in the navigation, and every link leads to a page of the site."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT, anchors, links


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(site_pages: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("site") / "pages"
    site_pages.write_pages(place)
    return place


def listed(navigation: list[dict[str, Any]]) -> list[str]:
    return [
        page
        for section in navigation
        for value in section.values()
        for page in ([value] if isinstance(value, str) else listed(value))
    ]


def test_every_page_is_in_the_navigation_once(site_pages: ModuleType, site: Path) -> None:
    found = listed(site_pages.navigation())
    pages = sorted(page.relative_to(site / "source").as_posix() for page in (site / "source").rglob("*.md"))
    assert sorted(found) == pages and len(pages) > 30
    assert [next(iter(section)) for section in site_pages.navigation()] == [
        "Start", "Guides", "Examples", "Results", "Internals", "Project",
    ]  # fmt: skip


def test_links_lead_to_pages_of_the_site(site: Path) -> None:
    for page in (site / "source").rglob("*.md"):
        for link in links(page):
            if link.startswith("https://"):
                continue
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.is_file(), f"{page.relative_to(site)}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.relative_to(site)}: {link}"


def test_programs_are_shown_whole(site: Path) -> None:
    for program in (ROOT / "examples").glob("*.py"):
        assert program.read_text() in (site / "source" / "examples" / f"{program.stem}.md").read_text()


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Fonts are the reader's own, no repository is asked for its stars, and pictures are here."""
    text = re.sub(r"!!\S+ \{.*\}", '""', (site / "mkdocs.yml").read_text())
    options = json.loads(text)
    assert options["theme"]["font"] is False and options["plugins"] == ["search"]
    assert not {"repo_url", "extra_javascript", "extra_css"} & options.keys()
    pages = [page.read_text() for page in (site / "source").rglob("*.md")]
    assert [found for page in pages for found in re.findall(r"!\[[^\]]*\]\((https?:[^)]*)\)|<img", page)] == []

"""The pages of the site, as MkDocs takes them: `python scripts/site_pages.py DIRECTORY`.

    DIRECTORY/mkdocs.yml      options, and the navigation: what docs/index.md lists, in its order
    DIRECTORY/source/         README.md (the front page), ARCHITECTURE.md, CHANGELOG.md, docs/, examples/

Files lie as they do in the repository, so that links lead where they do there. Programs become pages that show them.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOP = {"README.md": "Torrential", "ARCHITECTURE.md": "Architecture", "CHANGELOG.md": "Changelog"}
_SECTION = re.compile(r"^\*\*(?P<title>[^*]+)\*\*", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#]+)\)")
_PROGRAM = re.compile(r"\]\((?P<place>(?:\.\./)?examples)(?:/(?P<name>\w+)\.py)?\)")

OPTIONS: dict[str, Any] = {
    "site_name": "Torrential",
    "docs_dir": "source",
    "theme": {
        "name": "material",
        "font": False,  # the reader's own: others would be fetched from elsewhere
        "icon": {"logo": "material/waves"},
        "features": ["navigation.tabs", "navigation.top", "navigation.footer", "content.code.copy", "search.highlight"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "blue grey",
             "toggle": {"icon": "material/weather-night", "name": "Dark"}},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "blue grey",
             "toggle": {"icon": "material/weather-sunny", "name": "Light"}},
        ],
    },
    "plugins": ["search"],
    "use_directory_urls": False,  # links lead somewhere without a server, too
    "extra": {"generator": False},
    "markdown_extensions": [
        "tables",
        {"toc": {"permalink": True, "slugify": "!!"}},
        "pymdownx.superfences",
        "pymdownx.highlight",
        "pymdownx.saneheaders",
    ],
    "validation": {"nav": {"omitted_files": "warn", "not_found": "warn"},
                   "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"}},
}  # fmt: skip


def write_pages(directory: Path) -> None:
    """Write everything that the site is made of."""
    shutil.rmtree(directory, ignore_errors=True)
    source = directory / "source"
    source.mkdir(parents=True)
    for name in TOP:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs", source / "docs")
    (source / "examples").mkdir()
    for example in filter(Path.is_file, (ROOT / "examples").iterdir()):
        if example.suffix == ".py":
            (source / "examples" / f"{example.stem}.md").write_text(program_page(example))
        else:
            shutil.copy(example, source / "examples")
    for page in source.rglob("*.md"):
        page.write_text(_PROGRAM.sub(_page_of_program, page.read_text()))
    options = json.dumps(OPTIONS | {"nav": navigation()}, indent=2)
    slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"  # anchors as GitHub makes them
    (directory / "mkdocs.yml").write_text(options.replace('"!!"', slugify))


def program_page(program: Path) -> str:
    """A page that shows a program, with its docstring above."""
    code = program.read_text()
    about = ast.get_docstring(ast.parse(code)) or ""
    return f"# {program.name}\n\n{about}\n\n```python\n{code}```\n"


def _page_of_program(link: re.Match[str]) -> str:
    if link["name"] is None:  # the directory
        return f"]({link['place'].removesuffix('examples')}docs/index.md)"
    return f"]({link['place']}/{link['name']}.md)"


def navigation() -> list[dict[str, Any]]:
    """The front page; the sections of docs/index.md, each with the pages that it links to; the pages at the top."""
    index = (ROOT / "docs" / "index.md").read_text()
    _, *parts = _SECTION.split(index)
    sections = [{title: _links(text)} for title, text in zip(parts[::2], parts[1::2], strict=True)]
    more = ["docs/index.md", "docs/log.md", "ARCHITECTURE.md", "CHANGELOG.md"]
    titles = ["All pages", "Log", TOP["ARCHITECTURE.md"], TOP["CHANGELOG.md"]]
    return [{"Start": "README.md"}, *sections, {"Project": [{t: p} for t, p in zip(titles, more, strict=True)]}]


def _links(text: str) -> list[dict[str, str]]:
    """The pages that a section links to, by the words of the links."""
    found: dict[str, str] = {}
    for link in _LINK.finditer(text):
        target = (ROOT / "docs" / link["target"]).resolve().relative_to(ROOT).as_posix()
        page, _, kind = target.rpartition(".")
        if target.startswith(("docs/", "examples/")) and target != "docs/log.md" and kind in ("md", "py"):
            title = link["text"].removesuffix(".py").replace("_", " ") if kind == "py" else link["text"]
            found.setdefault(f"{page}.md", title[0].upper() + title[1:])
    return [{title: target} for target, title in found.items()]


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))

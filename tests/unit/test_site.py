"""The documentation as a site: every link leads somewhere, every page is in the navigation, nothing is fetched from
elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = {
    ("link", "href"), ("script", "src"), ("img", "src"), ("img", "srcset"), ("iframe", "src"), ("source", "src"),
    ("source", "srcset"), ("video", "src"), ("audio", "src"), ("object", "data"), ("embed", "src"), ("use", "href"),
}  # fmt: skip
"""What a browser loads by itself. A person's click on <a href> is not among it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does, but that a page which is nowhere in the navigation is an error, too."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        self.loads += [value or "" for name, value in attrs if (tag, name) in FETCHED]
        self.links += [given["href"] or ""] if tag == "a" and "href" in given else []
        self.images += [given] if tag == "img" else []


def test_it_is_whole_and_needs_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.glob("*.html") if path.name != "404.html"}
    sources = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in pages} == sources, "each page, and none twice"
    for path, page in pages.items():
        elsewhere = [url for url in page.loads if re.match(r"(?:[a-z]+:)?//", url)]
        assert not elsewhere, f"{path.name} loads {elsewhere}"
        for url in [*page.loads, *page.links]:
            if re.match(r"[a-z]+:", url):
                continue
            name, _, anchor = url.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            assert target.exists(), f"{path.name}: {url} is nowhere"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{path.name}: {url} is nowhere"
        assert all(image.get("alt") for image in page.images), f"{path.name}: each picture says what is on it"
    style = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"""(?:@import|url\()\s*["']?(?:https?:)?//""", style)


def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    navigation = index.partition('class="md-nav md-nav--primary')[2].partition("<article")[0]
    assert navigation
    for path in (ROOT / "docs").glob("*.md"):
        assert f'href="{path.stem}.html"' in navigation or path.stem == "index", path.name


def test_every_picture_is_shown_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert f"pictures/{path.name})" in text, path.name


def test_on_a_forge_every_link_of_the_pages_leads_to_a_file() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for url in re.findall(r"\]\(([^)\s]+)\)", text):
            name = url.partition("#")[0]
            assert re.match(r"[a-z]+:", url) or not name or (path.parent / name).exists(), f"{path.name}: {url}"

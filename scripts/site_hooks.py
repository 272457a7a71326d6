"""What makes pages that are plain Markdown on a forge into a site: called by mkdocs, as mkdocs.yml says.

A link that leaves docs/ (to a file of the code, to the README) has nowhere to go on a site: its words stay, and the
README is the first page. HTML is left as mkdocs-material makes it, but for what would be fetched from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)\s]+)\)")
README = "../README.md"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    def inside(match: re.Match[str]) -> str:
        words, target = match.groups()
        if target.partition("#")[0] == README:
            return f"[{words}](index.md)"
        name = posixpath.normpath(posixpath.join("docs", target))
        return words if words.strip("`") in name else f"{words} (`{name}`)"

    return LINK.sub(inside, markdown)

"""Steps of the site's build: roles of docstrings, the pages as plain Markdown, and llms.txt.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:class|func|mod|data|meth|attr):<code>~?([^<]+)</code>")
_markdown: dict[str, str] = {}
"""Path of each page → its Markdown as it was written."""
_pages: list[Any] = []
"""The pages in the order of the navigation."""


def on_nav(nav: Any, **_: Any) -> None:
    """Note the order of the pages; `mkdocs serve` repeats a build in one process."""
    _pages[:] = nav.pages


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Note the page as it was written."""
    _markdown[page.file.src_uri] = markdown


def on_page_content(html: str, **_: Any) -> str:
    """Show a role of reStructuredText, such as ``:class:`GRPO```, as code."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_post_build(config: Any, **_: Any) -> None:
    """Write every page as Markdown beside the site's pages, and llms.txt, which lists them."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}. Every page is also plain Markdown."]
    last = ""
    for page in _pages:
        path, markdown = page.file.src_uri, _markdown[page.file.src_uri]
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(markdown, encoding="utf-8")
        section = page.ancestors[-1].title if page.ancestors else "Start here"
        if section != last:
            lines += ["", f"## {section}", ""]
            last = section
        lines.append(f"- [{page.title}]({path}){summarize(markdown)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def summarize(markdown: str) -> str:
    """Return ``: `` and the page's first sentence, or nothing where a page does not begin with text."""
    text = re.sub(r"\A# .*\n+", "", markdown)
    paragraph = re.match(r"[A-Z`][^\n]*", text)
    sentence = re.match(r".*?[.](?=\s|$)", paragraph[0]) if paragraph else None
    return ": " + re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence[0]) if sentence else ""

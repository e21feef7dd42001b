"""Steps of the site's build: notebooks as pages, roles of docstrings, the pages as plain Markdown, and llms.txt.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROLE = re.compile(r":(?:class|func|mod|data|meth|attr):<code>~?([^<]+)</code>")
_markdown: dict[str, str] = {}
"""Path of each page → its Markdown as it was written."""
_pages: list[Any] = []
"""The pages in the order of the navigation."""


def on_files(files: Any, config: Any, **_: Any) -> None:
    """Add a page for each notebook; the notebook itself stays beside it, to download."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text = Path(notebook.abs_src_path).read_text(encoding="utf-8")
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=to_markdown(text, Path(notebook.src_uri).name)))


def on_nav(nav: Any, **_: Any) -> None:
    """Note the order of the pages; `mkdocs serve` repeats a build in one process."""
    _pages[:] = nav.pages


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Note the page as it was written; links to a notebook lead to its page, which is not a file of the repository."""
    _markdown[page.file.src_uri] = markdown = re.sub(r"(notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)
    return markdown


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


def to_markdown(notebook: str, name: str) -> str:
    """Return the cells of a notebook as a page: text as it is, code in blocks, no outputs.

    The page links to the notebook behind its heading.
    """
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    heading, _, rest = parts[0].partition("\n")
    return "\n\n".join([heading, f"[Download this notebook]({name})", rest.strip(), *parts[1:]]) + "\n"

"""Pictures of prompts in a report: each distinct thumbnail is in the page once, as a rule of its style."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from rlox_grpo.run.thumbnails import read_thumbnail

MAX_PICTURES = 64
"""Most distinct thumbnails of a page."""

_MAX_FOR_PROMPT = 8
_SMALLEST = 64
"""Smaller thumbnails are enlarged to about this number of pixels, so that the pixels of tiny pictures can be seen."""


class PicturesShown:
    """The thumbnails that a page shows. They are read from the run's folder and encoded again by Pillow.

    Attributes:
        style: the rules of the page's style with the thumbnails so far; empty without any.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._names: dict[str, str | None] = {}  # by digest; None: there is no thumbnail
        self.style = ""

    def show(self, row: dict[str, Any]) -> str:
        """Return the HTML of the pictures of a completion's prompt; empty without pictures."""
        digests = row.get("pictures")
        if not isinstance(digests, list) or not digests:
            return ""
        shown = "".join(self._show(str(digest), number) for number, digest in enumerate(digests[:_MAX_FOR_PROMPT], 1))
        left = len(digests) - _MAX_FOR_PROMPT
        more = f'<span class="quiet">… and {left:,} more pictures</span>' if left > 0 else ""
        return f'<div class="pictures">{shown}{more}</div>'

    def _show(self, digest: str, number: int) -> str:
        if digest not in self._names:
            self._names[digest] = self._add(digest)
        name = self._names[digest]
        if name is None:
            return f'<span class="quiet">picture {number} is not stored</span>'
        return f'<span class="{name}" role="img" aria-label="picture {number}"></span>'

    def _add(self, digest: str) -> str | None:
        """Add the rule of a thumbnail, and return its class; None if there is none, or if the page has enough."""
        number = sum(name is not None for name in self._names.values())
        if number == MAX_PICTURES:
            return None
        try:
            jpeg, (width, height) = read_thumbnail(self._run_dir, digest)
        except (OSError, ValueError, ImportError):
            return None
        factor = max(1, _SMALLEST // max(width, height))
        name = f"picture-{number}"
        self.style += (
            f".{name}{{display:inline-block;width:{width * factor}px;height:{height * factor}px;"
            f"background:0 0/100% 100% url(data:image/jpeg;base64,{base64.b64encode(jpeg).decode()})"
            + (";image-rendering:pixelated" if factor > 1 else "")
            + "}\n"
        )
        return name

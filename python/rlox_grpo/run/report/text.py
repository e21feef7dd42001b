"""Text and numbers for a page: everything a run holds may be hostile model output, so all of it passes here."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from typing import Any

MAX_CHARACTERS = 4000

# Shown by name and not acted on: characters that reorder, hide or break the text around them.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# A zero-width joiner holds emoji and several scripts together.
_KEPT = "\t\n\u200c\u200d"
_MAYBE_INVISIBLE = re.compile(r"[^\t\n\x20-\x7e\xa1-\xac\xae-\u05ff]")


def escape(value: object) -> str:
    """Text that is safe in HTML, in an element or in a quoted attribute.

    ``& < > " '`` become entities. Control characters, bidirectional overrides, lone surrogates and other
    invisible characters are spelled out, ``⟨U+202E⟩``: they neither act on the page nor stop it from being UTF-8.
    """
    return html.escape(_MAYBE_INVISIBLE.sub(_spell_out, str(value)), quote=True)


def model_text(value: object) -> str:
    """Make an HTML block of a prompt or completion: text or token ids, cut at ``MAX_CHARACTERS``."""
    if isinstance(value, list):
        text = " ".join(str(token) for token in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    left = len(text) - MAX_CHARACTERS
    more = f'<span class="quiet"> … and {left:,} more characters</span>' if left > 0 else ""
    return f'<pre class="model-text" dir="auto">{escape(text[:MAX_CHARACTERS])}{more}</pre>'


def number(value: Any, unit: str = "") -> str:
    """Write a number in about four digits: ``0.4012``, ``12,345``, ``1e-6``; ``—`` for none; other values as they are.

    Args:
        value: What a run's file holds; a number unless the file was not written by us.
        unit: ``%`` shows a share of 1 as a percentage; other units follow the number.
    """
    if value is None:
        return "—"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escape(value)
    try:
        float(value)
    except OverflowError:
        return escape(f"an integer past 1e308{' ' + unit if unit else ''}")
    if unit == "%":
        return f"{value:.1%}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        text = re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.3g}")
    else:
        text = f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def _spell_out(match: re.Match[str]) -> str:
    character = match[0]
    if character in _KEPT or unicodedata.category(character) not in _INVISIBLE:
        return character
    return f"⟨U+{ord(character):04X}⟩"

"""Format text and numbers for HTML. A run folder contains model output, which may be hostile, so all is escaped."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

MAX_CHARACTERS = 4000

# Characters that reorder, hide or break the text around them; the page shows their code points.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Zero-width joiners belong to emoji and to several scripts.
_ALLOWED = "\t\n\u200c\u200d"
_MAYBE_INVISIBLE = re.compile(r"[^\t\n\x20-\x7e\xa1-\xac\xae-\u05ff]")


def escape(value: object) -> str:
    """Return text that is safe in HTML, in an element or in a quoted attribute.

    ``& < > " '`` become entities, and invisible characters are spelled out; see :func:`visible`.
    """
    return html.escape(visible(value), quote=True)


def breakable(name: str) -> str:
    """Return the escaped name, with an optional line break after each slash."""
    return escape(name).replace("/", "/<wbr>")


def visible(value: object) -> str:
    """Spell out control characters, bidirectional overrides, lone surrogates and other invisible characters.

    U+202E becomes ``⟨U+202E⟩``. The result can be encoded as UTF-8.
    """
    return _MAYBE_INVISIBLE.sub(_spell_out, str(value))


def make_table(caption: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table with one row for each name and value."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(caption)}</caption><tbody>{cells}</tbody></table>"


def model_text(value: object) -> str:
    """Return the HTML block of a prompt or completion: text or token ids, cut at ``MAX_CHARACTERS``."""
    if isinstance(value, list):
        text = " ".join(str(token) for token in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    left = len(text) - MAX_CHARACTERS
    more = f'<span class="quiet"> … and {left:,} more characters</span>' if left > 0 else ""
    return f'<pre class="model-text" dir="auto">{escape(text[:MAX_CHARACTERS])}{more}</pre>'


def number(value: Any, unit: str = "") -> str:
    """Return a number in about four digits: ``0.4012``, ``12,345``, ``1e-6``; ``—`` for None; other values as text.

    Args:
        value: What a run's file holds: a number of any size, unless another program wrote the file.
        unit: ``%`` shows a share of 1 as a percentage; other units follow the number.
    """
    if value is None:
        return "—"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escape(value)
    try:
        value = float(value)
    except OverflowError:  # an integer past 1.8e308
        return "over 1.8e308" if value > 0 else "under −1.8e308"
    if unit == "%":
        return f"{value:.1%}" if abs(value) < 1e5 else f"{100 * value:.3g}%"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        text = re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.3g}")
    else:
        text = f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def _spell_out(match: re.Match[str]) -> str:
    character = match[0]
    if character in _ALLOWED or unicodedata.category(character) not in _INVISIBLE:
        return character
    return f"⟨U+{ord(character):04X}⟩"

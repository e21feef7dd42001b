"""Find the form of tool calls that a chat template writes, by reading a rendered call back."""

from __future__ import annotations

from typing import Any

from rlox_grpo.rollout.episodes.parsing import MARKS, CallFormat, parse_reply
from rlox_grpo.rollout.episodes.template import Template, TemplateError

_CALL = ("look_up", {"word": "a word"})


def find_call_format(template: Template) -> CallFormat | None:
    """The form whose parser reads a call as ``template`` writes it; None where none does, or none is written."""
    question: dict[str, Any] = {"role": "user", "content": "q"}
    function = {"name": _CALL[0], "arguments": _CALL[1]}
    call = {"id": "call00000", "type": "function", "function": function}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = template.render([question])
        whole = template.render([question, reply], generation_prompt=False)
    except TemplateError:
        return None
    if not whole.startswith(prompt):
        prompt = template.render([question], generation_prompt=False)
    said = whole[len(prompt) :]
    for form in _list_candidates(said):
        parsed = parse_reply(_cut_end(said, template, form), with_tools=True, call_format=form)
        if [(name, dict(arguments)) for name, arguments in parsed.calls] == [_CALL]:
            return form
    return None


def _list_candidates(said: str) -> list[CallFormat]:
    """Forms to try, those whose marks stand in the text first."""
    marked: list[CallFormat] = [form for form, marks in MARKS.items() if any(mark in said for mark in marks)]
    return [*marked, "llama3" if '"parameters"' in said else "json"]


def _cut_end(said: str, template: Template, form: CallFormat) -> str:
    """What stands before the turn's end token."""
    special = [str(token) for token in getattr(template.tokenizer, "all_special_tokens", [])]
    ends = [said.find(token) for token in special if token and token not in MARKS[form] and said.find(token) > 0]
    return said[: min(ends)] if ends else said

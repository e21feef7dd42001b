"""Tool calls are read in the form that the model's template writes, whatever text a model makes of it."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.messages import make_reply_message
from rlox_grpo.rollout.episodes.parsing import MARKS, MAX_CALLS, CallFormat, parse_reply
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.run_templates import find_rewrite
from rlox_grpo.rollout.episodes.template import Template, TemplateError, find_call_format
from rlox_grpo.rollout.episodes.tools import Tools, make_schemas

FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


A, B = ("f", {"x": 1}), ("g", {"y": [{"z": "a; b"}]})
A_JSON, B_JSON = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {"y": [{"z": "a; b"}]}}'
F, G = ("f", {"x": "1"}), ("g", {"y": "two\n\nlines", "z": " "})
F_XML = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
G_XML = "<function=g><parameter=y>\ntwo\n\nlines\n</parameter><parameter=z> </parameter></function>"
F_GLM = "<arg_key>x</arg_key>\n<arg_value>1</arg_value>"
G_GLM = "<arg_key>y</arg_key><arg_value>two\n\nlines</arg_value><arg_key>z</arg_key><arg_value> </arg_value>"
A_LLAMA, B_LLAMA = (text.replace("arguments", "parameters") for text in (A_JSON, B_JSON))


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("llama3", A_LLAMA, "", [A]),
        ("llama3", f" {A_LLAMA}; {B_LLAMA}\n", "", [A, B]),
        ("llama3", f"<|python_tag|>{A_LLAMA}", "", [A]),
        ("llama3", f"well\n<|python_tag|>{A_LLAMA};{B_LLAMA}", "well", [A, B]),
        ("llama3", f"[{A_JSON}, {B_JSON}]", "", [A, B]),
        ("llama3", "no call; {", "no call; {", []),
        ("mistral", f"[TOOL_CALLS] [{A_JSON}, {B_JSON}]", "", [A, B]),
        ("mistral", f"[TOOL_CALLS]{A_JSON[:0]}[{A_JSON}]", "", [A]),
        ("mistral", 'so\n[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": [{"z": "a; b"}]}', "so", [A, B]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [A]),
        ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [A]),
        ("mistral", f"[{A_JSON}]", "", [A]),
        ("mistral", "no call", "no call", []),
        ("json", A_JSON, "", [A]),
        ("json", f"<tool_call>{A_JSON}</tool_call>", f"<tool_call>{A_JSON}</tool_call>", []),
        ("qwen_xml", f"so\n<tool_call>\n{F_XML}\n</tool_call>\n<tool_call>{G_XML}</tool_call>", "so", [F, G]),
        ("qwen_xml", f"so\n{F_XML}\n</tool_call>", "so", [F]),  # without the outer tag that opens
        ("qwen_xml", f"{F_XML}{G_XML}", "", [F, G]),
        ("qwen_xml", "<tool_call><function=h></function></tool_call>", "", [("h", {})]),
        (
            "qwen_xml",
            "<function=h><parameter=x></function> <b>\n</parameter></function>",
            "",
            [("h", {"x": "</function> <b>"})],
        ),
        ("qwen_xml", "no call", "no call", []),
        ("glm", f"so\n<tool_call>f\n{F_GLM}\n</tool_call>\n<tool_call>g{G_GLM}</tool_call>", "so", [F, G]),
        ("glm", "<tool_call>h</tool_call>", "", [("h", {})]),
        ("glm", "no call", "no call", []),
        ("hermes", f"a\n<tool_call>\n{A_JSON}\n</tool_call>\n<tool_call>{B_JSON}</tool_call>", "a\n", [A, B]),
    ],
)
def test_calls_are_read(form: CallFormat, text: str, content: str, calls: list[Any]) -> None:
    parsed = parse_reply(text, with_tools=True, call_format=form)
    assert (parsed.error, [*parsed.calls]) == (None, calls)
    assert parsed.content.strip("\n") == content.strip("\n")
    assert parse_reply(text, with_tools=False, call_format=form).content == text


@pytest.mark.parametrize(
    ("form", "text", "told"),
    [
        ("llama3", A_LLAMA[:-1], "is not JSON"),
        ("llama3", f"{A_LLAMA} and more", "is not JSON"),
        ("llama3", "<|python_tag|>print(1)", "is not JSON"),
        ("llama3", "<|python_tag|> ", "must be followed by"),
        ("llama3", ";".join([A_LLAMA] * (MAX_CALLS + 1)), "more than 64"),
        ("mistral", "[TOOL_CALLS]", "must be followed by"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "must be followed by"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1', "is not JSON"),
        ("mistral", f"[TOOL_CALLS][{A_JSON}] more", "extra data"),
        ("mistral", "[TOOL_CALLS]" + json.dumps([{"name": "f"}] * 65), "more than 64"),
        ("mistral", '[TOOL_CALLS]f{"x": 1}' * 65, "more than 64"),
        ("qwen_xml", "<tool_call>", "must be followed by <function=name>"),
        ("qwen_xml", f"<tool_call>{A_JSON}</tool_call>", "must be followed by <function=name>"),
        ("qwen_xml", f"<tool_call>{F_XML}", "is not closed by </tool_call>"),
        ("qwen_xml", "<function=f", "must be followed by a name"),
        ("qwen_xml", "<function=>", "must be followed by a name"),
        ("qwen_xml", "<function=f><parameter=x>1", "lacks </parameter>"),
        ("qwen_xml", "<function=f><parameter=x>1</parameter>", "expected <parameter=name> or </function>"),
        ("qwen_xml", "<function=f><parameter=x></parameter>\n1</parameter>", "expected <parameter=name>"),
        ("qwen_xml", "<function={}>", "in <function={}> expected <parameter=name> or </function>"),
        ("qwen_xml", "<function=f>" + "<parameter=x>1</parameter>" * 2 + "</function>", "x of f is given twice"),
        ("qwen_xml", F_XML * (MAX_CALLS + 1), "more than 64"),
        ("glm", "<tool_call>", "is not closed by </tool_call>"),
        ("glm", "<tool_call></tool_call>", "the name of a tool"),
        ("glm", f"<tool_call>f{F_GLM}", "expected <arg_key> or </tool_call>"),
        ("glm", "<tool_call>f<arg_key>x</arg_key></tool_call>", "expected <arg_value> or </tool_call>"),
        ("glm", "<tool_call>f<arg_key>x</tool_call>", "lacks </arg_key>"),
        ("glm", f"<tool_call>f{F_GLM}{F_GLM}</tool_call>", "x of f is given twice"),
        ("glm", "<tool_call>f</tool_call>" * (MAX_CALLS + 1), "more than 64"),
        ("json", "[" * 100_000 + '"name"', "is not JSON"),
        ("json", '{"name": "f", "arguments": {"x": 1e999}}', "1e999 is too large"),
        ("json", '{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ("json", '{"name": "f", "arguments": [1]}', "must be a JSON object"),
    ],
)
def test_malformed_calls_are_told(form: CallFormat, text: str, told: str) -> None:
    parsed = parse_reply(text, with_tools=True, call_format=form)
    assert told in (parsed.error or "")
    assert (parsed.calls, len(parsed.error or "") < 400) == ((), True)


def convert(form: CallFormat, text: str, **given: Any) -> Any:
    """The arguments of a call of ``f`` that gives ``text`` for x, and the error; ``given`` is x's schema."""
    schemas = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": given}}}}]
    written = {
        "qwen_xml": f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[form]
    parsed = parse_reply(written, with_tools=True, call_format=form, schemas=schemas)
    return parsed.error or dict(parsed.calls[0][1])["x"]


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
def test_arguments_in_tags_are_of_the_schemas_type(form: CallFormat) -> None:
    assert convert(form, "12", type="string") == "12"
    assert convert(form, "12") == "12"
    assert convert(form, "12", type="integer") == 12
    assert convert(form, " -1.5e3", type="number") == -1500.0
    assert [convert(form, text, type="boolean") for text in ("True", "false")] == [True, False]
    assert convert(form, '{"a": [1]}', type="object") == {"a": [1]}
    assert convert(form, "[1, 2]", type="array") == [1, 2]
    assert convert(form, "None", type="integer", nullable=True) is None
    assert convert(form, "12", anyOf=[{"type": "integer"}, {"type": "null"}]) == 12
    assert convert(form, "a", type=["integer", "string"]) == "a"
    assert convert(form, "a\n <b> </c>\n", type="string") == "a\n <b> </c>\n"
    wrong = {
        "integer": ("1.5", "True", "None", "9" * 10_000),
        "number": ("1e999", "NaN"),
        "array": ("a",),
        "object": ("[" * 100_000,),
        "boolean": ("1",),
    }
    for kind, text in [(kind, text) for kind, texts in wrong.items() for text in texts]:
        assert convert(form, text, type=kind).startswith(f"the argument x of f must be of type {kind}, got ")
        assert len(convert(form, text, type=kind)) < 200
    assert convert(form, "1", type="no such type") == "1"


PIECES = [
    "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "f>", "<tool_call><function=f><parameter=x>", "<tool_call>f<arg_key>x</arg_key><arg_value>",
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "\\ud800"}}', "{", "}", "[", "]", '"name"',
    ":", ",", ";", "1e400", "-", "NaN", "null", '"', "\\", "\n", " ", "\x00", "\ud800", "é", "9" * 50,
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30), st.sampled_from(FORMATS))
def test_hostile_text_is_read_or_refused(pieces: list[str], form: CallFormat) -> None:
    text = "".join(pieces)
    parsed = parse_reply(text, with_tools=True, call_format=form)
    assert len(parsed.calls) <= MAX_CALLS
    assert not (parsed.error and parsed.calls)
    for name, arguments in parsed.calls:
        assert isinstance(name, str)
        json.dumps(dict(arguments), allow_nan=False)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "piece", [*PIECES, "<tool_call>{", "[TOOL_CALLS]f{", '{"name": 1};', "[{", '{"a":', "[TOOL_CALLS]["]
)
def test_a_long_text_takes_linear_time(form: CallFormat, piece: str) -> None:
    """A million characters: what is quadratic in them takes minutes."""
    for before in ("", *MARKS[form], '{"name": "f", "arguments": {}}'):
        text = before + piece * (1_000_000 // len(piece))
        start = time.process_time()
        parse_reply(text, with_tools=True, call_format=form)
        assert time.process_time() - start < 10


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = QWEN.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
PLAIN = LLAMA.replace('"parameters"', '"arguments"')
MISTRAL = PLAIN.replace('{"name"', '[TOOL_CALLS][{"name"').replace("tojson }}}", "tojson }}}]")
MISTRAL_11 = QWEN.replace('<tool_call>\n{"name": "', "[TOOL_CALLS]").replace('", "arguments": ', "[ARGS]")
MISTRAL_11 = MISTRAL_11.replace("tojson }}}\n</tool_call>", "tojson }}")
XML = QWEN.replace('{"name": "', "<function=").replace('", "arguments": ', ">")


@pytest.mark.parametrize(
    ("template", "form"),
    [(QWEN, "hermes"), (LLAMA, "llama3"), (PLAIN, "json"), (MISTRAL, "mistral"), (MISTRAL_11, "mistral"), (XML, None)],
)
def test_the_form_is_the_templates(template: str, form: str | None, byte_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    assert find_call_format(Template(tokenizer, make_schemas([look_up]))) == form


TRL_FORMS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "lfm2": None,
    "qwen3_6": "qwen_xml",
    "qwen3_5_nothink": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "glm4moe": "glm",
}


@pytest.mark.parametrize(("name", "form"), TRL_FORMS.items())
def test_the_form_of_published_templates(name: str, form: str | None, byte_tokenizer: Any) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|eot_id|>"]})
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    assert find_call_format(Template(tokenizer, make_schemas([look_up]))) == form


def write_turns(end_of_call: str, end: str, before_result: str) -> str:
    """A template whose turns end by ``end``, and by ``end_of_call`` if they call a tool."""
    call = "<tool_call>{{ call.function.name }}\n{{ call.function.arguments | tojson }}\n</tool_call>"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'tool' %}}{{{{ {before_result!r} + m.content }}}}{{% else %}}"
        f"<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% for call in m.tool_calls or [] %}}{call}{{% endfor %}}"
        f"{{% if m.tool_calls %}}{{{{ {end_of_call!r} }}}}{{% elif m.role == 'assistant' %}}{{{{ {end!r} }}}}"
        "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


@pytest.mark.parametrize(
    ("template", "increment"),
    [
        (write_turns("", "", "<|observation|>"), "<|observation|>R<|assistant|>"),
        (write_turns("\n", "\n", "<|observation|>"), "\n<|observation|>R<|assistant|>"),
        (write_turns("<|call|>", "<|end|>", "\n"), "<|call|>\nR<|assistant|>"),
        (write_turns("<|end|>", "<|end|>\n", "\n"), "<|end|>\nR<|assistant|>"),
        (write_turns("</s><|end|>", "</s><|end|>", ""), "</s><|end|>R<|assistant|>"),
    ],
)
def test_a_result_follows_the_whole_call(template: str, increment: str, byte_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|call|>", "<|observation|>"]})
    tokenizer.chat_template = template
    result = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "R"}
    assert Template(tokenizer, make_schemas([look_up])).render_increment([result]) == increment


SPECIAL = re.compile(r"<\|[^|<>]*\|>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|<｜[^｜]*｜>|<s>|</s>")


def test_increments_of_published_templates_are_the_whole_rendering(byte_tokenizer: Any) -> None:
    """An increment after calls is the whole rendering from the end of their turn on, or a rewrite is found."""
    trl = pytest.importorskip("trl")
    question, go_on = {"role": "user", "content": "q"}, {"role": "user", "content": "go on"}
    checked = set()
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        tokenizer, text = copy.deepcopy(byte_tokenizer), path.read_text(encoding="utf-8")
        special = sorted({"<s>", *SPECIAL.findall(text)})
        tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": special})
        tokenizer.chat_template = text
        template = Template(tokenizer, make_schemas([look_up]))
        try:
            rewrite = find_rewrite(template)
        except TemplateError:
            continue  # it has no tools
        ends = [token for token in special if "tool_call" not in token]
        for arguments, content, count in itertools.product(({"word": "a"}, {"x": [1]}, {}), ("", "so"), (1, 2)):
            calls = [ToolCall("look_up", arguments, f"call{place:05}") for place in range(count)]
            history = [question, make_reply_message(content, calls=calls)]
            results = [{"role": "tool", "name": c.name, "tool_call_id": c.id, "content": f"R{c.id}"} for c in calls]
            for new in (results, [*results, go_on]):
                try:
                    whole, final = template.render([*history, *new]), template.render(history, generation_prompt=False)
                except TemplateError:
                    continue  # such as Llama 3.1's, which has one call in a message
                said = cut_ends(final, ends)
                if not whole.startswith(said):
                    assert rewrite is not None, path.stem
                    continue
                increment = template.render_increment(new)
                assert whole.endswith(increment), path.stem
                assert cut_ends(whole.removesuffix(increment), ends) == said, (path.stem, increment)
                checked.add(path.stem)
    assert len(checked) > 40


def cut_ends(text: str, ends: list[str]) -> str:
    """Cut special tokens and blanks off the end."""
    while (cut := next((text.removesuffix(end) for end in ends if text.endswith(end)), text).rstrip()) != text:
        text = cut
    return text


def test_marks_that_are_special_tokens_are_read_and_not_shown(byte_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    tokenizer.chat_template = MISTRAL_11
    template = Template(tokenizer, make_schemas([look_up]))
    template.call_format = "mistral"
    said = iter(['hm[TOOL_CALLS]look_up[ARGS]{"word": "a"}[TOOL_CALLS]look_up[ARGS]{"word": "b"}', "plain [ARGS] text"])

    async def sample(request: TurnRequest) -> SampledTurn:
        ids = np.array(tokenizer(next(said) + "<|im_end|>", add_special_tokens=False)["input_ids"])
        return SampledTurn(ids, np.zeros(len(ids), dtype=np.float32), True)

    async def run() -> None:
        chat = Chat(template, sample, Budget(9, 999), tools=Tools([look_up]), end_ids=[tokenizer.eos_token_id])
        reply = await chat.turn("q")
        assert [(call.name, dict(call.arguments)) for call in reply.tool_calls] == [
            ("look_up", {"word": "a"}),
            ("look_up", {"word": "b"}),
        ]
        assert (reply.content, reply.message["content"]) == ("hm", "hm")
        assert all(len(call.id) == 9 and call.id.isalnum() for call in reply.tool_calls)  # as Mistral's template asks
        messages = await chat.call_tools(reply)
        assert [message["content"] for message in messages] == ["a", "b"]
        assert (await chat.turn(messages)).content == "plain  text"

    asyncio.run(run())


@pytest.mark.parametrize(("option", "form"), [("auto", "mistral"), ("json", "json")])
def test_the_option_comes_first(option: str, form: str, byte_tokenizer: Any) -> None:
    runner = make_runner(byte_tokenizer, MISTRAL, call_format=option)
    assert runner.main.template.call_format == form


def make_runner(byte_tokenizer: Any, template: str, **options: Any) -> EpisodeRunner:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    return EpisodeRunner(None, [look_up], GRPOConfig.create(**options).split().episodes, tokenizer)


LISTED = "{% if tools %}{{ '<|im_start|>system\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
"""Shows the policy its tools, before another template."""


def test_a_form_that_is_not_read_is_warned_of(byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_runner(byte_tokenizer, LISTED + XML).main.template.call_format == "hermes"
    assert "in an unknown format" in caplog.text


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template of plain chats, such as SmolLM2-135M-Instruct's: it takes tools, and leaves them out."""


@pytest.mark.parametrize(("option", "parsed"), [("auto", "in Hermes' format"), ("json", "call_format='json'")])
def test_tools_that_the_prompt_does_not_show_are_warned_of(
    option: str, parsed: str, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_runner(byte_tokenizer, CHATML, call_format=option)
    (record,) = caplog.records
    assert "does not show the tools to the policy" in record.message
    assert parsed in record.message


def test_tools_that_the_prompt_shows_need_no_warning(byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_runner(byte_tokenizer, LISTED + QWEN)
    assert not caplog.records


@pytest.mark.parametrize("name", ["qwen3_6", "glm4moe"])
def test_calls_in_tags_reach_the_tool_with_their_types(name: str, byte_tokenizer: Any) -> None:
    """By a published template: the call's number is a number, and a wrong one is told to the policy."""
    trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")

    def add(number: int, text: str) -> str:
        """Add.

        Args:
            number: A number.
            text: A text.
        """
        return f"{number + 1} {text}"

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    template = Template(tokenizer, make_schemas([add]))
    form = find_call_format(template)
    assert form is not None
    template.call_format = form
    ask = {"role": "user", "content": "q"}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"number": 41, "text": "7"}}}]
    said = template.render([ask, {"role": "assistant", "content": "", "tool_calls": calls}], generation_prompt=False)
    said = said[len(template.render([ask])) :] if said.startswith(template.render([ask])) else said
    said = said[said.index("<tool_call>") : said.index("</tool_call>") + len("</tool_call>")]
    replies = iter([said, said.replace("41", "many")])

    async def sample(request: TurnRequest) -> SampledTurn:
        ids = np.array(tokenizer(next(replies), add_special_tokens=False)["input_ids"])
        return SampledTurn(ids, np.zeros(len(ids), dtype=np.float32), True)

    async def run() -> None:
        chat = Chat(template, sample, Budget(9, 999), tools=Tools([add]), end_ids=[tokenizer.eos_token_id])
        (message,) = await chat.call_tools(await chat.turn("q"))
        assert message["content"] == "42 7"
        (message,) = await chat.call_tools(await chat.turn([message]))
        assert message["content"] == "error: the argument number of add must be of type integer, got 'many'"

    asyncio.run(run())


def test_slow_calls_of_a_turn_run_together_and_answer_in_order() -> None:
    order = []

    async def wait(place: int) -> int:
        """Wait.

        Args:
            place: Its place.
        """
        await asyncio.sleep((10 - place) * 0.01)
        order.append(place)
        return place

    calls = tuple(SimpleNamespace(name="wait", arguments={"place": place}, id=str(place)) for place in range(10))
    reply: Any = SimpleNamespace(parse_error=None, tool_calls=calls)
    messages = asyncio.run(Tools([wait]).answer(reply))
    assert [message["content"] for message in messages] == [str(place) for place in range(10)]
    assert order == sorted(order, reverse=True)


def test_a_tool_gets_its_own_arguments() -> None:
    """What it does to them changes neither the conversation nor the reply."""

    def sort(words: list[str], options: dict[str, list[int]]) -> str:
        words.sort()
        options["by"].clear()
        return " ".join(words)

    call = ToolCall("sort", {"words": ["b", "a"], "options": {"by": [1]}}, "call00000")
    message = make_reply_message("", calls=[call])
    ids = np.zeros(1, dtype=np.int64)
    reply = Reply("", "", None, (call,), "stop", ids, ids.astype(np.float32), message)
    said = copy.deepcopy(message)
    (answer,) = asyncio.run(Tools([sort]).answer(reply))
    assert answer["content"] == "a b"
    assert message == said
    assert call.arguments == {"words": ["b", "a"], "options": {"by": [1]}}
    call.arguments["words"].clear()  # type: ignore[index]
    assert message == said

"""Prompts in every form that users hold, and an order that a resumed run continues."""

import copy
from itertools import islice

import datasets
import numpy as np
import pandas
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlox_grpo.prompts import load
from rlox_grpo.prompts.load import (
    fingerprint_prompts,
    load_prompts,
    load_rows,
    read_rows,
    refuse_too_long,
    shuffle_prompts,
)
from rlox_grpo.prompts.stream import read_stream


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<eos>", "<pad>", "a", "b", "c", "user", "assistant", ":"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    return fast


def ids(prompts):
    return [prompt.token_ids.tolist() for prompt in prompts]


def test_an_end_that_the_tokenizer_puts_behind_a_text_is_refused(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    core, special = tokenizer.backend_tokenizer, [("<eos>", 0)]
    core.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=special)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the tokenizer puts its end token '<eos>' behind a text"):
        load_prompts(["a b"], tokenizer)
    assert ids(load_prompts([[{"role": "user", "content": "a"}]], tokenizer)) == [[5, 7, 2, 6, 7]]
    core.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert ids(load_prompts(["a <eos>"], tokenizer)) == [[2, 0]]


def make_call(name, arguments):
    """Messages with a tool call, of other keys for other calls."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "a"}] if name == "g" else "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": "R"},
    ]


def make_tool(name, properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


CALLS = [
    {"prompt": make_call("f", {"city": "Rome"}), "tools": [make_tool("f", {"city": {"type": "string"}})]},
    {"prompt": make_call("h", {"year": 3}), "tools": [make_tool("h", {"year": {"type": "integer", "minimum": 1}})]},
]


def make_tables(rows, folder):
    """The same rows in each form that Arrow pads."""
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(folder / "rows.parquet")
    return {
        "Dataset": dataset,
        "parquet": folder / "rows.parquet",
        "frame": pandas.read_parquet(folder / "rows.parquet"),
        "stream": list(islice(read_stream(dataset.to_iterable_dataset()), len(rows))),
        "streamed parquet": list(
            islice(
                read_stream(
                    datasets.load_dataset(
                        "parquet",
                        data_files=str(folder / "rows.parquet"),
                        split="train",
                        streaming=True,
                        cache_dir=str(folder / "cache"),
                    )
                ),
                len(rows),
            )
        ),
    }


def test_arrow_adds_no_keys_to_messages_and_tools(tokenizer, tmp_path):
    """Arrow stores dicts with the union of their keys, and null for the keys that one lacks."""
    telling = copy.deepcopy(tokenizer)
    telling.chat_template = "{% for m in messages %}{{ m | tojson }} {% endfor %}"
    expected = load_prompts(CALLS, telling)
    assert "year" not in expected[0].text
    for kind, table in make_tables(CALLS, tmp_path).items():
        loaded = load_prompts(table, telling)
        assert [prompt.source for prompt in loaded] == [prompt.source for prompt in expected], kind
        assert [prompt.columns for prompt in loaded] == [prompt.columns for prompt in expected], kind
        assert [prompt.columns for prompt in load_rows(table)] == [prompt.columns for prompt in expected], kind


def test_a_column_of_a_dataset_is_prompts(tokenizer):
    """``train(dataset["prompt"])``: a column has features, as a dataset has, and its entries are no rows."""
    texts = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])["prompt"]
    assert [prompt.source for prompt in load_prompts(texts, tokenizer)] == ["a", "b"]
    messages = datasets.Dataset.from_list(CALLS)["prompt"]
    assert [prompt.source for prompt in load_prompts(messages, tokenizer)] == [row["prompt"] for row in CALLS]


def test_nulls_that_the_user_wrote_stay_where_arrow_adds_none(tokenizer):
    """In lists, and in columns of the type Json, in which datasets reads .jsonl files."""
    rows = [{"prompt": make_call("f", {"unit": None})}, {"prompt": make_call("h", {"year": 3})}]
    assert load_prompts(rows, tokenizer)[0].source == rows[0]["prompt"]
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no Json")
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(prompt=datasets.List(datasets.Json())))
    assert load_prompts(dataset, tokenizer)[0].source == rows[0]["prompt"]


def test_nested_columns_of_rewards_keep_the_nulls_of_the_table_with_a_warning(tokenizer, caplog):
    """Whether the row had the key cannot be read from the table, and a reward may read it."""
    rows = [{"prompt": "a", "facts": {"x": 1}}, {"prompt": "b", "facts": {"x": 2, "y": 3}}]
    loaded = load_prompts(datasets.Dataset.from_list(rows), tokenizer)
    assert loaded[0].columns == {"facts": {"x": 1, "y": None}}
    assert "facts['y'] is null in row 0 and not in others: Arrow stores a null for each key that" in caplog.text
    caplog.clear()
    assert load_prompts(rows, tokenizer)[0].columns == {"facts": {"x": 1}}
    assert not caplog.text


def test_a_token_tensor():
    prompts = load_prompts(torch.tensor([[1, 2], [3, 4]]))
    assert ids(prompts) == [[1, 2], [3, 4]]
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert prompts[0].token_ids.dtype == np.int64
    assert prompts[0].text is None


def test_token_lists_of_different_lengths():
    assert ids(load_prompts([[1], [2, 3]])) == [[1], [2, 3]]


def test_strings(tokenizer):
    prompts = load_prompts(["a b", "c"], tokenizer)
    assert ids(prompts) == [[2, 3], [4]]
    assert prompts[0].text == prompts[0].source == "a b"


def test_messages_go_through_the_template_and_stay_as_the_source(tokenizer):
    messages = [{"role": "user", "content": "a"}]
    (prompt,) = load_prompts([messages], tokenizer)
    assert prompt.text == "user : a assistant :"
    assert prompt.token_ids.tolist() == [5, 7, 2, 6, 7]
    assert prompt.source == messages


def test_an_assistant_message_at_the_end_is_continued(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (prompt,) = load_prompts([messages], tokenizer)
    assert prompt.text == "user : a assistant : b"


def test_texts_are_tokenised_in_batches_as_one_by_one(tokenizer, monkeypatch):
    bos = copy.deepcopy(tokenizer)
    bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    chat = [{"role": "user", "content": "a"}]
    prompts = ["a b", chat, [3, 4], "c", np.array(chat), "a", "b c", chat]
    one_by_one = [load_prompts([prompt], bos)[0] for prompt in prompts]
    assert one_by_one[0].token_ids.tolist() == [0, 2, 3]  # with the tokenizer's special token; messages without
    monkeypatch.setattr(load, "_TEXTS_PER_CALL", 2)
    together = load_prompts(prompts, bos)
    assert ids(together) == ids(one_by_one)
    assert [(p.index, p.text, p.source) for p in together] == [
        (index, p.text, p.source) for index, p in enumerate(one_by_one)
    ]


def test_columns_reach_the_prompt(tokenizer):
    rows = [{"prompt": "a", "target": 3, "nums": [1, 2]}]
    assert dict(load_prompts(rows, tokenizer)[0].columns) == {"target": 3, "nums": [1, 2]}
    loaded = load_prompts(datasets.Dataset.from_list(rows), tokenizer)
    assert dict(loaded[0].columns) == {"target": 3, "nums": [1, 2]}


def test_files(tokenizer, tmp_path):
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text('{"prompt": "a b", "target": 1}\n\n{"prompt": "c", "target": 2}\n')
    datasets.Dataset.from_list([{"prompt": "a b", "target": 1}]).to_parquet(parquet)
    assert ids(load_prompts(jsonl, tokenizer)) == [[2, 3], [4]]
    assert ids(load_prompts(str(parquet), tokenizer)) == [[2, 3]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        (["a", ""], r"prompts\[1\] is empty"),
        ([[1], []], r"prompts\[1\] is empty"),
        ([{"prompt": "a"}, {"question": "b"}], r"prompts\[1\] has no 'prompt' column; it has 'question'"),
        (torch.zeros(2, 2, 2), r"shape \(2, 2, 2\)"),
        (torch.zeros(0, 3, dtype=torch.int64), "prompts is empty"),
    ],
)
def test_prompts_that_cannot_be_used(prompts, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        load_prompts(prompts, tokenizer)


def test_a_prompt_of_another_type_is_named():
    with pytest.raises(TypeError, match=r"prompts\[0\] is int"):
        load_prompts([3])
    with pytest.raises(TypeError, match=r"prompts\[0\] is list"):
        load_prompts([[1.5, 2.0]])


def test_text_without_a_tokenizer():
    with pytest.raises(ValueError, match=r"prompts\[0\] is text and there is no tokenizer"):
        load_prompts(["a"])


def test_messages_without_a_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    with pytest.raises(ValueError, match="no chat_template"):
        load_prompts([[{"role": "user", "content": "a"}]], bare)


def test_broken_rows_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_rows(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: expected an object, got list"):
        read_rows(path)
    with pytest.raises(ValueError, match=r"\.jsonl, \.parquet and \.csv"):
        read_rows(tmp_path / "rows.xlsx")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "score": NaN}', "line 1: NaN is not JSON: write null, or leave the key out"),
        ('{"prompt": "a", "score": -Infinity}', "line 1: -Infinity is not JSON"),
        ('{"prompt": "a", "answer": 1, "answer": 2}', "line 1: the key 'answer' occurs twice in an object"),
        ('{"prompt": "a"},', "line 1: not JSON .*; the line ends in a comma: write one object a line, without commas"),
        ('[\n{"prompt": "a"}\n]', r"line 1: .* the value goes on in the next line: .* pass json.load\(open\(path\)\)"),
        ('[{"prompt": "a"}]', r"line 1: expected an object, got list; .*one JSON array, pass json.load"),
    ],
)
def test_what_is_wrong_with_a_line_of_json_is_named(text, message, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_a_byte_order_mark_is_not_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n', encoding="utf-8")
    assert read_rows(path) == [{"prompt": "a"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_in_another_encoding_is_named(name, tmp_path):
    path = tmp_path / name
    path.write_text('{"prompt": "é"}\n', encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8 \(.*byte 0xe9.*\): save it as UTF-8"):
        read_rows(path)


def test_csv_values_are_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a, b",4\n"two\nlines",\n')
    assert read_rows(path) == [{"prompt": "a, b", "answer": "4"}, {"prompt": "two\nlines", "answer": ""}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,1\nb,2,3\n", r"rows\.csv, line 3: the header has 2 columns"),
        ("prompt,answer\na\n", r"rows\.csv, line 2: the header has 2 columns"),
        ('prompt\n"a\n', r"rows\.csv, line 2: not CSV"),
        ("prompt,answer,answer\na,1,2\n", r"rows\.csv, line 1: the header has two columns 'answer'"),
        ("prompt, answer\na,1\n", r"rows\.csv, line 1: the column ' answer' of the header has blanks around its name"),
        ("prompt,answer\na,1,\n", r"rows\.csv, line 2: .* another number; this row ends in a comma"),
        ("prompt,answer,\na,1\n", r"rows\.csv, line 2: .* another number; the header ends in a comma"),
    ],
)
def test_a_broken_csv_names_its_line(text, message, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_columns_are_renamed_before_anything_reads_them(tokenizer):
    rows = [{"problem": "a", "solution": "4", "answer": "b"}]
    (prompt,) = load_prompts(rows, tokenizer, prompt_column="problem", columns={"answer": "solution"})
    assert prompt.text == "a"
    assert prompt.columns == {"answer": "4"}
    (asked,) = load_prompts(rows, tokenizer, "boxed", columns={"question": "problem"})
    assert asked.columns["question"] == "a"


def test_a_column_that_is_replaced_is_named_once(tokenizer, caplog):
    rows = [{"prompt": "a", "truth": "4"}, {"prompt": "b", "truth": "5", "gold": "6"}]
    for _ in range(2):
        load_prompts(rows, tokenizer, columns={"gold": "truth"})
    assert caplog.text.count("columns={'gold': 'truth'} replaces the column 'gold' that prompts[1] has") == 1
    caplog.clear()
    load_prompts([{"prompt": "a", "x": 1, "y": 2}], tokenizer, columns={"x": "y", "y": "x"})
    assert not caplog.text


def test_a_renamed_column_that_is_missing_is_named(tokenizer):
    rows = [{"problem": "a"}, {"question": "b"}]
    with pytest.raises(ValueError, match=r"prompts\[1\] has no 'problem' column; it has 'question'"):
        load_prompts(rows, tokenizer, prompt_column="problem")
    with pytest.raises(ValueError, match="prompts has no columns"):
        load_prompts(["a"], tokenizer, columns={"answer": "solution"})


def test_a_system_prompt_comes_before_text_and_messages(tokenizer):
    user = {"role": "user", "content": "a"}
    text, chat = load_prompts(["a", [user]], tokenizer, system_prompt="b")
    assert text.text == chat.text == "system : b user : a assistant :"
    assert text.source == [{"role": "system", "content": "b"}, user]
    with pytest.raises(ValueError, match=r"prompts\[1\] has a system message"):
        load_prompts(["a", [{"role": "system", "content": "c"}, user]], tokenizer, system_prompt="b")
    with pytest.raises(ValueError, match=r"prompts\[0\] is not text or chat messages"):
        load_prompts([[1, 2]], tokenizer, system_prompt="b")


def test_variables_reach_the_chat_template(tokenizer):
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template += "{% if enable_thinking is defined and not enable_thinking %} c{% endif %}"
    messages = [[{"role": "user", "content": "a"}]]
    (prompt,) = load_prompts(messages, thinking, chat_template_kwargs={"enable_thinking": False})
    assert prompt.text == "user : a assistant : c"
    with pytest.raises(ValueError, match="'enable_thinkng', which the tokenizer's chat template does not read"):
        load_prompts(messages, thinking, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ValueError, match="no prompt is chat messages"):
        load_prompts(["a"], thinking, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="'tokenize': that variable is set for each prompt"):
        load_prompts(messages, thinking, chat_template_kwargs={"tokenize": True})


def test_a_template_that_reads_only_lists_of_entries_shows_the_text(tokenizer):
    """As that of SmolVLM, whose prompts of text alone have no reader of pictures."""
    listing = copy.deepcopy(tokenizer)
    listing.chat_template = (
        "{% for message in messages %}{{ message.role }} :{% for entry in message.content %}"
        "{% if entry.type == 'text' %} {{ entry.text }}{% endif %}{% endfor %} {% endfor %}"
    )
    messages = [{"role": "user", "content": "a b"}]
    mixed = [{"role": "system", "content": [{"type": "text", "text": "b"}]}, *messages]
    first, second, text = load_prompts([messages, mixed, "a"], listing)
    assert (first.text, second.text, text.text) == ("user : a b ", "system : b user : a b ", "a")
    assert first.source == messages


def test_a_template_that_refuses_a_conversation_without_a_system_message_gets_texts(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}{{ message.role + ' : ' + message.content + ' ' }}{% endfor %}"
    )
    (prompt,) = load_prompts([[{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]], strict)
    assert prompt.text == "system : b user : a "


def test_a_prompt_that_leaves_no_room():
    prompts = load_prompts([[1, 2], [1, 2, 3]])
    refuse_too_long(prompts, 5, 8)
    refuse_too_long(prompts, 5, None)
    with pytest.raises(ValueError, match=r"prompts\[1\] has 3 tokens: with max_new_tokens=6 it passes the model's 8"):
        refuse_too_long(prompts, 6, 8)


def test_every_epoch_draws_every_prompt_once_in_another_order():
    drawn = list(islice(shuffle_prompts(7, seed=1, start=0), 21))
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert drawn != list(islice(shuffle_prompts(7, seed=2, start=0), 21))


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 20])
def test_a_resumed_order_is_the_rest_of_the_whole(start):
    whole = list(islice(shuffle_prompts(7, seed=3, start=0), 40))
    assert list(islice(shuffle_prompts(7, seed=3, start=start), 40 - start)) == whole[start:]


def test_fingerprints_tell_prompts_apart():
    assert fingerprint_prompts(load_prompts([[1, 2], [3]])) != fingerprint_prompts(load_prompts([[1], [2, 3]]))
    assert fingerprint_prompts(load_prompts([[1, 2]])) == fingerprint_prompts(load_prompts(torch.tensor([[1, 2]])))


def test_a_null_content_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"prompts\[0\], message 0 has no 'content'; it is None"):
        load_prompts([[{"role": "user", "content": None}]], tokenizer)


def test_parquet_leaves_no_copy_in_the_home(tmp_path, monkeypatch):
    """A home that cannot be written, as in many containers, is no error."""
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "home").write_text("a file, and no folder")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    assert read_rows(tmp_path / "rows.parquet") == [{"prompt": "a"}, {"prompt": "b"}]

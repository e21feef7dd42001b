"""Wrong inputs that a user may give: each is an error or a warning that can be mended from its words alone.

Models are in test_wrong_models.py, run files and the command line in test_wrong_run_files.py, metric sinks in
test_sinks.py, and what a resumed run may change in test_resume.py.
"""

import ast
import copy
import os

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import processors
from transformers import TrainerCallback

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.comparison import warn_about_trained_prompts
from rlox_grpo.prompts.load import load_prompts, load_rows
from rlox_grpo.prompts.stream import PEEKED
from rlox_grpo.rewards import ExactAnswer, MathAnswer, RewardError, StepScores
from rlox_grpo.types import Prompt
from toy import PROMPTS, ToyLM, options, share_of_target

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    """The byte tokenizer with a chat template."""
    chat = copy.deepcopy(byte_tokenizer)
    chat.chat_template = TEMPLATE
    return chat


@pytest.fixture(scope="module")
def model(make_tiny_model, tokenizer):
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1)


SETTINGS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}


def score_length(completions):
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def train(model, tokenizer):
    """``train(prompts, reward, **options)``: one step of the tiny model."""

    def run(prompts, reward=score_length, *, eval_prompts=None, **changes):
        trainer = GRPO(copy.deepcopy(model), reward, tokenizer=tokenizer, **{**SETTINGS, **changes})
        return trainer.train(prompts, eval_prompts=eval_prompts)

    return run


def chat(*messages):
    return [{"prompt": [*messages]}]


USER = {"role": "user", "content": "2+2?"}
USER_PROMPT = [USER]

# --- prompts ---

PROMPT_ROWS = [
    # label, prompts, error, message
    (
        "DatasetDict",
        lambda: datasets.DatasetDict(
            train=datasets.Dataset.from_list([{"prompt": "a"}]), test=datasets.Dataset.from_list([{"prompt": "b"}])
        ),
        TypeError,
        r"DatasetDict with the splits 'train', 'test': pass one of them, such as prompts\['train'\]",
    ),
    (
        "dict of columns",
        lambda: {"prompt": ["a", "b"]},
        TypeError,
        r"prompts is a dict with the keys 'prompt': expected a list of rows",
    ),
    (
        "paths in a list",
        lambda: ["data/train.jsonl", "more.parquet"],
        ValueError,
        r"prompts is a list with the path of a file, 'data/train.jsonl': .* by name, as {'train': 'data/train.jsonl',",
    ),
    ("empty data set", lambda: [], ValueError, "prompts is empty: there is nothing to train on"),
    ("empty prompt", lambda: ["a", ""], ValueError, r"prompts\[1\] is empty: a completion needs at least one token"),
    (
        "prompt too long",
        lambda: ["a" * 300],
        ValueError,
        r"prompts\[0\] has 300 tokens: with max_new_tokens=4 it passes the model's 256 positions; "
        "drop or shorten the prompt, or lower max_new_tokens",
    ),
    (
        "no prompt column",
        lambda: [{"question": "a"}],
        ValueError,
        r"prompts\[0\] has no 'prompt' column; it has 'question'\. Set prompt_template .*'boxed'.*, or prompt_column",
    ),
    (
        "a number",
        lambda: [3],
        TypeError,
        r"prompts\[0\] is int: expected a string, chat messages .* or a list of token ids",
    ),
    (
        "role usr",
        lambda: chat({"role": "usr", "content": "x"}),
        ValueError,
        r"prompts\[0\], message 0 has the role 'usr': expected one of system, user, assistant",
    ),
    (
        "message without content",
        lambda: [{"prompt": "a"}, *chat(USER, {"role": "user", "text": "x"})],
        ValueError,
        r"prompts\[1\], message 1 has no 'content'; it has 'role', 'text'",
    ),
    (
        "content None",
        lambda: chat({"role": "user", "content": None}),
        ValueError,
        r"prompts\[0\], message 0 has no 'content'",
    ),
    (
        "message without role",
        lambda: chat({"content": "x"}),
        ValueError,
        r"prompts\[0\], message 0 has no 'role'; it has 'content'",
    ),
    ("a string among messages", lambda: chat(USER, "hello"), ValueError, r"prompts\[0\], message 1 is str: expected"),
    (
        "lone surrogate",
        lambda: ["fine", "a\ud800b"],
        ValueError,
        r"prompts\[1\] holds the lone surrogate '\\ud800' at character 1",
    ),
    (
        "lone surrogate in a message",
        lambda: chat({"role": "user", "content": "\udfff"}),
        ValueError,
        r"prompts\[0\] holds the lone surrogate",
    ),
    (
        "missing file",
        lambda: "trian.jsonl",
        FileNotFoundError,
        r"the prompts' file 'trian.jsonl' does not exist \(here is /.*\)",
    ),
    (
        "missing parquet file",
        lambda: "trian.parquet",
        FileNotFoundError,
        "the prompts' file 'trian.parquet' does not exist",
    ),
    (".xlsx", lambda: "data.xlsx", ValueError, "prompts='data.xlsx': prompts are read from .jsonl, .parquet and .csv"),
    ("a text", lambda: "What is 2+2?", ValueError, "prompts='What is 2.2.': .* pass a list for prompts of your own"),
    ("a hub id", lambda: "owner/name", ValueError, "prompts='owner/name': .* or datasets.load_dataset"),
    ("True", lambda: True, TypeError, "prompts is bool: expected a list of rows, a data set or a file's path"),
    (
        "one message",
        lambda: [{"prompt": USER}],
        TypeError,
        r"prompts\[0\] is dict: .* chat messages \(a list of dicts\)",
    ),
    (
        "an image",
        lambda: chat({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}),
        ValueError,
        r"prompts\[0\], message 0 has a part of the type 'image': leave it out; pictures need a vision-language model",
    ),
    (
        "ShareGPT's messages",
        lambda: chat({"from": "human", "value": "x"}),
        ValueError,
        r"prompts\[0\], message 0 has no 'role'; it has 'from', 'value': convert ShareGPT's .*'user' for 'human'",
    ),
    *(
        (
            f"a part: {next(iter(part.values()))}",
            lambda part=part: chat({"role": "user", "content": [{"type": "text", "text": "x"}, part]}),
            ValueError,
            rf"prompts\[0\], message 0 has a part .*{shown}.*: leave it out; pictures need a",
        )
        for part, shown in (
            ({"type": "image_url", "image_url": {"url": "x"}}, "of the type 'image_url'"),
            ({"type": "video", "video": "a.mp4"}, "of the type 'video'"),
            ({"type": "input_audio", "input_audio": {}}, "of the type 'input_audio'"),
            ({"image": "a.png"}, "with the key 'image'"),
            ({"type": "document"}, "of the type 'document'"),
        )
    ),
    (
        "pictures beside the content",
        lambda: chat({"role": "user", "content": "x", "images": ["a.png"]}),
        ValueError,
        r"prompts\[0\], message 0 has the key 'images': leave it out; pictures need a",
    ),
    (
        "messages as JSON text",
        lambda: [{"prompt": "a"}, {"prompt": '[{"role": "user", "content": "x"}]'}],
        ValueError,
        r"prompts\[1\] is the text '\[{\"role.*, chat messages that are not parsed: read the column by json.loads",
    ),
    (
        "messages as text of Python",
        lambda: ["[{'content': 'x', 'role': 'user'}]"],
        ValueError,
        r"prompts\[0\] is the text .*, chat messages that are not parsed",
    ),
    (
        "text and messages",
        lambda: [{"prompt": "a"}, *chat(USER)],
        ValueError,
        r"prompts\[1\] is chat messages and prompts\[0\] text: give all prompts in one form",
    ),
    ("text and token ids", lambda: ["a", [5, 6]], ValueError, r"prompts\[1\] is token ids and prompts\[0\] text"),
    (
        "reference replies",
        lambda: [{"prompt": [USER, {"role": "assistant", "content": text}]} for text in ("4", "5")],
        ValueError,
        r"prompts\[1\] ends with the assistant's message '5' and prompts\[0\] with '4': .*continue_final_message=True",
    ),
    (
        "a column without a name",
        lambda: [{"prompt": "a"}, {"prompt": "b", 0: "4"}],
        TypeError,
        r"prompts\[1\] has the column 0: the name of a column is text, '0'",
    ),
    ("a blank prompt", lambda: ["a", " \n"], ValueError, r"prompts\[1\] is blank: a completion needs"),
    (
        "a blank message",
        lambda: chat({"role": "system", "content": "x"}, {"role": "user", "content": ""}),
        ValueError,
        r"prompts\[0\] is empty: a completion needs",
    ),
    *(
        (
            f"a column {name}",
            lambda name=name: [{"prompt": "a"}, {"prompt": "b", name: [1]}],
            ValueError,
            rf"column is named '{name}', which .*: drop it, or rename .* columns={{'reference_{name}': '{name}'}}",
        )
        for name in ("completions", "prompts", "completion_ids")
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [row[1:] for row in PROMPT_ROWS], ids=[row[0] for row in PROMPT_ROWS]
)
def test_prompts(train, make, error, message):
    with pytest.raises(error, match=message):
        train(make())


PICTURE = Image.new("RGB", (2, 2))
MEDIA = [
    # column, value, what it is called
    ("image", PICTURE, "a PIL Image"),
    ("images", [PICTURE], "a PIL Image"),
    ("photo", PICTURE, "a PIL Image"),
    ("photo", {"bytes": b"x", "path": None}, "a dict of 'bytes', 'path'"),
    ("sound", {"path": "a.wav", "array": [0.0], "sampling_rate": 16000}, "a dict of 'path', 'array', 'sampling_rate'"),
    ("photo", b"\x89PNG\r\n", "6 bytes"),
    ("photo", "data:image/png;base64,iVBO", "the data URL 'data:image/png;base64,iVBO'"),
    ("image", "plots/a b.PNG", "the path 'plots/a b.PNG'"),
    ("images", ["https://example.org/x?id=3"], "the path 'https://example.org/x"),
    ("image", b"x", "1 bytes"),
    ("image", np.zeros((2, 2, 3), np.uint8), r"an array of shape \(2, 2, 3\)"),
    ("video", "a.mp4", "the path 'a.mp4'"),
    ("audio", ["a.wav"], "the path 'a.wav'"),
]


@pytest.mark.parametrize(("column", "value", "what"), MEDIA, ids=[f"{row[0]}: {row[2]}" for row in MEDIA])
def test_a_column_with_pictures(train, column, value, what):
    rows = [{"prompt": "a", column: None}, {"prompt": "b", column: value}]
    message = (
        rf"prompts\[\d\], column '{column}' holds {what}.*: pictures need a vision-language model with .*Drop "
        rf"the column; or, if only a reward .*, rename it: columns={{'reference_{column}': '{column}'}}"
    )
    for given in (rows, iter(rows)):
        with pytest.raises(ValueError, match=message):
            train(given)
    with pytest.raises(ValueError, match="eval_prompts: " + message):
        train(["a"], eval_prompts=rows)
    read = []

    def keeps(completions, **columns):
        read.append(columns[f"reference_{column}"])
        return [float(len(completion)) for completion in completions]

    train(rows, keeps, columns={f"reference_{column}": column})
    assert any(type(entry) is type(value) for entry in read[0])  # a copy


def test_a_data_set_with_pictures(train, tmp_path):
    dataset = datasets.Dataset.from_list([{"prompt": "a", "image": PICTURE}])
    encoded = dataset.cast_column("image", datasets.Image(decode=False))
    encoded.to_parquet(tmp_path / "rows.parquet")
    for prompts in (dataset, encoded, tmp_path / "rows.parquet", dataset.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"prompts\[0\], column 'image' holds a"):
            train(prompts)
    train(dataset.remove_columns("image"))


def test_a_column_called_image_that_holds_no_picture(train):
    train([{"prompt": "a", "image": "a red circle"}, {"prompt": "b", "image": None}, {"prompt": "c", "image": []}])


def test_begun_replies_are_continued(train):
    begun = [[USER, {"role": "assistant", "content": text}] for text in ("4", "5")]
    train([begun[0], begun[0]])  # a prefill
    train(begun, continue_final_message=True)
    with pytest.raises(ValueError, match=r"eval_prompts: prompts\[1\] ends with the assistant's message '5'"):
        train([begun[0]], eval_prompts=begun)


def test_rows_of_a_stream_are_compared_with_the_first(train):
    begun = [{"prompt": [USER, {"role": "assistant", "content": text}]} for text in ("4", "5")]
    late = [*["a"] * PEEKED, *chat(USER)]
    for rows, message in (
        (late, rf"row {PEEKED} of the stream: prompts\[{PEEKED}\] is chat messages and prompts\[0\] text"),
        (begun, r"row 1 of the stream: prompts\[1\] ends with the assistant's message '5' and prompts\[0\] with '4'"),
    ):
        with pytest.raises(ValueError, match=message):
            train(iter(rows), max_steps=9)


def test_a_template_that_no_row_needs(train):
    question = {"question": "2+2?"}
    train([question], prompt_template="lm_book")
    for rows in (["a"], [[1, 2]], [{"prompt": "a", **question}], iter([{"prompt": "a"}])):
        with pytest.raises(ValueError, match=r"prompts\[0\] has a prompt, and prompt_template='lm_book' is ignored"):
            train(rows, prompt_template="lm_book")
    with pytest.raises(ValueError, match=r"eval_prompts: prompts\[0\] has a prompt, and prompt_template='lm_book'"):
        train([question], prompt_template="lm_book", eval_prompts=["a"])
    train(["a"], preset="lm_book")  # the preset's template


@pytest.mark.parametrize("question", ["None", "' '"])
def test_a_template_without_a_question(train, question):
    with pytest.raises(ValueError, match=rf"prompts\[0\]: prompt_template 'lm_book' reads question: it is {question}"):
        train([{"question": ast.literal_eval(question)}], prompt_template="lm_book")


def test_a_template_whose_column_has_another_name(train):
    with pytest.raises(ValueError, match="has no 'question'; it has 'problem'. .* set columns={'question': <its name"):
        train([{"problem": "a"}], prompt_template="lm_book")


def test_a_key_in_a_column_is_renamed(train):
    seen = []

    def keep(completions, answer, reward_model):
        seen.append((answer, reward_model))
        return [0.0, 1.0]

    verl_row = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "4"}}
    train([verl_row], keep, columns={"answer": "reward_model.ground_truth"})
    assert seen == [(["4", "4"], [verl_row["reward_model"]] * 2)]
    train([{**verl_row, "reward_model.ground_truth": "5"}], keep, columns={"answer": "reward_model.ground_truth"})
    assert seen[1][0] == ["5", "5"]  # a column of this very name


def test_equal_prompts_warn(train, caplog):
    train(["a"] * 50)
    assert "all 50 prompts are equal" in caplog.text
    caplog.clear()
    train(["a", "b"])
    assert "equal" not in caplog.text


def test_a_second_bos_warns(byte_tokenizer, model, caplog):
    bos = copy.deepcopy(byte_tokenizer)
    bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos.bos_token_id)]
    )
    for rows in (["a", "<bos>b"], iter(["a", "<bos>b"])):
        caplog.clear()
        GRPO(copy.deepcopy(model), score_length, tokenizer=bos, **SETTINGS).train(rows)
        assert "prompts[1] begins with two BOS tokens, the text's and the tokenizer's (1 of 2 prompts)" in caplog.text
    caplog.clear()
    GRPO(copy.deepcopy(model), score_length, tokenizer=bos, **SETTINGS).train(["a", "b"])
    assert "BOS" not in caplog.text


def test_a_broken_json_line(train, tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not JSON"):
        train(path)


def test_an_array_in_a_json_file(train, tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a"}]')
    with pytest.raises(ValueError, match=r"a\.json, line 1: expected an object, got list; write one object a line"):
        train(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_column": "question"}, r"prompt_column='question': prompts\[0\] has no 'question' .* 'solution'$"),
        ({"columns": {"answer": "solution.gold"}}, "columns={'answer': 'solution.gold'}: .* it has 'prompt', 'sol"),
        ({"columns": {"answer": "solutoin"}}, "columns={'answer': 'solutoin'}: .* it has 'prompt', 'solution'$"),
        ({"columns": {"solution": "answer"}}, "; write the new name first: columns={'answer': 'solution'}"),
    ],
)
def test_columns_that_rows_lack(train, given, message):
    with pytest.raises(ValueError, match=message):
        train([{"prompt": "a", "solution": "4"}], **given)


def test_chat_without_a_template_and_text_without_a_tokenizer(byte_tokenizer):
    with pytest.raises(ValueError, match="is chat messages and the tokenizer has no chat_template: set tok"):
        load_prompts(chat(USER), byte_tokenizer)
    with pytest.raises(ValueError, match=r"prompts\[0\] is text and there is no tokenizer: pass tokenizer="):
        load_prompts(["a"])


def test_a_template_that_refuses_names_the_prompt(byte_tokenizer):
    strict = copy.deepcopy(byte_tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match=r"prompts\[0\]: the tokenizer's chat template refuses it: roles must alternate"
    ):
        load_prompts(chat(USER), strict)


def test_what_is_right_stays_right(tokenizer):
    """Roles of the template's own, tool calls without content, a frame's rows."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE + "{# documents #}"
    load_prompts(chat({"role": "documents", "content": "x"}, USER), own)
    own.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    load_prompts(chat(USER, {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "4"}), own)
    pandas = pytest.importorskip("pandas")
    assert [prompt.text for prompt in load_prompts(pandas.DataFrame({"prompt": ["a", "b"]}), tokenizer)] == ["a", "b"]


# --- rewards ---


def wants_target(completions, target):
    return [1.0] * len(completions)


def raises(completions):
    raise KeyError("oops")


def strips(completions):
    return [float(len(text.strip())) for text in completions]


def counts(completions):
    return [float(text.count("<think>")) for text in completions]


def contains(completions):
    return [float("4" in text) for text in completions]


def equals(completions):
    return [float(text == "4") for text in completions]


def takes_nothing():
    return [1.0]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def reads_messages(completions):
    return [float(len(completion[0]["content"])) for completion in completions]


def of_one_completion(completion):
    return float(len(completion))


REWARD_ROWS = [
    # label, reward function, prompts, error, message
    (
        "column of a rule missing",
        MathAnswer(),
        [{"prompt": "a", "solution": "4"}],
        ValueError,
        "column 'answer' is missing; columns given: .*solution. .*rename it: columns={'answer': <its name",
    ),
    (
        "column of a function missing",
        wants_target,
        [{"prompt": "a", "answer": "4"}],
        RewardError,
        "reward function wants_target requires target; given are answer, completion_ids, completions, prompts: rename",
    ),
    (
        "column missing in some rows",
        ExactAnswer(),
        [{"prompt": "a", "answer": "4"}, {"prompt": "b"}],
        ValueError,
        r"prompts\[1\] has no column 'answer' while others have: give it in every row or in none",
    ),
    (
        "unreadable gold",
        MathAnswer(),
        [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": "\\int_0^1 x dx"}],
        ValueError,
        r"answer\[1\] is '.*int_0\^1 x dx': a gold is a math answer that can be .*1 of 2 golds .*on_bad_gold='skip'",
    ),
    (
        "a text",
        lambda completions: ["1.0"] * len(completions),
        ["a"],
        RewardError,
        "returned '1.0' for sample 0, expected a number or None",
    ),
    ("None", lambda completions: None, ["a"], RewardError, "returned None, expected one score for each completion"),
    ("one number", lambda completions: 0.0, ["a"], RewardError, "returned 0.0, expected one score for each completion"),
    (
        "a function of one completion",
        of_one_completion,
        ["a"],
        RewardError,
        "of_one_completion returned 2.0, expected one score for each completion: it is called once with the list",
    ),
    (
        "wrong length",
        lambda completions: [1.0],
        ["a"],
        RewardError,
        "returned 1 scores for 2 completions, expected one for each",
    ),
    (
        "None for all",
        lambda completions: [None] * len(completions),
        ["a"],
        RewardError,
        "no score for any of 2 completions",
    ),
    (
        "NaN for all",
        lambda completions: [float("nan")] * len(completions),
        ["a"],
        RewardError,
        "no score for any of 2 completions; return a number",
    ),
    (
        "inf",
        lambda completions: [float("inf")] * len(completions),
        ["a"],
        RewardError,
        "returned inf for sample 0, expected a finite number",
    ),
    ("raises", raises, ["a"], RewardError, "reward function raises raised KeyError: 'oops'"),
    (
        "text reward on chat prompts",
        strips,
        chat(USER),
        RewardError,
        r"raised AttributeError: .*; .*each completion is a list of messages: the text is \[0\]\['content'\]",
    ),
    *(
        (
            f"{reward.__name__} text on chat prompts",
            reward,
            chat(USER),
            RewardError,
            rf"{reward.__name__} raised TypeError: .*the text '.*' among messages .*; .*the text is \[0\]\['content'\]",
        )
        for reward in (counts, contains, equals)
    ),
    (
        "a path without a model",
        ["./none"],
        ["a"],
        ValueError,
        r"reward model './none' cannot be loaded: there is no such",
    ),
    ("a rule's name", ["gsm8k"], ["a"], ConfigError, r"reward_fn\[0\] is 'gsm8k', .* pass .*rewards.GSM8KAnswer\(\)"),
    ("a number", [3], ["a"], TypeError, r"reward_fn\[0\] is int: expected a callable or a path"),
    ("a class", MathAnswer, ["a"], TypeError, r"reward_fn\[0\] is the class MathAnswer: pass an instance, MathAnswer"),
    (
        "no function",
        None,
        ["a"],
        TypeError,
        "reward_fn is None: .* leave it out where an environment or a teacher takes its pl",
    ),
    ("no arguments", takes_nothing, ["a"], RewardError, "takes_nothing takes no argument: give it completions"),
    (
        "two dimensions",
        lambda completions: torch.ones(len(completions), 1),
        ["a"],
        RewardError,
        r"returned Tensor of shape \(2, 1\), expected one score for each completion",
    ),
    (
        "a dict for each",
        lambda completions: [{"score": 1.0} for _ in completions],
        ["a"],
        RewardError,
        "returned {'score': 1.0} for sample 0, expected a number or None",
    ),
    (
        "verl's function",
        compute_score,
        [{"prompt": "a", "data_source": "gsm8k", "ground_truth": "4"}],
        RewardError,
        "compute_score requires solution_str; given are completion_ids, completions, data_source, ground_truth",
    ),
    (
        "TRL's function for messages on text prompts",
        reads_messages,
        ["a"],
        RewardError,
        r"reads_messages raised TypeError: string ind.*; the prompts are text, .* leave out \[0\]\['content'\]",
    ),
    (
        "verl's function of one solution",
        lambda completions, solution_str: [1.0],
        ["a"],
        RewardError,
        "requires solution_str; .* solution_str is verl's: write a function of all completions that calls this one",
    ),
    (
        "TRL's log_metric",
        lambda completions, log_metric: [1.0],
        ["a"],
        RewardError,
        r"requires log_metric; .*log_metric is TRL's: return \(scores, metrics\)",
    ),
    (
        "TRL's environments alone",
        lambda environments: [1.0] * len(environments),
        ["a"],
        RewardError,
        "requires environments; .*environments is TRL's: the method get_reward of the environment scores the episode",
    ),
    (
        "a column that **kwargs lacks",
        lambda completions, **kwargs: [float(kwargs["answers"][0] == "4") for _ in completions],
        [{"prompt": USER_PROMPT, "answer": "4"}],
        RewardError,
        "raised KeyError: 'answers' .*; given are answer, completion_ids, completions, prompts$",
    ),
    (
        "a column with None",
        lambda completions, answer: [
            float(gold in said[0]["content"]) for said, gold in zip(completions, answer, strict=False)
        ],
        [{"prompt": USER_PROMPT, "answer": None}],
        RewardError,
        "raised TypeError: .*NoneType.*; the column 'answer' is None for sample 0$",
    ),
    (
        "weights of 0",
        ExactAnswer(weight=0.0),
        [{"prompt": "a", "answer": "4"}],
        ConfigError,
        "the weight of every reward function is 0, which is only measured: every advantage is 0 and nothing is trained",
    ),
    ("a module", [torch.nn.Linear(1, 1)], ["a"], TypeError, r"reward_fn\[0\] is a model: pass its path"),
]


@pytest.mark.parametrize(
    ("reward", "prompts", "error", "message"), [row[1:] for row in REWARD_ROWS], ids=[row[0] for row in REWARD_ROWS]
)
def test_rewards(train, reward, prompts, error, message):
    with pytest.raises(error, match=message):
        train(prompts, reward)


def test_a_text_reward_on_chat_prompts_in_workers(train):
    def contains(completions):  # local, so that the worker imports nothing for it
        return [float("4" in text) for text in completions]

    with pytest.raises(RewardError, match=r"contains: TypeError: .*the text '4' among messages.*\[0\]\['content'\]"):
        train(chat(USER), contains, reward_timeout=30.0, reward_workers=1)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_nan_for_some_rows_warns_once_and_none_does_not(train, caplog, kind):
    def sometimes(completions):
        return kind([float("nan"), *[1.0] * (len(completions) - 1)])

    sometimes.__name__ = f"sometimes_{kind.__name__}"
    train(["a", "b"], sometimes, max_steps=2)
    told = [record.message for record in caplog.records if "returned NaN" in record.message]
    assert len(told) == 1
    assert f"reward function {sometimes.__name__} returned NaN for 1 of 4 samples, the first is sample 0" in told[0]
    caplog.clear()
    train(["a", "b"], lambda completions: [None, *[1.0] * (len(completions) - 1)])
    assert "NaN" not in caplog.text


def test_held_out_prompts_are_named_as_such(train):
    rows = [{"prompt": "a", "answer": "4"}]
    with pytest.raises(ValueError, match="eval_prompts: .*'answer' is missing"):
        train(rows, MathAnswer(), eval_prompts=["b"])
    with pytest.raises(RewardError, match="eval_prompts: reward function wants_target requires target"):
        train([{"prompt": "a", "target": 1}], wants_target, eval_prompts=["b"])
    with pytest.raises(ValueError, match=r"eval_prompts: prompts\[1\] is empty"):
        train(["a"], eval_prompts=["b", ""])


@pytest.mark.parametrize(("rows", "told"), [(3, 1), (4, 0), (9, 0)])
def test_fewer_rows_than_prompts_in_a_step_warn_once(caplog, rows, told):
    trainer = GRPO(ToyLM(), share_of_target, **options(prompts_per_step=4, max_steps=2))
    trainer.train(PROMPTS[:1].expand(rows, -1))
    warned = [record.message for record in caplog.records if "prompts_per_step" in record.message]
    assert warned == ["prompts_per_step=4 is above the number of rows, 3: each step takes 3 prompts"] * told


# --- options that other inputs contradict, and the run's folder ---


class Callback:
    def on_step(self, step, metrics): ...


async def wait_for_loss(inputs):
    return inputs.log_probs


class MeasuresNothing:
    def measure(self):
        return 1.0

    def __call__(self, inputs):
        return -inputs.ratio * inputs.advantages


class ShortEngine:
    exact, takes_weights, policy_version, max_length = True, False, 0, None

    def generate(self, prompts, group_size):
        return []

    def load_weights(self, weights, version):
        self.policy_version = version

    def close(self):
        pass


OPTION_ROWS = [
    # label, options, error, message
    ("learning_rte", {"learning_rte": 1.0}, ConfigError, "did you mean 'learning_rate'"),
    ("loss_aggregation", {"loss_aggregation": "token"}, ConfigError, "'sequence_mean'.* got 'token'"),
    (
        "kl_coef without reference",
        {"kl_coef": 0.1, "reference": "none"},
        ConfigError,
        "reference='none' with kl_coef=0.1: the KL penalty has nothing to be measured against; set kl_coef=0 or",
    ),
    (
        "group_size=1",
        {"group_size": 1},
        ConfigError,
        "group_size=1 with baseline='mean': every advantage is 0 .*at least 2",
    ),
    ("output_dir=~", {"output_dir": "~/runs"}, ConfigError, "output_dir='~/runs' .*write the whole path in place of ~"),
    ("output_dir=$", {"output_dir": "$OUT/runs"}, ConfigError, r"output_dir='\$OUT/runs' .* folder named \$OUT here"),
    ("output_dir empty", {"output_dir": ""}, ConfigError, "output_dir='' would be the current folder: write the path"),
    ("max_steps=0", {"max_steps": 0}, ConfigError, "max_steps: input should be greater than or equal to 1"),
    ("top_k=1", {"top_k": 1}, ConfigError, "top_k=1 samples only the most likely token, so .* nothing is trained"),
    ("temperature=0", {"temperature": 0}, ConfigError, "temperature: input should be greater than 0"),
    (
        "reward_weights",
        {"reward_weights": (1.0, 2.0)},
        ConfigError,
        "reward_weights has 2 values for 1 reward functions",
    ),
    (
        "a dict for config",
        {"config": {"group_size": 4}},
        ConfigError,
        "config is dict: expected a rlox_grpo.GRPOConfig; give the options as keywords",
    ),
    ("a number as text", {"learning_rate": "1e-5"}, ConfigError, "learning_rate: .* a valid number, got '1e-5'"),
    (
        "loss_aggregation dapo",
        {"loss_aggregation": "dapo"},
        ConfigError,
        "got 'dapo'; GRPO's is .* DAPO's 'token_mean'",
    ),
    ("data in the constructor", {"train_dataset": []}, ConfigError, "'train_dataset' .TRL's.: pass it to train.. as"),
    ("epochs in the constructor", {"n_epochs": 2}, ConfigError, "unknown option 'n_epochs': pass it to train()"),
    ("device", {"device": "cuda"}, ConfigError, "unknown option 'device': there is none: a model goes to"),
    (
        "a class as callback",
        {"callbacks": [Callback]},
        TypeError,
        r"callbacks\[0\] is the class Callback: pass an inst",
    ),
    (
        "transformers' callback",
        {"callbacks": [TrainerCallback()]},
        TypeError,
        r"callbacks\[0\] is TrainerCallback, a callback of transformers: .* write on_step\(step, metrics\)",
    ),
    (
        "options by position",
        {"ref_model": {"group_size": 4}},
        TypeError,
        "ref_model is dict: expected a path, a hub id or a torch.nn.Module",
    ),
    (
        "a policy loss of three arguments",
        {"policy_loss": lambda log_probs, old_log_probs, advantages: advantages},
        ConfigError,
        "policy_loss <lambda>: it is called with inputs: missing a required argument: 'old_log_probs'; .*LossInputs",
    ),
    (
        "an async policy loss",
        {"policy_loss": wait_for_loss},
        ConfigError,
        "policy_loss wait_for_loss: it is called with inputs and not awaited: write def instead of async def",
    ),
    (
        "measure without its argument",
        {"policy_loss": MeasuresNothing()},
        ConfigError,
        "policy_loss MeasuresNothing, measure: it is called with step: too many positional arguments",
    ),
    (
        "advantages with the arguments of verl",
        {"advantage_fn": lambda token_level_rewards, response_mask, index: response_mask},
        ConfigError,
        "advantage_fn <lambda>: it is called with groups: missing a required argument: 'response_mask'",
    ),
    (
        "an engine whose generate has two arguments",
        {"engine": ShortEngine()},
        ConfigError,
        "engine ShortEngine, generate: it is called with prompts, group_size, sampling, seed, first_prompt=: too many",
    ),
    ("one tool without a list", {"tools": score_length}, TypeError, "tools is function: expected a list of functions"),
    ("TRL's teacher_model", {"teacher_model": "x"}, ConfigError, "'teacher_model': pass it to GRPO as teacher"),
    ("a server as ref_model", {"ref_model": "http://host:1"}, ConfigError, "set reference='server' and reference_url"),
    ("no such reference", {"ref_model": "./no/such"}, ValueError, "ref_model='./no/such': no such folder"),
    ("a tokenizer's path", {"tokenizer": "owner/name"}, TypeError, "tokenizer='owner/name' is a path: pass .*AutoTok"),
]


@pytest.mark.parametrize(
    ("given", "error", "message"), [row[1:] for row in OPTION_ROWS], ids=[row[0] for row in OPTION_ROWS]
)
def test_options(given, error, message):
    with pytest.raises(error, match=message):
        GRPO(ToyLM(), share_of_target, **given)


def test_tools_whose_results_are_never_read_are_warned_of(caplog):
    with pytest.raises(ConfigError, match="need a tokenizer with a chat_template"):
        GRPO(ToyLM(), share_of_target, tools=[score_length], max_turns=1)
    assert "max_turns=1 with tools=: the episode ends before the policy reads the result of a tool" in caplog.text


def test_an_output_dir_that_is_a_file_or_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, message in (("file", "is a file: choose the path of a folder"), ("file/run", "cannot be made")):
        trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path / place))
        with pytest.raises(CheckpointError, match=f"output_dir='.*{place}' {message}"):
            trainer.train(PROMPTS)
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "sealed").mkdir(mode=0o500)
        trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path / "sealed"))
        with pytest.raises(CheckpointError, match="output_dir='.*sealed' cannot be written"):
            trainer.train(PROMPTS)


def test_a_learning_rate_that_overflows_names_the_sample():
    with pytest.raises(FloatingPointError, match=r"prompts\[\d\]"):
        GRPO(ToyLM(), share_of_target, **options(learning_rate=3e38, max_grad_norm=0.0)).train(PROMPTS)


def test_a_resumed_run_with_other_options_data_or_rewards_names_each(tmp_path):
    settings = options(output_dir=tmp_path, max_steps=1, group_size=4)
    GRPO(ToyLM(), share_of_target, **settings).train(PROMPTS)
    resumed = {**settings, "max_steps": 2}
    with pytest.raises(
        CheckpointError, match=r"group_size: 4 there, 8 here\): restore these .*add resume_changes=\['group_size'\]"
    ):
        GRPO(ToyLM(), share_of_target, **{**resumed, "group_size": 8}).train(PROMPTS)
    with pytest.raises(CheckpointError, match="prompts: not those of the run.*choose another output_dir"):
        GRPO(ToyLM(), share_of_target, **resumed).train((PROMPTS + 1) % 12)

    def share_of_target_edited(completions, prompts):
        return [1.0] * len(completions)

    share_of_target_edited.__name__ = share_of_target.__name__
    with pytest.raises(CheckpointError, match=r"share_of_target was edited.*resume_changes=\['rewards'\]"):
        GRPO(ToyLM(), share_of_target_edited, **resumed).train(PROMPTS)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, float("nan"), "2", None])
def test_epochs_are_an_integer(epochs):
    with pytest.raises(ValueError, match=r"n_epochs is .*: expected an integer of at least 1"):
        GRPO(ToyLM(), share_of_target, **options(max_steps=None)).train(PROMPTS, epochs)


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "2"])
def test_samples_of_an_evaluation_are_an_integer(samples):
    with pytest.raises(ValueError, match=r"samples is .*: expected an integer of at least 1"):
        GRPO(ToyLM(), share_of_target, **options()).evaluate(PROMPTS, samples=samples)


def test_several_samples_of_greedy_decoding_are_refused():
    trainer = GRPO(ToyLM(), share_of_target, **options())
    with pytest.raises(ConfigError, match="greedy=True with samples=4: .*the same completion each time; leave samples"):
        trainer.evaluate(PROMPTS, samples=4, greedy=True)
    assert trainer.evaluate(PROMPTS, samples=1, greedy=True) == trainer.evaluate(PROMPTS, greedy=True)


def test_a_run_that_was_not_continued_is_not_saved_in_silence(tmp_path, caplog):
    def make():
        return GRPO(ToyLM(), share_of_target, **options(output_dir=tmp_path / "run"))

    make().save(tmp_path / "before")
    trainer = make()
    trainer.train(PROMPTS)
    trainer.save(tmp_path / "trained")
    trainer.evaluate(PROMPTS)
    assert "GRPO was created with" not in caplog.text
    make().save(tmp_path / "again")
    assert f"not those of the run in {tmp_path / 'run'}: call train first" in caplog.text
    make().evaluate(PROMPTS)
    assert "evaluate measures the weights that GRPO was created with" in caplog.text


def test_a_model_is_saved_to_a_folder_and_not_to_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    trainer = GRPO(ToyLM(), share_of_target, **options())
    with pytest.raises(ValueError, match="file' is a file: choose the path of a folder"):
        trainer.save(tmp_path / "file")
    with pytest.raises(ValueError, match="'~/out' would be a folder named ~ here: write the whole path"):
        trainer.save("~/out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("token", "message"),
    [(99, "token id 99 at position 1, and the model has the ids 0 to 11"), (-5, "token id -5 at position 1")],
)
@pytest.mark.parametrize(
    "form", [list, torch.tensor, lambda rows: [{"prompt": row} for row in rows]], ids=["lists", "tensor", "rows"]
)
def test_token_ids_outside_the_vocabulary_are_named(token, message, form):
    trainer = GRPO(ToyLM(), share_of_target, **options())
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=rf"prompts\[1\] has the {message}"):
            use(form([[1, 2], [3, token]]))
    assert trainer.step == 0


def test_lora_on_a_plain_module_is_refused():
    with pytest.raises(ConfigError, match="lora_rank=4 needs a transformers model, got a ToyLM"):
        GRPO(ToyLM(), share_of_target, **options(lora_rank=4))


def test_a_learning_rate_and_prompts_that_cannot_be_meant_are_warned_of(caplog):
    trainer = GRPO(ToyLM(), share_of_target, **options(learning_rate=1.0, max_steps=1))
    assert "learning_rate=1: AdamW moves every weight by about as much in each step" in caplog.text
    trainer.train([[1, 2, 3]] * 50)
    assert "all 50 prompts are equal" in caplog.text
    caplog.clear()
    GRPO(ToyLM(), share_of_target, **options(max_steps=1)).train(PROMPTS)
    assert not caplog.records


def test_held_out_prompts_that_are_trained_on_are_warned_of(train, caplog):
    warned = "1 of 2 prompts are trained on too, the first is prompts[1], which is prompts[2] of the training"
    train(["a", "b", "c"], eval_prompts=["d", "c"])
    assert f"eval_prompts: {warned}" in caplog.text
    train(["a", "b", "c"], eval_prompts={"math": ["d", "c"], "other": ["e", "f"]})
    assert f"eval_prompts['math']: {warned}" in caplog.text
    assert "'other'" not in caplog.text
    # Rows of an environment have no tokens: their columns are compared.
    rows = [{"secret": value} for value in (1, 2, 3, 4, {5}, {6})]
    train_rows, others = [load_rows(chosen) for chosen in (rows[:3] + rows[4:5], rows[3:])]
    caplog.clear()
    warn_about_trained_prompts({"eval_prompts": others}, train_rows)
    assert not caplog.text
    warn_about_trained_prompts({"eval_prompts": load_rows(rows[2:4])}, train_rows)
    assert (
        "eval_prompts: 1 of 2 prompts are trained on too, the first is prompts[0], which is prompts[2]" in caplog.text
    )
    caplog.clear()
    problems = [{"nums": [1, 2], "target": 3}, {"nums": [2, 2], "target": 4}, {"nums": [1, 2], "facts": {"x": [3]}}]
    warn_about_trained_prompts({"eval_prompts": load_rows(problems[:1])}, load_rows(problems[1:]))
    assert not caplog.text
    for problem in problems:
        warn_about_trained_prompts({"eval_prompts": load_rows([problem])}, load_rows(problems))
    assert caplog.text.count("1 of 1 prompts are trained on too") == 3


def test_held_out_prompts_with_another_system_prompt_are_trained_on_too(caplog):
    def load(system, contents):
        rows = [
            [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": content}]
            for content in contents
        ]
        tokens = [np.frombuffer(str(row).encode(), np.uint8).astype(np.int64) for row in rows]
        return [Prompt(ids, index, str(row), row) for index, (ids, row) in enumerate(zip(tokens, rows, strict=True))]

    warned = "eval_prompts: 1 of 2 prompts are trained on too, the first is prompts[1], which is prompts[0]"
    for before, after in ((None, "Be brief."), ("Think.", None), ("Think.", "Be brief.")):
        caplog.clear()
        warn_about_trained_prompts({"eval_prompts": load(after, ["a", "b"])}, load(before, ["b", "c"]))
        assert warned in caplog.text
    # System messages that differ from row to row are part of the question.
    caplog.clear()
    asked = [load(system, ["Go."])[0] for system in ("Count to 3.", "Count to 20.")]
    warn_about_trained_prompts({"eval_prompts": load("Count to 400.", ["Go.", "Stop."])}, asked)
    assert not caplog.text


def test_a_warm_up_that_is_longer_than_the_run_is_warned_of(train, caplog):
    train(["a", "b"], max_steps=2, warmup_steps=1)
    assert "warmup_steps" not in caplog.text
    train(["a", "b"], max_steps=2, warmup_steps=2)
    assert (
        "warmup_steps=2 and the run has 2 steps (of one batch of prompts each): the learning rate rises" in caplog.text
    )


def test_none_in_a_column_that_a_reward_requires_is_warned_of_once(train, caplog):
    def reads_gold(completions, answer, hint=None):
        return [float(index) for index in range(len(completions))]

    rows = [{"prompt": "a", "answer": "1", "hint": None}, {"prompt": "b", "answer": None, "hint": "x"}]
    train(rows, reads_gold)
    train(rows, reads_gold)
    warned = (
        "reward function reads_gold reads the column 'answer', which is None in 1 of 2 rows, the first is prompts[1]"
    )
    assert caplog.text.count(warned) == 1
    assert "'hint'" not in caplog.text


def test_an_argument_of_a_reward_that_is_nearly_a_column_is_warned_of(train, caplog):
    def reads_answers(completions, answers=None, scale=1.0):
        return [float(index) for index in range(len(completions))]

    train([{"prompt": "a", "answer": "1"}], reads_answers)
    train([{"prompt": "a", "answer": "1"}], reads_answers)
    warned = "reward function reads_answers: there is no column 'answers', so the argument keeps its default None"
    assert caplog.text.count(f"{warned}; did you mean the column 'answer'?") == 1
    assert "scale" not in caplog.text


@pytest.mark.parametrize(
    ("reward", "missing"),
    [
        (lambda prompt, completion: [1.0] * len(completion), "prompt, completion"),
        (lambda questions: [1.0] * len(questions), "questions"),
        (lambda response, ground_truth: [1.0] * len(response), "response, ground_truth"),
        (lambda answers, completions: [1.0] * len(completions), "answers"),
    ],
)
def test_parameters_whose_names_say_otherwise_do_not_get_completions_and_prompts(train, reward, missing):
    with pytest.raises(
        RewardError, match=f"requires {missing}; given are answer, completion_ids, completions, prompts"
    ):
        train([{"prompt": "a", "answer": "1"}], reward)


def test_parameters_of_neutral_names_get_completions_and_prompts(train):
    seen = []

    def score(texts, questions):
        seen.append(questions)
        return [float(index) for index in range(len(texts))]

    train([{"prompt": "a", "answer": "1"}], score)
    assert seen == [["a", "a"]]


def test_a_score_beyond_float32_names_the_function(train):
    with pytest.raises(RewardError, match="reward function <lambda> returned 1e[+]39 for sample 1, expected a finite"):
        train(["a"], lambda completions: [1.0, 1e39])


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("my_rewards:score", ConfigError, r"reward_fn\[0\] is 'my_rewards:score', the name of a function in run files"),
        ({"length": score_length}, TypeError, "reward_fn is a dict: expected a reward function or a list of them"),
    ],
)
def test_rewards_that_are_no_functions(train, reward, error, message):
    with pytest.raises(error, match=message):
        train(["a"], reward)


def test_an_error_in_the_constructor_of_a_dataclass_names_the_users_line(train):
    with pytest.raises(RewardError, match=r"StepScores.ends is \[3, 1\]: .* \(test_wrong_inputs.py, line \d+\)"):
        train(["a"], lambda completions: [StepScores([3, 1], [1.0, 2.0]) for _ in completions])

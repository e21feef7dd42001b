"""Wrong inputs that a user may give: each is an error or a warning that can be mended from its words alone.

Option types and unknown options are in test_config.py, run files in test_cli.py, metric sinks in test_sinks.py, the
run's folder in test_run_lock.py, and what a resumed run may change in test_resume.py.
"""

import copy
import importlib.metadata
import os
import sys

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5ForConditionalGeneration,
)

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.load import load_prompts
from rlox_grpo.rewards import ExactAnswer, MathAnswer, RewardError
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
    ("empty data set", lambda: [], ValueError, "prompts is empty: there is nothing to train on"),
    ("empty prompt", lambda: ["a", ""], ValueError, r"prompts\[1\] is empty: a completion needs at least one token"),
    (
        "prompt too long",
        lambda: ["a" * 300],
        ValueError,
        r"prompts\[0\] has 300 tokens: with max_new_tokens=4 it passes the model's 256 positions",
    ),
    (
        "no prompt column",
        lambda: [{"question": "a"}],
        ValueError,
        r"prompts\[0\] has no 'prompt' column; it has 'question'",
    ),
    (
        "a number",
        lambda: [3],
        TypeError,
        r"prompts\[0\] is int: expected a string, chat messages or a list of token ids",
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
    ("missing file", lambda: "trian.jsonl", FileNotFoundError, "trian.jsonl"),
    (".xlsx", lambda: "data.xlsx", ValueError, "prompts are read from .jsonl, .parquet and .csv files"),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [row[1:] for row in PROMPT_ROWS], ids=[row[0] for row in PROMPT_ROWS]
)
def test_prompts(train, make, error, message):
    with pytest.raises(error, match=message):
        train(make())


def test_a_broken_json_line(train, tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not JSON"):
        train(path)


def test_chat_without_a_template_and_text_without_a_tokenizer(byte_tokenizer):
    with pytest.raises(ValueError, match=r"prompts\[0\] is chat messages and the tokenizer has no chat_template"):
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


REWARD_ROWS = [
    # label, reward function, prompts, error, message
    (
        "column of a rule missing",
        MathAnswer(),
        [{"prompt": "a", "solution": "4"}],
        ValueError,
        "column 'answer' is missing; columns given: .*solution",
    ),
    (
        "column of a function missing",
        wants_target,
        [{"prompt": "a", "answer": "4"}],
        RewardError,
        "reward function wants_target requires target; given are answer",
    ),
    (
        "column missing in some rows",
        ExactAnswer(),
        [{"prompt": "a", "answer": "4"}, {"prompt": "b"}],
        ValueError,
        "prompt 1 has no column 'answer' while others have",
    ),
    ("unreadable gold", MathAnswer(), [{"prompt": "a", "answer": "\\int_0^1 x dx"}], ValueError, r"answer\[0\] is"),
    (
        "a text",
        lambda completions: ["1.0"] * len(completions),
        ["a"],
        RewardError,
        "returned '1.0' for sample 0, expected a number or None",
    ),
    ("None", lambda completions: None, ["a"], RewardError, "returned None, expected one score for each completion"),
    ("one number", lambda completions: 0.0, ["a"], RewardError, "returned 0.0, expected one score for each completion"),
    ("wrong length", lambda completions: [1.0], ["a"], RewardError, "returned 1 scores for 2 completions"),
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
        "no score for any of 2 completions: NaN for 2 of them",
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
        r"each completion is a list of one message: its text is \[0\]\['content'\]",
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
    ("a module", [torch.nn.Linear(1, 1)], ["a"], TypeError, r"reward_fn\[0\] is a model: pass its path"),
]


@pytest.mark.parametrize(
    ("reward", "prompts", "error", "message"), [row[1:] for row in REWARD_ROWS], ids=[row[0] for row in REWARD_ROWS]
)
def test_rewards(train, reward, prompts, error, message):
    with pytest.raises(error, match=message):
        train(prompts, reward)


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


# --- models ---

BERT = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def decoder(cls=Qwen2Model):
    return cls(
        Qwen2Config(
            vocab_size=40,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=8,
        )
    )


def wide_head():
    from transformers import Qwen2ForCausalLM

    model = decoder(Qwen2ForCausalLM)
    model.lm_head = nn.Linear(8, 50, bias=False)
    return model


MODEL_ROWS = [
    # label, model, error, message
    (
        "encoder",
        lambda: BertModel(BertConfig(**BERT)),
        ValueError,
        "model is a BertModel, an encoder: .*choose a causal model",
    ),
    (
        "masked language model",
        lambda: BertForMaskedLM(BertConfig(**BERT)),
        ValueError,
        "model is a BertForMaskedLM, an encoder",
    ),
    (
        "encoder and decoder",
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=40, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
        ),
        ValueError,
        "T5ForConditionalGeneration, an encoder with a decoder",
    ),
    ("no head", decoder, ValueError, "model is a Qwen2Model, which has no language-model head"),
    (
        "more logits than embeddings",
        wide_head,
        ValueError,
        "output layer has 50 ids and its embedding 40 rows: .*resize_token_embeddings",
    ),
    ("missing folder", lambda: "./chatt", ValueError, r"model='\./chatt': no such folder"),
    ("missing absolute folder", lambda: "/no/such", ValueError, "model='/no/such': no such folder"),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [row[1:] for row in MODEL_ROWS], ids=[row[0] for row in MODEL_ROWS]
)
def test_models(make, error, message):
    with pytest.raises(error, match=message):
        GRPO(make(), score_length, log_to=())


def test_a_hub_id_without_network(monkeypatch):
    from transformers import AutoModelForCausalLM

    def fail(source, **_):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(
        ValueError,
        match="model='owner/name' cannot be loaded: We couldn't connect .* to load the files. Check your connection; "
        "nor is there a folder of this name: without network, pass a folder",
    ):
        GRPO("owner/name", score_length, log_to=())


@pytest.mark.parametrize(
    ("given", "absent", "message"),
    [
        ({"lora_rank": 2}, "peft", "lora_rank needs peft: pip install peft"),
        ({"updater": "deepspeed"}, "deepspeed", "updater='deepspeed' needs DeepSpeed: pip install deepspeed"),
        ({"engine": "vllm"}, "vllm", "engine='vllm' needs vLLM .*: pip install"),
    ],
)
def test_a_missing_extra_is_named(train, monkeypatch, given, absent, message):
    find = importlib.metadata.version

    def version(name):
        if name.startswith(absent):
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ImportError, match=message):
        train(["a"], **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_object_of_16_bits_trains_in_float32(model, tokenizer, dtype, caplog):
    """At 1e-6 an update of a bfloat16 weight is mostly rounded away: measured 2,242 of 99,904 weights moved."""
    trainer = GRPO(
        copy.deepcopy(model).to(dtype), lambda c: [float(i) for i in range(len(c))], tokenizer=tokenizer, **SETTINGS
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert "converted to float32, as 16 bits drop small updates" in caplog.text
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train(["a", "b"])
    moved = sum(int((before[name] != now).sum()) for name, now in trainer.model.named_parameters())
    assert moved > 0.5 * sum(parameter.numel() for parameter in trainer.model.parameters())


def test_frozen_16_bit_weights_under_an_adapter_stay(model, tokenizer):
    trainer = GRPO(copy.deepcopy(model).bfloat16(), score_length, tokenizer=tokenizer, lora_rank=2, **SETTINGS)
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in trainer.model.parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}


def test_no_end_token_is_warned_of(make_tiny_model, tokenizer, caplog):
    plain, without = make_tiny_model("qwen2", vocab_size=len(tokenizer)), copy.deepcopy(tokenizer)
    without.eos_token = None
    GRPO(copy.deepcopy(plain), score_length, tokenizer=without, **SETTINGS)
    assert "every completion runs to max_new_tokens=4; set one of them, or pass stop=" in caplog.text
    caplog.clear()
    GRPO(copy.deepcopy(plain), score_length, tokenizer=without, stop=("\n",), **SETTINGS)
    GRPO(copy.deepcopy(plain), score_length, tokenizer=tokenizer, **SETTINGS)
    GRPO(ToyLM(), share_of_target, **options())  # tokens in, tokens out
    assert "no end token" not in caplog.text


def test_a_folder_without_a_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer beside it: pass tokenizer="):
        GRPO(tmp_path, score_length, log_to=())


# --- options that other inputs contradict, and the run's folder ---

OPTION_ROWS = [
    # label, options, error, message
    ("learning_rte", {"learning_rte": 1.0}, ConfigError, "did you mean 'learning_rate'"),
    ("loss_aggregation", {"loss_aggregation": "token"}, ConfigError, "'sequence_mean'.* got 'token'"),
    (
        "kl_coef without reference",
        {"kl_coef": 0.1, "reference": "none"},
        ConfigError,
        "reference='none' with kl_coef=0.1: the KL penalty has nothing to be measured",
    ),
    (
        "group_size=1",
        {"group_size": 1},
        ConfigError,
        "group_size=1 with baseline='mean': every advantage is 0 .*at least 2",
    ),
    ("max_steps=0", {"max_steps": 0}, ConfigError, "max_steps: input should be greater than or equal to 1"),
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
        "config is dict: expected a GRPOConfig; give the options as keywords",
    ),
]


@pytest.mark.parametrize(
    ("given", "error", "message"), [row[1:] for row in OPTION_ROWS], ids=[row[0] for row in OPTION_ROWS]
)
def test_options(given, error, message):
    with pytest.raises(error, match=message):
        GRPO(ToyLM(), share_of_target, **given)


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

"""Completions end where the user means it: stop strings that can be found, and the end of the assistant's turn."""

from __future__ import annotations

import copy

import pytest

from rlox_grpo import GRPO, EvalSet
from rlox_grpo.errors import ConfigError

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
WARNING = "the chat template ends the assistant's turn with '<|im_end|>', which is no end token here"
OPTIONS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}


def score_length(completions):
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def tokenizer(byte_tokenizer):
    """The tokenizer of a base model, whose end token is not that of its template."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def make(tokenizer, make_tiny_model):
    def make_trainer(**options):
        model = make_tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1)
        return GRPO(model, score_length, tokenizer=tokenizer, **{**OPTIONS, **options})

    return make_trainer


def test_a_turn_that_no_end_token_ends_is_warned_of(make, tokenizer, caplog):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    make().train(CHAT)
    assert caplog.text.count(WARNING) == 1
    assert f"generation_kwargs={{'stop_token_ids': [{end}]}}" in caplog.text


def test_a_turn_that_ends_a_completion_is_not_warned_of(make, tokenizer, caplog):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    make(generation_kwargs={"stop_token_ids": [end]}).train(CHAT)
    make().train(["plain", "text"])
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", "<|im_end|><eos>")
    make().train(CHAT)
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", "")  # nothing says where a turn ends
    make().train(CHAT)
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    make().train(CHAT)
    assert WARNING not in caplog.text


@pytest.mark.parametrize("stop", ["<|im_end|>", "</answer><|im_end|>"])
def test_a_stop_string_that_no_text_has_is_refused(make, tokenizer, stop):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    message = rf"stop has '{stop}', and '<|im_end|>' is a special token, .*: \[{end}\]".replace("|", r"\|")
    with pytest.raises(ConfigError, match=message):
        make(stop=("</answer>", stop))
    with pytest.raises(ConfigError, match=message):
        make().evaluate(EvalSet(CHAT, stop=(stop,)))
    make(stop=(stop,), generation_kwargs={"stop_token_ids": [end]})  # it ends a completion anyway


def test_an_added_token_that_texts_show_is_a_stop_string(make, tokenizer, caplog):
    tokenizer.add_tokens(["</think>"])
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", "</think>")
    make(stop=("</think>",)).train(CHAT)
    assert "which is no end token here" not in caplog.text
    make().train(CHAT)
    assert "ends the assistant's turn with '</think>', which is no end token here" in caplog.text

"""The presets in words and in prompts."""

import copy
from math import isfinite
from pathlib import Path

import pytest
import torch

import worded
from rlox_grpo import GRPO
from rlox_grpo.cli import main
from rlox_grpo.config.presets import PresetFolder
from rlox_grpo.config.presets.page import describe_preset, presets_page
from rlox_grpo.config.presets.preset import Choice, Defect, read_preset
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.presets import PRESETS
from rlox_grpo.prompts.load import load_prompts
from rlox_grpo.prompts.templates import COUNTDOWN_PREFILL, TEMPLATES, apply_template
from toy import PROMPTS, ToyLM, share_of_target

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"
ROWS = {"nums": [3, 4, 7], "target": 25, "question": "How many legs have 2 cats?"}


def test_the_page_is_up_to_date():
    page = (DOCS / "presets.md").read_text(encoding="utf-8")
    assert page == presets_page(), "run: rlox-grpo presets --markdown > docs/reference/presets.md"


def test_the_command_line_prints_every_choice_with_its_source(capsys):
    for name, preset in PRESETS.items():
        assert main(["presets", name]) == 0
        shown = capsys.readouterr().out
        assert shown == describe_preset(name) + "\n"
        for field, choice in preset.choices.items():
            (line,) = [line for line in shown.splitlines() if line.startswith(f"  {field} = ")]
            assert repr(choice.value) in line
            assert line.endswith(choice.source)
        for defect in preset.defects:
            assert defect.what in shown


def test_the_command_line_prints_the_page(capsys):
    assert main(["presets", "--markdown"]) == 0
    assert capsys.readouterr().out == presets_page()


PRESET = """
source = "a paper"
summary = "A summary."

[options."eq. 1"]
clip_low = 0.1
covariance_bounds = [1.0, 2.0]
delta = "none"
reward_scaling = "none"

[published."its code"]
clip_low = 0.3

[[defects]]
what = "Its code clips at 0.3."
reproduced = true
"""


def test_a_file_is_a_preset(tmp_path):
    (tmp_path / "mine.toml").write_text(PRESET, encoding="utf-8")
    (tmp_path / "first.toml").write_text("", encoding="utf-8")
    presets = PresetFolder(tmp_path, ("mine", "gone"))
    assert list(presets) == ["mine", "first"]
    preset = presets["mine"]
    assert preset is presets["mine"]
    assert (preset.source, preset.summary, preset.reward) == ("a paper", "A summary.", "your own")
    stated = {name: choice.value for name, choice in preset.choices.items() if choice.source == "eq. 1"}
    assert stated == {"clip_low": 0.1, "covariance_bounds": (1.0, 2.0), "delta": None, "reward_scaling": "none"}
    assert preset.choices["group_size"] == Choice(8, "not stated in the source; default of this library")
    assert preset.published == {"clip_low": Choice(0.3, "its code")}
    assert preset.defects == (Defect(what="Its code clips at 0.3.", reproduced=True),)
    with pytest.raises(ConfigError, match=r"first\.toml: source: field required\nsummary: field required"):
        presets["first"]
    with pytest.raises(KeyError):
        presets["gone"]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("source", "sorce", "unknown option 'sorce': did you mean 'source'?"),
        ("clip_low = 0.1", "clip_lo = 0.1", "unknown option 'clip_lo': did you mean 'clip_low'?"),
        (
            "clip_low = 0.1",
            "epsilon = 0.1",
            "unknown option 'epsilon' (TRL's): set clip_low and clip_high: it is both bounds if epsilon_high is not "
            "set",
        ),
        ("clip_low = 0.1", "clip_low = true", "clip_low: input should be a valid number, got True"),
        ("clip_low = 0.1", "clip_low = -0.1", "clip_low: input should be greater than or equal to 0, got -0.1"),
        ('[options."eq. 1"]', "[options]", "options.clip_low: input should be a valid dictionary, got 0.1"),
        ('[published."its code"]', '[options."eq. 2"]', "clip_low is chosen twice: in 'eq. 1' and in 'eq. 2'"),
        ("reproduced = true", 'reproduced = "yes"', "reproduced: input should be a valid boolean, got 'yes'"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_key(tmp_path, old, new, error):
    assert old in PRESET
    file = tmp_path / "mine.toml"
    file.write_text(PRESET.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_preset(file)
    assert str(raised.value).splitlines()[0] == f"{file}: {error}"


async def two_turns(row, chat):
    """An episode for presets that train on observations."""
    await chat.turn(f"{row['first']} +")
    reply = await chat.turn("=")
    return float(reply.token_ids[0] % 2)


@pytest.mark.parametrize(
    ("name", "published"),
    [(name, False) for name in PRESETS] + [(name, True) for name in PRESETS if PRESETS[name].published],
)
def test_every_preset_trains(name, published, make_tiny_model, byte_tokenizer):
    """Two steps of a toy policy at a high learning rate; sizes are cut, nothing else."""
    values = PRESETS[name].values
    if "turn_credit" in values:
        with pytest.raises(ConfigError, match="turn_credit='gae' is read only with environment; here no environment"):
            GRPO(ToyLM(), share_of_target, preset=name, max_steps=2, log_to=())
        return  # test_episodes.py trains it
    sizes = {
        "group_size": min(4, values["group_size"]),
        "prompts_per_step": 4,
        "mini_batches": min(2, values["mini_batches"]),
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
    }
    if "environment_loss_coef" in values:
        model, tokenizer = worded.make(16)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
        given, rows = {"environment": two_turns, "tokenizer": tokenizer}, [{"first": n} for n in range(1, 5)]
    else:
        model, given, rows = ToyLM(), {"reward_fn": share_of_target}, PROMPTS
    if "teacher_coef" in values:
        with pytest.raises(ConfigError, match=f"preset='{name}' learns from a teacher: pass teacher="):
            GRPO(model, **given, preset=name, log_to=())
        given, sizes = {"teacher": ToyLM(seed=1)}, {**sizes, "lora_rank": 0}  # a toy has no layers for an adapter
    if "teacher_prompt" in values:  # a hint is text
        model = make_tiny_model("qwen2", vocab_size=259, max_position_embeddings=512, eos_token_id=1)
        given = {"teacher": "ema", "tokenizer": byte_tokenizer, "reward_fn": lambda completions: [0.0, 1.0] * 8}
        rows = [{"prompt": f"{number} +", "privileged_context": "= 3"} for number in range(1, 5)]
    before = copy.deepcopy(model)
    trainer = GRPO(model, **given, preset=name, published=published, max_steps=2, log_to=(), **sizes)
    metrics = trainer.train(rows)
    assert all(isfinite(value) for key, value in metrics.items() if "/" in key)
    assert metrics["update/grad_norm"] > 0
    assert any(not torch.equal(old, new) for old, new in zip(before.parameters(), model.parameters(), strict=True))
    assert ("policy/kl" in metrics) == (values["kl_coef"] > 0)
    assert ("teacher/kl" in metrics) == ("teacher_coef" in values)
    assert ("policy/environment_loss" in metrics) == ("environment_loss_coef" in values)


# --- prompt templates ---


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_asks_what_the_row_asks(name):
    template = TEMPLATES[name]
    prompt = apply_template(name, ROWS)
    text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
    shown = ("[3, 4, 7]", "25") if "nums" in template.columns else (ROWS["question"],)
    assert all(part in text for part in shown)
    if not isinstance(prompt, str):
        roles = [message["role"] for message in prompt]
        assert roles[-1] == ("assistant" if name == "countdown_think" else "user")
        assert all(role in ("system", "user", "assistant") for role in roles)


def test_the_forms_of_the_systems():
    assert apply_template("countdown_think", ROWS)[-1]["content"] == COUNTDOWN_PREFILL
    assert COUNTDOWN_PREFILL.endswith("\n<think>")
    assert isinstance(apply_template("lm_book", ROWS), str)
    assert [message["role"] for message in apply_template("rl_from_scratch", ROWS)] == [
        *("system", "user", "assistant", "user")
    ]
    assert "<answer>4</answer>" in apply_template("rl_from_scratch", ROWS)[2]["content"]
    assert "####" in apply_template("verl_gsm8k", ROWS)[0]["content"]
    assert "\\boxed{}" in apply_template("boxed", ROWS)[0]["content"]


def test_templates_apply_to_rows_without_a_prompt(byte_tokenizer):
    rows = [{"question": "1 + 1?", "answer": "2"}, {"prompt": "as it stands", "answer": "3"}]
    first, second = load_prompts(rows, byte_tokenizer, "lm_book")
    assert first.text.endswith("</answer>\n1 + 1?")
    assert dict(first.columns) == rows[0]
    assert second.text == "as it stands"
    assert dict(second.columns) == {"answer": "3"}


def test_a_template_refuses_rows_that_it_cannot_read(byte_tokenizer):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt_template 'boxed' reads question: the row has no"):
        load_prompts([{"question": "a"}, {"problem": "b"}], byte_tokenizer, "boxed")
    with pytest.raises(ValueError, match="prompt_template is 'box': expected one of countdown_think"):
        apply_template("box", ROWS)
    with pytest.raises(ConfigError, match="unknown prompt_template 'box': did you mean 'boxed'"):
        GRPOConfig.create(prompt_template="box")
    with pytest.raises(ValueError, match=r"prompts\[0\] has no 'prompt' column"):
        load_prompts([{"question": "a"}], byte_tokenizer)

"""Options that no other test names: each changes what it says."""

import inspect
import pkgutil
from types import SimpleNamespace
from typing import get_args

import pytest

import ranked
from rlox_grpo import GRPO
from rlox_grpo.config.options_page import describe_option
from rlox_grpo.config.records import Options
from rlox_grpo.config.records.option import read_metadata
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.host_group import HostGroup
from rlox_grpo.prompts.templates import TEMPLATES
from rlox_grpo.rollout.engines import make_engine
from toy import PROMPTS, ToyLM, options, share_of_target


class Watched(ToyLM):
    """Notes how many rows it was given."""

    def forward(self, input_ids):
        self.most_rows = max(getattr(self, "most_rows", 0), len(input_ids))
        return super().forward(input_ids)


def test_max_rollout_rows_bounds_the_rows_and_changes_no_completion():
    groups = []
    for rows in (None, 3):
        trainer = GRPO(Watched(), share_of_target, output_dir=None, **options(max_rollout_rows=rows))
        groups.append(trainer.engine.generate(trainer.prompts.read(PROMPTS[:4]), 8, trainer.sampler.sampling, 1))
        assert trainer.model.most_rows == (32 if rows is None else 3)
    for one, other in zip(*groups, strict=True):
        assert [c.token_ids.tolist() for c in one.completions] == [c.token_ids.tolist() for c in other.completions]


@pytest.mark.parametrize("greedy", [False, True])
def test_eval_greedy_adds_the_accuracy_of_greedy_completions(greedy):
    trainer = GRPO(
        ToyLM(), lambda completions: [float(c[0] == 7) for c in completions], output_dir=None,
        **options(max_steps=2, eval_greedy=greedy),
    )  # fmt: skip
    metrics = trainer.train(PROMPTS, eval_prompts=PROMPTS)
    assert ("eval/greedy_accuracy" in metrics) == greedy
    if greedy:
        assert metrics["eval/greedy_accuracy"] == trainer.evaluate(PROMPTS, greedy=True)["accuracy"]


def test_lora_target_modules_names_the_adapted_layers():
    trainer = GRPO(
        ranked.tiny_policy(), ranked.share_of_even,
        **ranked.options(None, output_dir=None, lora_rank=2, lora_target_modules=["q_proj"]),
    )  # fmt: skip
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".q_proj." in name for name in trained)


def record_arguments(monkeypatch, name):
    """Put a recorder in the place of a function or class: it takes what that takes. Returns its arguments by name."""
    found, signature = {}, inspect.signature(pkgutil.resolve_name(name))
    monkeypatch.setattr(name, lambda *given, **named: found.update(signature.bind(*given, **named).arguments))
    return found


@pytest.mark.parametrize(
    ("engine", "double", "given", "expected"),
    [
        (
            "vllm",
            "rlox_grpo.rollout.engines.vllm.engine.VLLMEngine",
            {"engine_sleep": False, "gpu_memory_utilization": 0.5},
            {"sleep": False, "gpu_memory_utilization": 0.5},
        ),
        (
            "vllm_server",
            "rlox_grpo.rollout.engines.vllm_server.VLLMServerEngine",
            {"server_urls": ["http://127.0.0.1:1"], "server_nccl_address": "10.0.0.1"},
            {"nccl_address": "10.0.0.1"},
        ),
    ],
)
def test_options_reach_the_engine(engine, double, given, expected, monkeypatch):
    found = record_arguments(monkeypatch, double)
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(None, output_dir=None))
    make_engine(GRPOConfig.create(engine=engine, **given), trainer.policy)
    assert {name: found[name] for name in expected} == expected


def test_a_meaning_is_given_of_every_value_or_of_none():
    explained = {name: field for name, field in Options.model_fields.items() if read_metadata(field)["choices"]}
    assert "kl_estimator" in explained
    for name, field in explained.items():
        known = TEMPLATES if name == "prompt_template" else get_args(field.annotation)  # the one that is no Literal
        assert tuple(read_metadata(field)["choices"]) == tuple(known), name
    assert "\n  k2: d²/2, derivative −d" in describe_option("kl_estimator")


def test_tensor_parallel_size_reaches_vllm_as_the_ranks_that_share_a_model(monkeypatch):
    found = record_arguments(monkeypatch, "rlox_grpo.rollout.engines.vllm.engine.VLLMEngine")
    ranks = SimpleNamespace(engine_size=2, new_host_group=lambda size=None: HostGroup(0, size or 4))
    policy = SimpleNamespace(model=None, tokenizer=None, eos_token_ids=(), vocabulary=None, reader=None)
    make_engine(GRPOConfig.create(engine="vllm", tensor_parallel_size=2), policy, ranks)
    assert (found["sharing_ranks"].size, found["ranks"].size) == (2, 4)

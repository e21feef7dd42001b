"""The step profile: counts by hand, and against what the model was really given."""

import dataclasses

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.batch import microbatches
from rlox_grpo.model.flops import (
    ModelSize,
    UpdateWork,
    add_work,
    count_training_flops,
    count_update_work,
    find_peak_flops,
    look_up_peak_flops,
    measure_model,
    profile_update,
)
from rlox_grpo.model.forward import make_forward
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup


def groups_of(*shapes, alike=False):
    """Groups of (prompt length, completion lengths); completions of a group part at their first token, or never."""
    groups = []
    for index, (prompt, lengths) in enumerate(shapes):
        completions = tuple(
            Completion(np.arange(1, n + 1) + (0 if alike else 10 * row), np.zeros(n, np.float32), "stop")
            for row, n in enumerate(lengths)
        )
        rewards = np.zeros(len(lengths), np.float32)
        groups.append(ScoredGroup(RolloutGroup(Prompt(np.arange(3, 3 + prompt), index), completions), rewards, {}))
    return groups


GROUPS = groups_of((5, [4, 1, 7]), (2, [3, 0]))


def batches_of(groups, token_budget, *, share_prompts):
    rows = sum(len(scored.group.completions) for scored in groups)
    advantages = np.linspace(-1, 1, rows).astype(np.float32)
    return microbatches(groups, advantages, token_budget=token_budget, share_prompts=share_prompts, oversize="alone")


def test_padded_work_by_hand():
    (batch,) = batches_of(GROUPS, 1000, share_prompts=False)
    # rows of 9, 6, 12, 5 and 2 tokens in a rectangle of 5 x 12
    pairs = 45 + 21 + 78 + 15 + 3
    assert count_update_work([batch], shares_prompts=False) == UpdateWork(
        row_tokens=34,
        forwarded=34,
        padding=60 - 34,
        prompt_tokens=19,
        saved=0,
        completion_tokens=15,
        completion_saved=0,
        predicted=15,
        pairs=pairs,
    )


def test_packed_work_by_hand():
    (batch,) = batches_of(GROUPS, 1000, share_prompts=True)
    # prompts 5 + 2 and completions without their last tokens 3 + 0 + 6, 2 + 0
    pairs = (15 + 3) + (3 * 5 + 6) + (6 * 5 + 21) + (2 * 2 + 3)
    assert count_update_work([batch], shares_prompts=True) == UpdateWork(
        row_tokens=34,
        forwarded=18,
        padding=0,
        prompt_tokens=19,
        saved=5 + 5 + 2,
        completion_tokens=15,
        completion_saved=0,
        predicted=15,
        pairs=pairs,
    )


def test_work_of_completions_that_begin_alike_by_hand():
    groups = groups_of((5, [4, 1, 7]), (2, [3, 0, 3]), alike=True)
    (batch,) = batches_of(groups, 1000, share_prompts=True)
    # prompts 5 + 2 and the longest completion of each without its last token, 6 + 2; 3 + 0 and 0 + 2 are in them
    pairs = (15 + 3) + (6 * 5 + 21) + (2 * 2 + 3)
    assert count_update_work([batch], shares_prompts=True) == UpdateWork(
        row_tokens=39,
        forwarded=15,
        padding=0,
        prompt_tokens=21,
        saved=14,
        completion_tokens=18,
        completion_saved=5,
        predicted=7 + 3,
        pairs=pairs,
    )
    metrics = profile_update(count_update_work([batch], shares_prompts=True), num_updates=1, seconds=1.0)
    assert metrics["perf/completion_tokens_saved_share"] == 5 / 18


def test_a_group_that_is_cut_forwards_its_prompt_again():
    batches = batches_of(GROUPS, 12, share_prompts=True)
    work = count_update_work(batches, shares_prompts=True)
    # 5 + [3, 0] | 5 + [7], alone and so not packed: its last token too | 2 + [2, 0]
    assert (len(batches), work.saved, work.prompt_tokens, work.forwarded) == (3, 5 + 2, 19, 18 + 5 + 1)


def test_masked_tokens_are_forwarded_and_not_predicted():
    (batch,) = batches_of(GROUPS, 1000, share_prompts=True)
    loss_mask = batch.loss_mask.clone()
    loss_mask[0] = False
    masked = count_update_work([dataclasses.replace(batch, loss_mask=loss_mask)], shares_prompts=True)
    assert (masked.forwarded, masked.predicted) == (18, 15 - 4)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("token_budget", [12, 30, 1000])
@pytest.mark.parametrize("groups", [GROUPS, groups_of((5, [4, 1, 7]), (2, [3, 0, 3]), alike=True)])
def test_counts_are_what_the_model_is_given(make_tiny_model, share_prompts, token_budget, groups):
    model, seen = make_tiny_model("llama"), []
    forward = make_forward(model, share_prompts=share_prompts)
    assert forward.shares_prompts == share_prompts
    batches = batches_of(groups, token_budget, share_prompts=share_prompts)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    for batch in batches:
        forward(batch)
    work = count_update_work(batches, shares_prompts=share_prompts)
    assert work.forwarded + work.padding == sum(seen)


def test_metrics_by_hand():
    batches = batches_of(GROUPS, 1000, share_prompts=False)
    found = profile_update(count_update_work(batches, shares_prompts=False), num_updates=2, seconds=4.0)
    assert found == pytest.approx(
        {
            "perf/padding_share": 26 / 60,
            "perf/prompt_tokens_saved_share": 0.0,
            "perf/completion_tokens_saved_share": 0.0,
            "perf/update_tokens_per_s": 17.0,
        }
    )
    batches = batches_of(GROUPS, 1000, share_prompts=True)
    size = ModelSize(body=100, body_trained=100, head=10, head_trained=10, attention_width=3)
    work = count_update_work(batches, shares_prompts=True)
    found = profile_update(work, num_updates=2, seconds=4.0, size=size, peak_flops=1e5)
    flops = 6 * 100 * 18 + 6 * 10 * 15 + 12 * 3 * 97
    assert found == pytest.approx(
        {
            "perf/padding_share": 0.0,
            "perf/prompt_tokens_saved_share": 12 / 19,
            "perf/completion_tokens_saved_share": 0.0,
            "perf/update_tokens_per_s": 17.0,
            "perf/mfu": 2 * flops / 4e5,
        }
    )


def test_shares_are_over_the_tokens_of_all_ranks():
    works = [UpdateWork(1000, 900, 100, 400, 100, 600, 30), UpdateWork(100, 50, 50, 40, 0, 60, 0)]
    size = ModelSize(body=100, body_trained=100)
    found = profile_update(
        add_work(map(dataclasses.astuple, works)), num_updates=1, seconds=2.0, num_ranks=2, size=size, peak_flops=1e6
    )
    assert found == pytest.approx(
        {
            "perf/padding_share": 150 / 1100,  # the mean of the ranks' shares would be 0.3
            "perf/prompt_tokens_saved_share": 100 / 440,
            "perf/completion_tokens_saved_share": 30 / 660,
            "perf/update_tokens_per_s": 550.0,
            "perf/mfu": 6 * 100 * 950 / (2.0 * 2e6),
        }
    )


def test_what_has_no_value_is_left_out():
    batches = batches_of(GROUPS, 1000, share_prompts=True)
    work = count_update_work(batches, shares_prompts=True)
    assert profile_update(count_update_work([], shares_prompts=True), num_updates=1, seconds=1.0) == {}
    assert profile_update(work, num_updates=0, seconds=1.0) == {}
    instant = profile_update(work, num_updates=1, seconds=0.0, size=ModelSize(1, 1), peak_flops=1.0)
    shares = {"perf/padding_share", "perf/prompt_tokens_saved_share", "perf/completion_tokens_saved_share"}
    assert set(instant) == shares


def test_frozen_parameters_cost_no_gradient_of_their_own():
    work = UpdateWork(forwarded=7, predicted=3)
    assert count_training_flops(ModelSize(100, 10, 20, 0), work) == (4 * 100 + 2 * 10) * 7 + 4 * 20 * 3


@pytest.mark.parametrize("tied", [False, True])
def test_model_size(make_tiny_model, tied):
    model = make_tiny_model("qwen3", tie_word_embeddings=tied)
    size = measure_model(model)
    embedding = model.model.embed_tokens.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert size.body == size.body_trained == total - embedding * (1 if tied else 2)
    assert size.head == size.head_trained == embedding
    assert size.attention_width == 2 * 4 * 8  # layers, heads, head_dim
    assert measure_model(make_tiny_model("mistral")).attention_width == 0


def test_model_size_under_adapters(make_tiny_model):
    peft = pytest.importorskip("peft")
    bare = measure_model(make_tiny_model("llama"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    size = measure_model(peft.get_peft_model(make_tiny_model("llama"), config))
    adapters = 2 * (2 * 32 + 32 * 2)  # two layers, A [2, 32] and B [32, 2]
    assert (size.body, size.body_trained) == (bare.body + adapters, adapters)
    assert (size.head, size.head_trained, size.attention_width) == (bare.head, 0, bare.attention_width)


def test_experts_are_not_guessed():
    class Mixture(torch.nn.Linear):
        config = type("Config", (), {"num_local_experts": 8})()

    assert measure_model(Mixture(2, 2)) is None
    assert measure_model(torch.nn.Linear(2, 2)) == ModelSize(6, 6)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-32GB", None),  # it has no bfloat16
        ("Imaginary 9000", None),
        ("", None),
    ],
)
def test_peaks(name, tflops):
    assert look_up_peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_only_cuda_has_a_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    assert find_peak_flops(torch.device("cpu")) is None
    assert find_peak_flops(torch.device("cuda", 0)) == 312e12


@pytest.mark.parametrize("device_peak", [None, 1e12])
def test_a_training_step_is_profiled(make_tiny_model, device_peak, tmp_path):
    trainer = GRPO(
        make_tiny_model("llama"),
        lambda completions, prompts: [float(i % 2) for i in range(len(completions))],
        group_size=4,
        prompts_per_step=2,
        max_new_tokens=5,
        max_steps=1,
        output_dir=str(tmp_path),
        log_to=(),
    )
    object.__setattr__(trainer._step, "peak_flops", device_peak)
    metrics = trainer.train([[3, 4, 5], [6, 7]])
    assert metrics["perf/padding_share"] == 0.0
    assert metrics["perf/prompt_tokens_saved_share"] == 0.75
    assert metrics["perf/update_tokens_per_s"] > 0
    assert metrics["perf/rollout_tokens_per_s"] > metrics["perf/tokens_per_s"]
    assert ("perf/mfu" in metrics) == (device_peak is not None)

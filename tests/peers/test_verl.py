"""The adapter inside an installed verl: its registries, its trainer's advantages and losses, its reward workers.

Runs by `make test-verl`, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.adapters import verl as adapter

pytestmark = [
    pytest.mark.verl,
    pytest.mark.filterwarnings("default"),  # verl's and Ray's own
]

BOTH = """
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
print("rlox_grpo" in ADV_ESTIMATOR_REGISTRY, "rlox_grpo" in POLICY_LOSS_REGISTRY)
"""


@pytest.fixture(scope="module")
def core_algos() -> Any:
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture(scope="module")
def compose() -> Any:
    """``compose("key=value", …)``: verl's own trainer configuration with overrides, as its command line makes it."""
    from pathlib import Path

    import hydra

    import verl

    def make(*overrides: str) -> Any:
        folder = Path(verl.__file__).parent / "trainer" / "config"
        with hydra.initialize_config_dir(str(folder), version_base=None):
            return hydra.compose("ppo_trainer", overrides=list(overrides))

    return make


# --- registries ---


def test_import_verl_registers_both(core_algos: Any) -> None:
    assert core_algos.get_adv_estimator_fn("rlox_grpo") is adapter.compute_advantage
    assert core_algos.get_policy_loss_fn("rlox_grpo") is adapter.compute_policy_loss
    adapter.register()  # again


def test_without_plugins_nothing_is_registered_until_asked() -> None:
    program = f"import verl{BOTH}from rlox_grpo.adapters.verl import register\nregister(){BOTH}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["False False", "True True"]


# --- advantages, through the trainer's compute_advantage ---


def batch(rewards: torch.Tensor, uids: list[str], tokens: int = 5, seed: int = 0) -> Any:
    """A DataProto as the trainer has it: rewards spread over two tokens, responses of different lengths."""
    from verl import DataProto

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, tokens + 1, (len(rewards),), generator=generator)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    token_rewards = torch.zeros(len(rewards), tokens)
    token_rewards[:, 0] = 0.25  # as a KL penalty in the reward would
    token_rewards[torch.arange(len(rewards)), lengths - 1] += rewards - 0.25
    return DataProto.from_dict(
        tensors={"token_level_rewards": token_rewards, "response_mask": mask},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


def estimated(data: Any, estimator: str, config: Any) -> torch.Tensor:
    from verl.trainer.ppo.ray_trainer import compute_advantage

    done = compute_advantage(
        data, estimator, norm_adv_by_std_in_grpo=config.get("norm_adv_by_std_in_grpo", True), config=config
    )
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
    return done.batch["advantages"]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_verls_grpo(compose: Any, seed: int, scaled: bool) -> None:
    """Ragged groups of 2 to 9 rows, shuffled: neighbours are of different prompts."""
    rng = np.random.default_rng(seed)
    uids = [f"u{group}" for group in range(20) for _ in range(int(rng.integers(2, 10)))]
    rng.shuffle(uids)
    rewards = torch.from_numpy(rng.normal(size=len(uids)).astype(np.float32))
    config = compose("algorithm.adv_estimator=rlox_grpo", f"algorithm.norm_adv_by_std_in_grpo={scaled}").algorithm
    ours = estimated(batch(rewards, uids, seed=seed), config.adv_estimator, config)
    theirs = estimated(batch(rewards, uids, seed=seed), "grpo", config)
    assert ours.dtype == theirs.dtype
    # They sum in float32: a few units in the last place of rewards of size 3, over deviations down to 0.05.
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert ours.abs().max() > 0.5


def test_options_come_from_the_configuration(compose: Any) -> None:
    uids = [f"u{row % 4}" for row in range(24)]
    rewards = torch.from_numpy(np.random.default_rng(0).normal(size=24).astype(np.float32))
    config = compose("+algorithm.rlox_grpo.baseline=leave_one_out", "+algorithm.rlox_grpo.scaling=none").algorithm
    ours = estimated(batch(rewards, uids), "rlox_grpo", config)
    torch.testing.assert_close(ours, estimated(batch(rewards, uids), "rloo", config), rtol=2e-5, atol=2e-5)
    mistyped = compose("+algorithm.rlox_grpo.scalling=none").algorithm
    with pytest.raises(TypeError, match="scalling"):
        estimated(batch(rewards, uids), "rlox_grpo", mistyped)


def test_a_group_of_equal_rewards_is_zero_where_verls_is_not(core_algos: Any) -> None:
    data = batch(torch.full((8,), 1.9), ["u"] * 8)
    data.batch["token_level_rewards"] = torch.zeros(8, 5)
    data.batch["token_level_rewards"][:, 1] = 1.9
    arguments = {
        "token_level_rewards": data.batch["token_level_rewards"],
        "response_mask": data.batch["response_mask"],
        "index": data.non_tensor_batch["uid"],
    }
    ours, _ = adapter.compute_advantage(**arguments)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(**arguments)
    assert ours.abs().max() == 0
    assert theirs.abs().max() > 0.05, "verl's float32 mean has got better: say so where we claim it"


def test_groups_of_one_and_missing_rewards_are_zero() -> None:
    data = batch(torch.tensor([1.0, 0.0, float("nan"), 5.0]), ["a", "a", "a", "b"])
    ours, _ = adapter.compute_advantage(
        data.batch["token_level_rewards"], data.batch["response_mask"], index=data.non_tensor_batch["uid"]
    )
    # sd of (1, 0) with ddof 1 is 0.70711, so ±0.5 / 0.70711.
    assert ours[:, 0].tolist() == pytest.approx([0.70711, -0.70711, 0.0, 0.0], abs=1e-5)


# --- policy loss ---

MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
GLOBALS = {
    "own": {},
    "global": {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 12, "loss_scale_factor": 16},
}


def actor_config(mode: str, given: dict[str, Any]) -> Any:
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=1.5,
        loss_agg_mode=mode,
    )
    config.global_batch_info.update(given)
    return config


def loss_inputs(seed: int = 0, rows: int = 6, tokens: int = 7) -> dict[str, torch.Tensor]:
    """Ratios from 0.4 to 2.5, so that every clip is reached; per-token advantages; one row without a token."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, tokens, generator=generator) * 3
    lengths = torch.randint(1, tokens, (rows,), generator=generator)
    lengths[2] = 0
    return {
        "old_log_prob": old,
        "log_prob": (old + torch.randn(rows, tokens, generator=generator) * 0.5).requires_grad_(),
        "advantages": torch.randn(rows, tokens, generator=generator),
        "response_mask": torch.arange(tokens) < lengths[:, None],
        "rollout_is_weights": torch.rand(rows, tokens, generator=generator) * 2,
    }


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("given", GLOBALS)
@pytest.mark.parametrize("mode", MODES)
def test_loss_gradient_and_metrics_are_verls_vanilla(core_algos: Any, mode: str, given: str, weighted: bool) -> None:
    inputs = loss_inputs()
    if not weighted:
        inputs["rollout_is_weights"] = None  # type: ignore[assignment]
    config = actor_config(mode, GLOBALS[given])
    results = []
    for name in ("rlox_grpo", "vanilla"):
        loss, metrics = core_algos.get_policy_loss_fn(name)(**inputs, loss_agg_mode=mode, config=config)
        (gradient,) = torch.autograd.grad(loss, inputs["log_prob"])
        results.append((loss, gradient, metrics))
    (ours, our_gradient, our_metrics), (theirs, their_gradient, their_metrics) = results
    # float64 sums against float32 sums of 30 terms of size 1.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-6)
    assert their_metrics["actor/pg_clipfrac"] > 0
    assert their_metrics["actor/pg_clipfrac_lower"] > 0
    for name, value in their_metrics.items():
        assert our_metrics[name] == pytest.approx(value, rel=1e-5), name


def test_what_is_masked_poisons_nothing(core_algos: Any) -> None:
    inputs = loss_inputs()
    mode = "seq-mean-token-mean"
    config = actor_config(mode, {})
    clean, _ = adapter.compute_policy_loss(**inputs, loss_agg_mode=mode, config=config)
    (clean_gradient,) = torch.autograd.grad(clean, inputs["log_prob"])
    outside = ~inputs["response_mask"]
    for name in ("old_log_prob", "log_prob", "advantages", "rollout_is_weights"):
        inputs[name] = inputs[name].detach().masked_fill(outside, float("nan"))
    inputs["log_prob"].requires_grad_()
    loss, metrics = adapter.compute_policy_loss(**inputs, loss_agg_mode=mode, config=config)
    (gradient,) = torch.autograd.grad(loss, inputs["log_prob"])
    assert loss == clean
    assert torch.equal(gradient, clean_gradient)
    assert all(np.isfinite(list(metrics.values())))
    theirs, _ = core_algos.get_policy_loss_fn("vanilla")(**inputs, loss_agg_mode=mode, config=config)
    assert theirs.isnan(), "verl masks before it multiplies now: say so where we claim it"


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_mini_batch(mode: str) -> None:
    inputs = loss_inputs()
    mask = inputs["response_mask"]
    sizes = {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(-1).sum()),
        "loss_scale_factor": 16,
    }
    config = actor_config(mode, sizes)
    whole, _ = adapter.compute_policy_loss(**inputs, loss_agg_mode=mode, config=config)
    parts = [
        adapter.compute_policy_loss(
            **{name: value[rows] for name, value in inputs.items()}, loss_agg_mode=mode, config=config
        )[0]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_the_actors_loss_calls_it(mode: str) -> None:
    """In verl's worker: nested log-probs of whole sequences, denominators from the batch, the loss by its name."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    generator = torch.Generator().manual_seed(0)

    def nested(lengths: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        rows = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts, responses = [2, 3, 2], [4, 1, 3]
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "response_mask": torch.nested.as_nested_tensor(
                [torch.ones(length) for length in responses], layout=torch.jagged
            ),
            "old_log_probs": nested(responses),
            "advantages": nested(responses),
        },
        batch_size=3,
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=8, global_batch_size=3)
    output = {"log_probs": nested([p + r for p, r in zip(prompts, responses, strict=True)])}
    losses = {}
    for name in ("rlox_grpo", "vanilla"):
        config = actor_config(mode, {})
        object.__setattr__(config, "policy_loss", PolicyLossConfig(loss_mode=name))
        losses[name], metrics = ppo_loss(config, output, data)
        assert ("actor/ratio_mean" in metrics) == (name == "rlox_grpo")
    torch.testing.assert_close(losses["rlox_grpo"], losses["vanilla"], rtol=1e-5, atol=1e-6)
    assert losses["rlox_grpo"] != 0


# --- rewards, through verl's reward worker ---

REWARD = "reward.custom_reward_function"
COUNTDOWN = (
    f"{REWARD}.path=pkg://rlox_grpo.adapters.verl",
    f"+{REWARD}.reward_kwargs.rule=[{{name:countdown}},{{name:tag_format,weight:0.5}}]",
    f"+{REWARD}.reward_kwargs.columns.nums=numbers",
)
RIGHT, WRONG, BARE = "<think>a</think><answer>(7 - 3) * 4</answer>", "<think>a</think><answer>7</answer>", "none"


def responses(tokenizer: Any, texts: list[str], truths: list[Any], source: str) -> Any:
    """A DataProto after the rollout: padded on the right, an end token that the decoding drops."""
    from verl import DataProto

    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    width = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    kept = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    prompts = torch.full((len(texts), 3), 65)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": padded,
            "attention_mask": torch.cat([torch.ones_like(prompts), kept], dim=1),
        },
        non_tensors={
            "data_source": np.array([source] * len(texts), dtype=object),
            "reward_model": np.array([{"ground_truth": truth, "style": "rule"} for truth in truths], dtype=object),
            "extra_info": np.array([{"split": "train", "index": row} for row in range(len(texts))], dtype=object),
        },
    )


@pytest.fixture(scope="module")
def tokenizer_path(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_pretrained(folder)
    return str(folder)


def countdown_truths() -> list[dict[str, Any]]:
    """As a parquet file of TinyZero's form gives them."""
    return [{"numbers": np.array([3, 4, 7]), "target": 16} for _ in range(3)]


@pytest.mark.parametrize("manager", ["naive", "dapo"])
def test_reward_worker_scores_with_our_rules(
    compose: Any, byte_tokenizer: Any, tokenizer_path: str, manager: str
) -> None:
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    config = compose(
        f"actor_rollout_ref.model.path={tokenizer_path}", f"reward.reward_manager.name={manager}", *COUNTDOWN
    )
    data = responses(byte_tokenizer, [RIGHT, WRONG, BARE], countdown_truths(), "tinyzero")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        worker = RewardLoopWorker(config)
        results = loop.run_until_complete(worker.compute_score_batch(data))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert [result["reward_score"] for result in results] == [1.5, 0.5, 0.0]
    infos = [result["reward_extra_info"] for result in results]
    assert [info["acc"] for info in infos] == [1.0, 0.0, 0.0]
    assert [info["countdown"] for info in infos] == [1.0, 0.0, 0.0]
    assert [info["tag_format"] for info in infos] == [1.0, 1.0, 0.0]
    assert infos[2]["status"] == "no_answer"
    assert len({tuple(info) for info in infos}) == 1, "verl wants one set of keys"
    scores = worker.reward_manager.assemble_rm_scores(data, [result["reward_score"] for result in results])
    ends = data.batch["attention_mask"][:, 3:].sum(dim=1) - 1
    assert scores[torch.arange(3), ends].tolist() == [1.5, 0.5, 0.0]


def test_validation_averages_acc(compose: Any) -> None:
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    golds = ["18", "18", "5", "5"]
    scores = adapter.compute_scores(["openai/gsm8k"] * 4, ["#### 18", "17", "5", "$5.00"], golds)
    infos = {name: [score[name] for score in scores] for name in scores[0]}
    metrics = process_validation_metrics(["openai/gsm8k"] * 4, ["a", "a", "b", "b"], infos)["openai/gsm8k"]
    assert metrics["acc"]["mean@2"] == pytest.approx(0.75)


def test_reward_workers_of_ray_score_with_our_rules(compose: Any, byte_tokenizer: Any, tokenizer_path: str) -> None:
    """verl's own manager with its own Ray actors: the rule is made from configuration in another process."""
    import ray
    from verl.experimental.reward_loop import RewardLoopManager

    config = compose(
        f"actor_rollout_ref.model.path={tokenizer_path}",
        "reward.num_workers=1",
        f"{REWARD}.path=pkg://rlox_grpo.adapters.verl",
    )
    texts = ["so #### 1,018", "#### 18", "The answer is $1,018.00."]
    data = responses(byte_tokenizer, texts, ["1018"] * 3, "openai/gsm8k")
    ray.init(num_cpus=1, include_dashboard=False, logging_level="error", configure_logging=False)
    try:
        done = RewardLoopManager(config).compute_rm_score(data)
    finally:
        ray.shutdown()
    assert done.batch["rm_scores"].sum(dim=1).tolist() == [1.0, 0.0, 1.0]
    assert list(done.non_tensor_batch["gsm8k_answer"]) == [1.0, 0.0, 1.0]


def test_the_batch_manager_of_before_the_reward_loop(byte_tokenizer: Any) -> None:
    from verl.workers.reward_manager.batch import BatchRewardManager

    manager = BatchRewardManager(
        byte_tokenizer,
        num_examine=0,
        compute_score=adapter.compute_scores,
        rule="countdown",
        columns={"nums": "numbers"},
    )
    data = responses(byte_tokenizer, [WRONG, RIGHT, BARE], countdown_truths(), "tinyzero")
    done = manager(data, return_dict=True)
    assert done["reward_tensor"].sum(dim=1).tolist() == [0.0, 1.0, 0.0]
    assert done["reward_extra_info"]["status"] == ["ok", "ok", "no_answer"]


# --- our own loss beside verl's, by our names ---


def loss_batch(inputs: dict[str, torch.Tensor]) -> Any:
    """The tensors of :func:`loss_inputs` as a batch; one advantage for a row, as ours are."""
    from rlox_grpo.types import Batch, StepTotals, TokenLogProbs

    mask = inputs["response_mask"]
    ids = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        prompt_lengths=torch.ones(len(mask), dtype=torch.int64),
        completion_ids=ids[:, 1:],
        completion_mask=mask,
        loss_mask=mask,
        advantages=inputs["advantages"][:, 0],
        row_index=torch.arange(len(mask)),
        prompt_index=torch.arange(len(mask)),
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(mask.any(dim=-1).sum())),
        log_probs=TokenLogProbs(old=inputs["old_log_prob"]),
    )


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("token-mean", {"policy_loss": "clip", "dual_clip": 1.5}),
    "gspo": ("seq-mean-token-mean", {"policy_loss": "gspo_token"}),
    "sapo": ("seq-mean-token-mean", {"policy_loss": "sapo"}),
    "cispo": ("token-mean", {"policy_loss": "cispo_clip"}),
    "geo_mean": ("seq-mean-token-mean", {"policy_loss": "gmpo"}),
    "dppo_tv": ("token-mean", {"policy_loss": "dppo", "delta": 1.5}),
    "gpg": ("token-mean", {"policy_loss": "reinforce"}),
    "dro": ("token-mean", {"policy_loss": "dro", "dro_beta": 0.3}),
    # A share of 1 draws every token within the bounds: verl's draw has another seed.
    "clip_cov": ("token-mean", {"policy_loss": "clip_cov", "covariance_share": 1.0, "covariance_bounds": (0.1, 2.0)}),
    "kl_cov": ("token-mean", {"policy_loss": "kl_cov", "covariance_share": 0.3, "covariance_kl_coef": 0.7}),
}
THEIRS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
}
"""Options of verl's policy loss."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}


@pytest.mark.parametrize("name", OURS)
def test_policy_losses_are_verls(core_algos: Any, name: str) -> None:
    from rlox_grpo.config.records import LossConfig
    from rlox_grpo.loss import grpo_loss
    from rlox_grpo.loss.step_statistics import with_step_statistics

    mode, options = OURS[name]
    inputs = loss_inputs()
    inputs["advantages"] = inputs["advantages"][:, :1].expand_as(inputs["advantages"]).contiguous()
    del inputs["rollout_is_weights"]
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    if name == "geo_mean":  # verl's mean counts the row without a token
        kept = inputs["response_mask"].any(dim=-1)
        inputs = {key: value[kept] for key, value in inputs.items()}
    inputs["log_prob"] = inputs["log_prob"].detach().requires_grad_()
    config = actor_config(mode, {})
    for option, value in THEIRS.get(name, {}).items():
        setattr(config.policy_loss, option, value)
    theirs, _ = core_algos.get_policy_loss_fn(name)(**inputs, loss_agg_mode=mode, config=config)
    ours = LossConfig(clip_low=0.2, clip_high=0.28, loss_aggregation=AGGREGATIONS[mode], **options)  # type: ignore[arg-type]
    (own,) = with_step_statistics([loss_batch(inputs)], ours, lambda batch: inputs["log_prob"])
    assert (own.policy.measured is not None) == (ours.policy_loss in ("clip_cov", "kl_cov"))
    if own.policy.measured is not None:
        assert 0 < own.policy.measured.sum() < inputs["response_mask"].sum()
    found = grpo_loss(inputs["log_prob"], own, ours).loss
    # Both in float64 but for verl's float32 temperatures of sapo and its 1e-8 beside the lengths of geo_mean.
    torch.testing.assert_close(found, theirs, rtol=1e-7, atol=1e-8)
    (gradient,) = torch.autograd.grad(found, inputs["log_prob"])
    (their_gradient,) = torch.autograd.grad(theirs, inputs["log_prob"])
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-6, atol=1e-8)
    assert their_gradient.abs().max() > 1e-3


@pytest.mark.parametrize("mode", [*AGGREGATIONS, "seq-mean-token-sum-norm"])
def test_aggregations_are_verls(core_algos: Any, mode: str) -> None:
    from rlox_grpo.loss import aggregate

    inputs = loss_inputs()
    values, mask = inputs["advantages"].double(), inputs["response_mask"]
    theirs = core_algos.agg_loss(values, mask, mode, loss_scale_factor=16)
    found = aggregate(values, mask, AGGREGATIONS.get(mode, "fixed_length"), max_length=16)
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_kl_estimators_are_verls(core_algos: Any, estimator: str) -> None:
    from rlox_grpo.loss.kl import kl_penalty

    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = log_probs.detach() + 0.5 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    found, theirs = (
        of(log_probs, reference, estimator) for of in (kl_penalty, core_algos.kl_penalty)
    )  # no value reaches the 10 at which verl's k3 stops
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)
    gradient, their_gradient = (torch.autograd.grad(values.sum(), log_probs)[0] for values in (found, theirs))
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=1e-12)


def test_the_adaptive_controller_is_verls(core_algos: Any) -> None:
    from rlox_grpo.config.records import LossConfig
    from rlox_grpo.loss.kl import adapted_kl_coef

    config = LossConfig.create(kl_schedule="adaptive", kl_target=0.05, kl_horizon=1000)
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.05, horizon=1000)
    coef = 0.1
    for kl in (0.0, 0.04, 0.055, 0.3):
        controller.update(kl, n_steps=64)
        coef = adapted_kl_coef(coef, kl, config, 64)
        assert coef == pytest.approx(controller.value, rel=1e-12)


def test_reinforce_plus_plus_baseline_is_ours(core_algos: Any) -> None:
    """Less the group's mean, then whitened over the batch; verl's deviation is over tokens, so equal lengths here."""
    from credit import make_advantages
    from rlox_grpo.config.schema import GRPOConfig

    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    token_rewards = torch.zeros(12, 4)
    token_rewards[:, -1] = rewards
    mask = torch.ones(12, 4)
    uids = np.repeat(np.array(["a", "b", "c"], dtype=object), 4)
    estimate = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")
    theirs, _ = estimate(token_level_rewards=token_rewards, response_mask=mask, index=uids)
    config = GRPOConfig(group_size=4, reward_scaling="whiten", ddof=1, std_epsilon=0.0)
    ours = torch.from_numpy(make_advantages(config.split().advantages, [1.0])(rewards.numpy(), np.arange(0, 13, 4), {}))
    # verl's deviation has N − 1 of tokens: sqrt(47/48 · 12/11) beside ours of sequences.
    torch.testing.assert_close(ours * ((47 / 48) * (12 / 11)) ** 0.5, theirs[:, 0], rtol=1e-4, atol=1e-5)


# --- the optimal token baseline ---


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_advantages_are_verls(core_algos: Any, name: str) -> None:
    """Ragged groups of 1 to 5 rows, importance weights; the reward is paid at the last token."""
    from rlox_grpo.update.token_baseline import optimal_token_advantages

    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(6), rng.integers(1, 6, 6))
    rows, tokens = len(groups), 8
    lengths = rng.integers(1, tokens + 1, rows)
    rewards, probs, squares = (
        rng.normal(size=rows),
        rng.uniform(0.05, 0.9, (rows, tokens)),
        rng.uniform(0.1, 1, (rows, tokens)),
    )
    weights, mask = rng.uniform(0.3, 2, (rows, tokens)), np.arange(tokens) < lengths[:, None]
    paid = np.zeros((rows, tokens))
    paid[np.arange(rows), lengths - 1] = rewards
    theirs, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=torch.from_numpy(paid),
        response_mask=torch.from_numpy(mask).double(),
        index=groups,
        old_log_probs=torch.from_numpy(np.log(probs)),
        sum_pi_squared=torch.from_numpy(squares),
        rollout_is_weights=torch.from_numpy(weights),
    )
    norms = (1 - 2 * probs + squares) * weights**2
    for group in range(6):
        own = np.flatnonzero(groups == group)
        found = optimal_token_advantages(rewards[own], [norms[row, : lengths[row]] for row in own])
        for row, ours in zip(own, found, strict=True):
            np.testing.assert_allclose(theirs[row].numpy()[: lengths[row]], ours, rtol=0, atol=1e-12)

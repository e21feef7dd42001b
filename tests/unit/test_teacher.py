"""A teacher in whole runs: the policy learns its distributions, and what does not fit is refused."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import ranked
import toy
import worded
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.config.run_file import read_run_file
from rlox_grpo.errors import CheckpointError, ConfigError, NonFiniteError, SampleError
from rlox_grpo.prompts.teacher_prompts import TeacherPrompts, list_verdicts
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group

FULL = {"teacher_in": "loss", "teacher_kl": "full"}


def make_teacher_model() -> toy.ToyLM:
    """A model with a sharp opinion: other weights than the policy's."""
    model = toy.ToyLM(seed=1)
    with torch.no_grad():
        model.head.weight.mul_(12)
    return model


def train(**changes: Any) -> dict[str, float]:
    options = {"teacher": make_teacher_model(), "max_steps": 30, "group_size": 1, "prompts_per_step": 32, **changes}
    return GRPO(toy.ToyLM(), options.pop("reward_fn", ()), **toy.options(**options)).train(toy.PROMPTS.repeat(4, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"teacher_in": "loss"},
        {"teacher_in": "loss", "teacher_kl": "full"},
        {"mini_batches": 2, "updates_per_batch": 2, "learning_rate": 0.01},
        {"async_steps": 1},
        {"temperature": 1.5},
        {"loss_aggregation": "token_mean", "policy_loss": "gspo_token"},
    ],
    ids=["advantage", "k2", "full", "several updates", "async", "temperature", "gspo_token"],
)
def test_the_policy_learns_the_teacher_without_rewards(options: dict[str, Any]) -> None:
    first, last = train(max_steps=1, **options), train(**options)
    assert first["teacher/kl"] > 0.4
    assert last["teacher/kl"] < first["teacher/kl"] / 4
    if "teacher_kl" not in options:
        assert last["teacher/top1_agreement"] > first["teacher/top1_agreement"]
        assert last["teacher/surprised_share"] <= first["teacher/surprised_share"]
        assert first["teacher/excluded_share"] == 0


def test_the_way_rows_are_packed_changes_nothing() -> None:
    """Denominators are those of the step: one row in a micro-batch, or all of them."""

    def weights(budget: int) -> torch.Tensor:
        options = toy.options(group_size=4, max_steps=3, micro_batch_tokens=budget, learning_rate=1e-3)
        trainer = GRPO(toy.ToyLM(), toy.share_of_target, teacher=make_teacher_model(), **options)
        trainer.train(toy.PROMPTS)
        return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    torch.testing.assert_close(weights(9), weights(4096), rtol=1e-4, atol=1e-6)


def test_rewards_add_their_advantages() -> None:
    """The reward wants token 7: with both, the policy stays further from the teacher and earns more."""
    rewarded = train(reward_fn=toy.share_of_target, group_size=8, prompts_per_step=4, teacher_coef=0.3)
    alone = train(group_size=8, prompts_per_step=4)
    assert rewarded["teacher/kl"] > alone["teacher/kl"]
    assert rewarded["reward/mean"] > 0.3


def test_groups_of_equal_rewards_are_trained() -> None:
    trainer = GRPO(
        toy.ToyLM(),
        lambda completions, prompts: [0.0] * len(completions),
        teacher=make_teacher_model(),
        **toy.options(max_steps=1),
    )
    before = copy.deepcopy(list(trainer.model.parameters()))
    assert trainer.train(toy.PROMPTS)["update/grad_norm"] > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_adapter_and_pretrained_teacher(tmp_path: Any) -> None:
    """A teacher by its folder, of a policy with LoRA, in the packed forward."""
    pytest.importorskip("peft")
    ranked.save_policy(tmp_path / "teacher")
    policy = ranked.tiny_policy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    options = {**ranked.options(None), "kl_coef": 0.0, "lora_rank": 8, "learning_rate": 5e-3, "max_steps": 40}
    tokenizer = GRPO(str(tmp_path / "teacher"), ranked.share_of_even, **ranked.options(None)).policy.tokenizer
    steps: list[float] = []
    trainer = GRPO(policy, teacher=tmp_path / "teacher", tokenizer=tokenizer, **options)
    take = trainer.train_step
    trainer.train_step = lambda *given: steps.append((metrics := take(*given))["teacher/kl"]) or metrics
    trainer.train(ranked.PROMPTS)
    assert steps[-1] < 0.8 * steps[0]


def flatten_weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_a_teacher_in_host_memory_is_the_same_teacher() -> None:
    def weights(**options: Any) -> torch.Tensor:
        given = ranked.options(None, max_steps=3, kl_coef=0.0, updates_per_batch=2, mini_batches=2, **options)
        trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, teacher=ranked.other_policy(), **given)
        trainer.train(ranked.PROMPTS)
        return flatten_weights(trainer)

    assert torch.equal(weights(teacher_offload=True), weights())
    assert torch.equal(weights(teacher_offload=True, teacher_in="loss"), weights(teacher_in="loss"))


async def ask_twice(row: Any, chat: Any) -> float:
    """An episode whose observations the teacher finds most unlikely."""
    await chat.turn(f"{row['first']} +")
    await chat.turn("=")
    return 0.0


@pytest.mark.parametrize("options", [{}, {"teacher_in": "loss", "teacher_kl": "full"}], ids=["advantage", "full"])
def test_episodes_of_several_turns_learn_from_a_teacher(options: dict[str, Any]) -> None:
    def measure(steps: int) -> float:
        (model, tokenizer), (teacher, _) = worded.make(16), worded.make(16)
        with torch.no_grad():
            teacher.lm_head.weight.mul_(60.0)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
        given = toy.options(
            max_steps=steps, max_turns=2, max_new_tokens=4, prompts_per_step=4, group_size=4, seed=1, **options
        )
        trainer = GRPO(model, environment=ask_twice, teacher=teacher, tokenizer=tokenizer, **given)
        return trainer.train([{"first": first} for first in range(1, 5)], n_epochs=steps)["teacher/kl"]

    first, last = measure(1), measure(25)
    assert first > 0.5
    assert last < first / 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("teacher", {}),
        ("teacher", {"teacher_in": "loss", "teacher_kl": "full"}),
        ("ref_model", {"kl_coef": 0.5}),
        ("ref_model", {"kl_coef": 0.5, "kl_estimator": "full"}),
    ],
)
def test_rows_of_an_embedding_without_a_token_are_left_out(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    """As in Qwen2.5: 151,936 rows up to 3 B and 152,064 from 7 B on. The padding has the largest logits here."""
    ranked.save_policy(tmp_path)

    def weights(padding: int) -> torch.Tensor:
        scorer = ranked.other_policy()
        if padding:
            scorer.resize_token_embeddings(ranked.VOCABULARY + padding, mean_resizing=False)
            with torch.no_grad():
                scorer.lm_head.weight[ranked.VOCABULARY :] = 10 * scorer.lm_head.weight[:padding]
        given = {"max_steps": 2, "kl_coef": 0.0, **options, name: scorer}
        trainer = GRPO(str(tmp_path), ranked.share_of_even, **ranked.options(None, **given))
        trainer.train(ranked.PROMPTS)
        return flatten_weights(trainer)

    # The same sums in tiles of other sizes: float32, two steps of 1e-3.
    torch.testing.assert_close(weights(3), weights(0), rtol=0, atol=1e-5)


def test_a_run_is_resumed_with_its_teacher(tmp_path: Any) -> None:
    def run(steps: int, teacher: Any) -> Any:
        options = ranked.options(tmp_path / "run", max_steps=steps, checkpoint_steps=2, kl_coef=0.0)
        trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, teacher=teacher, **options)
        trainer.train(ranked.PROMPTS)
        return trainer

    sharper = ranked.tiny_policy()
    with torch.no_grad():
        sharper.get_input_embeddings().weight.mul_(3.0)
    run(2, ranked.other_policy())
    with pytest.raises(CheckpointError, match="teacher: not those of the run"):
        run(4, sharper)
    with pytest.raises(CheckpointError, match="teacher: not those of the run"):
        run(4, None)
    resumed = run(4, ranked.other_policy())
    whole = GRPO(
        ranked.tiny_policy(),
        ranked.share_of_even,
        teacher=ranked.other_policy(),
        **ranked.options(None, max_steps=4, kl_coef=0.0),
    )
    whole.train(ranked.PROMPTS)
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def other_vocabulary(folder: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    ranked.save_policy(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(folder)
    model = ranked.tiny_policy()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy_loss": "gspo"}, "would spread the teacher's advantage of a token over all of them"),
        ({"teacher_in": "advantage", "teacher_kl": "full"}, "an advantage is of the sampled token alone"),
        ({"teacher_in": "loss", "teacher_kl": "full", "teacher_offload": True}, "set teacher_offload=False"),
        ({"teacher_in": "loss", "teacher_kl": "full", "kl_estimator": "full", "kl_coef": 0.1}, "set one"),
        ({"teacher_coef": 0.0}, "teacher_coef: .*greater than 0"),
        ({"teacher": "http://127.0.0.1:1", "teacher_in": "loss", "teacher_kl": "full"}, "a server sends log-probs of"),
        ({"teacher": "no/such folder"}, "teacher='no/such folder'"),
        ({"teacher": None, "teacher_coef": 2.0}, "teacher_coef=2.0 is read only with teacher"),
        ({"teacher": 3}, "teacher is int: expected a path, a hub id, a URL or a torch.nn.Module"),
        ({"reward_fn": toy.share_of_target}, "a teacher without rewards needs no group"),
        ({"zero_variance": "refill"}, "a teacher trains these groups too: set zero_variance='drop'"),
        (
            {"zero_variance": "drop_always"},
            "'drop_always' leaves out every group, because teacher= without rewards .* set zero_variance='drop'",
        ),
        ({"teacher": toy.ToyLM()}, "teacher has the weights of the policy"),
        ({"teacher": "self"}, "teacher='self' without teacher_prompt: the policy and its teacher would read the same"),
        ({"teacher": "ema"}, "teacher='ema' without teacher_prompt"),
        ({"teacher_mix": 0.5}, "teacher_mix=0.5 is read only with teacher='ema'"),
        ({"teacher": "self", "teacher_prompt": "Think!"}, "teacher_prompt: expected a template with {column}, a funct"),
        ({"teacher": "self", "teacher_prompt": "{prompt} { answer }"}, r"\{ answer \} is not read as a column"),
        ({"teacher": "self", "teacher_prompt": "{prompt} {answer!r}"}, r"\{answer!r\} is not .*write \{answer\}"),
        ({"teacher": "self", "teacher_prompt": lambda row: ""}, "it is called with row, verdict and siblings"),
        (
            {"teacher": "self", "teacher_prompt": "In \\boxed{}!"},
            r"teacher_prompt='In .* reads no column, so every row",
        ),
        ({"teacher": "self", "teacher_prompt": 3}, "teacher_prompt: 3: expected a template"),
        ({"teacher": "self", "teacher_prompt": "no_such:hint"}, r"teacher_prompt \(no_such:hint\): No module named"),
        ({"teacher": "self", "teacher_prompt": "{answer}", "teacher_offload": True}, "the policy stays on its device"),
        (
            {"teacher": None, "advantage_fn": "zero", "group_size": 2},
            "advantage_fn='zero' without a teacher: nothing is",
        ),
        ({"advantage_fn": "zero", "zero_variance": "drop_always"}, "leaves out every group: set zero_variance='drop'"),
        (
            {"advantage_fn": "zero", "kl_coef": 0.1, "kl_in": "reward"},
            "kl_in='reward' with advantage_fn='zero': the penalty is subtracted from rewards, which train nothing",
        ),
        (
            {"advantage_fn": "zero", "teacher_in": "loss", "top_entropy_share": 0.2},
            "top_entropy_share=0.2 with advantage_fn='zero' and teacher_in='loss'",
        ),
        (
            {"advantage_fn": "zero", "teacher_in": "loss", "importance_correction": "token"},
            "importance_correction='token' with advantage_fn='zero' and teacher_in='loss'",
        ),
        ({"mask_unhinted": True}, "mask_unhinted=True is read only with teacher_prompt"),
        ({"teacher_prompt": "{answer}", "mask_unhinted": True}, "set mask_unhinted=False, or advantage_fn='zero'"),
        ({"advantage_fn": "zero", "reward_scaling": "none"}, "reward_scaling='none' is ignored: advantage_fn='zero'"),
        ({"teacher": None, "teacher_prompt": "{answer}", "group_size": 2}, "teacher_prompt='{answer}' is read only wi"),
        (
            {"teacher": "self", "teacher_prompt": "{answer}", "shard_parameters": True},
            "teacher='self' with sharded parameters is not supported, because .*, or set teacher='ema'",
        ),
        (
            {**FULL, "teacher": "self", "teacher_prompt": "{answer}", "updates_per_batch": 2, "mini_batches": 2},
            "which changes in each of 4 updates: set updates_per_batch=1 and mini_batches=1",
        ),
        (
            {"teacher_prompt": "{answer}"},
            r"prompts\[0\]: teacher_prompt reads {answer}: the row has no column 'answer'",
        ),
        ({"teacher_prompt": lambda row, verdict, siblings: 3}, "the teacher's prompt is int: expected a string"),
        ({"teacher_prompt": lambda row, verdict, siblings: [99]}, "the teacher's prompt has the token id 99"),
        (
            {"teacher_prompt": lambda row, verdict, siblings: 1 / 0},
            "step 1: teacher_prompt <lambda> raised ZeroDivisionError",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError, TypeError), match=said):
        train(**options)


def test_a_source_without_rewards_is_refused_where_groups_of_equal_rewards_are_always_left_out() -> None:
    """A source with rewards of its own trains on them."""
    changes = {"max_steps": 1, "zero_variance": "drop_always"}
    trainer = GRPO(toy.ToyLM(), teacher=make_teacher_model(), **toy.options(**changes))
    scored = TrainSource(toy.PROMPTS, rewards=toy.share_of_target)
    with pytest.raises(ConfigError, match=r"prompts\['plain'\]: zero_variance='drop_always' leaves out every group"):
        trainer.train({"scored": scored, "plain": toy.PROMPTS})
    assert trainer.train({"scored": scored})["teacher/kl"] > 0.4


def test_another_vocabulary_is_refused(tmp_path: Any) -> None:
    folder = ranked.save_policy(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"its tokenizer has 62 tokens and the policy's 61; id 61 is 'extra' there"):
        GRPO(str(folder), teacher=other_vocabulary(tmp_path / "other"), **ranked.options(None, kl_coef=0.0))
    small = toy.ToyLM(seed=3)
    small.embedding = torch.nn.Embedding(8, 16)
    with pytest.raises(ConfigError, match="teacher has another vocabulary: 8 ids, and the policy samples 12"):
        train(teacher=small)


def test_a_folder_without_a_tokenizer_names_the_remedy(tmp_path: Any) -> None:
    """The argument tokenizer is the policy's."""
    ranked.other_policy().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"teacher=.*has no tokenizer beside it: save its tokenizer there by"):
        GRPO(ranked.tiny_policy(), teacher=tmp_path / "teacher", **ranked.options(None, kl_coef=0.0))


class FewerLogits(torch.nn.Module):
    """A module whose vocabulary is seen only in its logits, of which it gives 9."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_teacher_model()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids)
        return logits[..., :9]


def test_fewer_logits_than_sampled_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"teacher gives logits of 9 ids, and the policy has sampled id (9|10|11)"):
        train(teacher=FewerLogits(), max_steps=1)


@pytest.mark.parametrize("options", [{}, {"teacher_in": "loss", "teacher_kl": "full"}], ids=["advantage", "full"])
def test_the_base_model_of_a_new_adapter_is_refused(options: dict[str, Any]) -> None:
    """The adapter starts at 0. An adapter with weights may go back to its base model."""
    pytest.importorskip("peft")
    given = {**ranked.options(None), "kl_coef": 0.0, "lora_rank": 2, "max_steps": 1, **options}
    with pytest.raises(ConfigError, match="teacher has the weights of the policy: its KL is 0"):
        GRPO(ranked.tiny_policy(), ranked.share_of_even, teacher=ranked.tiny_policy(), **given)
    adapted = GRPO(ranked.tiny_policy(), teacher=ranked.other_policy(), **given).model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    trainer = GRPO(adapted, ranked.share_of_even, teacher=ranked.tiny_policy(), **{**given, "lora_rank": 0})
    assert trainer.train(ranked.PROMPTS)["teacher/kl"] > 0


def test_a_teacher_with_the_weights_of_a_dithered_policy_is_refused() -> None:
    given = {**ranked.options(None), "kl_coef": 0.0, "max_steps": 1}
    rounded = ranked.tiny_policy().bfloat16().float()
    with pytest.raises(ConfigError, match="teacher has the weights of the policy: its KL is 0"):
        GRPO(copy.deepcopy(rounded), ranked.share_of_even, teacher=copy.deepcopy(rounded), dtype="bfloat16", **given)
    # In float32, the same difference is a teacher's.
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, teacher=rounded, dtype="float32", **given)
    assert trainer.train(ranked.PROMPTS)["teacher/kl"] > 0


def test_the_model_itself_is_refused() -> None:
    model = toy.ToyLM()
    with pytest.raises(ConfigError, match="teacher is the model in training"):
        GRPO(model, teacher=model, **toy.options())
    with pytest.raises(ConfigError, match=r"ref_model is the model in training.*or leave it out"):
        GRPO(model, toy.share_of_target, ref_model=model, **toy.options(kl_coef=0.1))


def test_a_model_that_shares_the_policys_weights_is_refused() -> None:
    """As the base model of a PEFT model does: freezing it would freeze the policy."""
    model, other = toy.ToyLM(), toy.ToyLM(seed=1)
    other.embedding = model.embedding
    with pytest.raises(ConfigError, match="teacher is the model in training, or shares its weights"):
        GRPO(model, teacher=other, **toy.options())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_reference_with_fewer_positions_is_refused() -> None:
    """Its positions count and not the policy's: before the run, and in a step where turns make a longer sequence."""
    reference, options = ranked.other_policy(), ranked.options(None, max_steps=1)
    positions = max(len(prompt) for prompt in ranked.PROMPTS) + options["max_new_tokens"] - 1
    reference.config.max_position_embeddings = positions
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, ref_model=reference, **{**options, "kl_coef": 0.1})
    with pytest.raises(ValueError, match=f"it passes the reference's {positions} positions"):
        trainer.train(ranked.PROMPTS)
    trainer.prompts.reference = None
    with pytest.raises(ValueError, match=rf"a sequence of {positions + 1} tokens passes the {positions} positions"):
        trainer.train(ranked.PROMPTS)


def test_a_teacher_with_fewer_positions_is_refused() -> None:
    """Its positions count and not the policy's: with its own prompt before the run or in the step, else before it."""
    policy = ranked.tiny_policy()
    teacher = ranked.other_policy()
    options = ranked.options(None, kl_coef=0.0, max_steps=1)
    positions = max(len(prompt) for prompt in ranked.PROMPTS) + options["max_new_tokens"] - 1
    teacher.config.max_position_embeddings = positions
    with pytest.raises(ValueError, match=f"it passes the teacher's {positions} positions"):
        GRPO(policy, ranked.share_of_even, teacher=teacher, **options).train(ranked.PROMPTS)
    policy.config.max_position_embeddings, teacher.config.max_position_embeddings = positions + 1, positions + 9

    def write(row: Any, verdict: Any, siblings: Any) -> list[int]:
        return [*[2] * 8, *row["prompt"]]

    trainer = GRPO(policy, ranked.share_of_even, teacher=teacher, teacher_prompt=write, **options)
    assert trainer.train(ranked.PROMPTS)["teacher/hinted_share"] == 1
    teacher.config.max_position_embeddings = positions
    trainer = GRPO(policy, ranked.share_of_even, teacher=teacher, teacher_prompt=write, **options)
    with pytest.raises(SampleError, match=f"the teacher's prompt has .* passes the model's {positions} positions"):
        trainer.train(ranked.PROMPTS)


@pytest.mark.parametrize("options", [{}, {"teacher_in": "loss", "teacher_kl": "full"}], ids=["sampled", "full"])
def test_a_teacher_that_overflows_names_the_sample(options: dict[str, Any]) -> None:
    """The teacher's embedding of token 5 is NaN: prompts[1] is 3, 4, 5. No weight changes, and the run can go on."""
    teacher = make_teacher_model()
    kept = teacher.embedding.weight.detach().clone()
    with torch.no_grad():
        teacher.embedding.weight[5] = torch.nan
    # Tokens that are not sampled, so that the prompt alone has the NaN.
    policy = toy.ToyLM()
    with torch.no_grad():
        policy.head.bias[5] = -100.0
    given = toy.options(group_size=2, max_steps=1, micro_batch_tokens=9, **options)
    trainer = GRPO(policy, teacher=teacher, **given)
    before = copy.deepcopy(policy)
    with pytest.raises(NonFiniteError, match="step 1: the teacher's log-probs are not finite in rows") as raised:
        trainer.train(toy.PROMPTS[:2])
    assert list(raised.value.rows) == [2, 3]
    assert "row 2 is completion 0 of prompts[1]" in str(raised.value)
    assert all(torch.equal(old, new) for old, new in zip(before.parameters(), policy.parameters(), strict=True))
    with torch.no_grad():
        teacher.embedding.weight.copy_(kept)
    assert trainer.train(toy.PROMPTS[:2])["teacher/kl"] > 0


def test_a_reference_that_overflows_costs_no_completion_its_reward() -> None:
    """Of prompts[1] it gives NaN, which a reward must not become: a completion without a reward is left out."""
    reference, policy = make_teacher_model(), toy.ToyLM()
    with torch.no_grad():
        reference.embedding.weight[5] = torch.nan
        policy.head.bias[5] = -100.0
    given = toy.options(group_size=2, max_steps=1, kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    trainer = GRPO(policy, toy.share_of_target, ref_model=reference, **given)
    before = copy.deepcopy(policy)
    with pytest.raises(NonFiniteError, match=r"step 1: the KL of the rewards .* not finite in rows \[2") as raised:
        trainer.train(toy.PROMPTS[:2])
    assert "row 2 is completion 0 of prompts[1]" in str(raised.value)
    assert all(torch.equal(old, new) for old, new in zip(before.parameters(), policy.parameters(), strict=True))


def test_a_teacher_that_excludes_an_id_has_no_kl_over_the_vocabulary() -> None:
    """Of sampled tokens its signal is clamped; over the vocabulary the KL is infinite, which the error says."""
    teacher = make_teacher_model()
    with torch.no_grad():
        teacher.head.bias[3] = -torch.inf
    assert train(teacher=teacher, max_steps=1)["teacher/excluded_share"] > 0
    with pytest.raises(
        NonFiniteError, match=r"step 1: .*the KL over the whole vocabulary is not finite in rows \[0, 1"
    ):
        train(teacher=teacher, max_steps=1, **FULL)


def show_the_best_sibling(row: Any, verdict: Any, siblings: Any) -> list[int] | None:
    """The tokens of the best other completion before the prompt; the policy's prompt where none is better."""
    best = max(siblings, key=lambda sibling: sibling.reward)
    return None if best.reward <= verdict.reward else [*best.completion, *row["prompt"]]


def compute_kl(model: Any, scored: Any, temperature: float, *, is_full: bool) -> float:
    """The mean over all tokens of log π(token | prompt) − log π(token | hint, prompt), or of the KL over all tokens."""
    values: list[torch.Tensor] = []
    for group in scored:
        verdicts, prompt = list_verdicts(group), group.group.prompt.token_ids.tolist()
        for index, completion in enumerate(group.group.completions):
            siblings = verdicts[:index] + verdicts[index + 1 :]
            hinted = show_the_best_sibling({"prompt": prompt}, verdicts[index], siblings) or prompt
            ids = completion.token_ids.tolist()
            p, q = (
                (model(torch.tensor([[*start, *ids]]))[0, len(start) - 1 : -1] / temperature).log_softmax(-1)
                for start in (prompt, hinted)
            )
            token = torch.arange(len(ids)), torch.tensor(ids)
            values.append((p.exp() * (p - q)).sum(-1) if is_full else p[token] - q[token])
    return float(torch.cat(values).detach().mean())


@pytest.mark.parametrize(
    "options",
    [{}, {"teacher_in": "loss"}, FULL, {"micro_batch_tokens": 9}, {"temperature": 1.5}, {**FULL, "temperature": 1.5}],
    ids=["advantage", "k2", "full", "rows alone", "temperature", "full and temperature"],
)
def test_the_policy_is_its_own_teacher_with_a_right_sibling(options: dict[str, Any]) -> None:
    policy = toy.ToyLM()
    with torch.no_grad():
        policy.head.weight.mul_(6)  # so that a hint changes what the policy says
    before = copy.deepcopy(policy)
    given = toy.options(max_steps=1, teacher_prompt=show_the_best_sibling, **options)
    trainer = GRPO(policy, toy.share_of_target, teacher="self", **given)
    metrics = trainer.train(toy.PROMPTS)
    measured, hinted = metrics["teacher/kl"], metrics["teacher/hinted_share"]
    rewards = np.stack([scored.rewards for scored in trainer.last_rollout[0]])
    assert hinted == np.mean(rewards < rewards.max(1, keepdims=True))
    assert 0 < hinted < 1
    is_full = "teacher_kl" in options
    expected = compute_kl(before, trainer.last_rollout[0], options.get("temperature", 1.0), is_full=is_full)
    assert abs(expected) > 1e-3
    assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("options", [{}, FULL, {"micro_batch_tokens": 9}], ids=["sampled", "full", "rows alone"])
def test_completions_without_a_hint_are_left_out(options: dict[str, Any]) -> None:
    """The means are over the hinted completions: the others have a KL of 0 to the policy itself, and would dilute."""
    policy = toy.ToyLM()
    with torch.no_grad():
        policy.head.weight.mul_(6)
    given = {"max_steps": 1, "teacher_prompt": show_the_best_sibling, "advantage_fn": "zero"}

    def take_step(**masked: Any) -> tuple[dict[str, float], torch.Tensor]:
        trainer = GRPO(
            copy.deepcopy(policy), toy.share_of_target, teacher="self", **toy.options(**given, **options, **masked)
        )
        return trainer.train(toy.PROMPTS), flatten_weights(trainer)

    (diluted, _), (metrics, weights) = take_step(), take_step(mask_unhinted=True)
    assert 0 < metrics["teacher/hinted_share"] == diluted["teacher/hinted_share"] < 1
    # Every completion of the toy has as many tokens.
    assert metrics["teacher/kl"] == pytest.approx(diluted["teacher/kl"] / diluted["teacher/hinted_share"], rel=1e-4)
    assert not torch.equal(weights, flatten_weights(GRPO(policy, toy.share_of_target, **toy.options())))


def test_a_step_without_hints_trains_nothing() -> None:
    """Even where a moving average has fallen behind the policy, and would pull it back."""
    hints = iter([True, False, False])

    def write(row: Any, verdict: Any, siblings: Any) -> Any:
        return hint_at_target(row, verdict, siblings) if now["hinted"] else None

    now: dict[str, bool] = {}
    trainer = GRPO(
        toy.ToyLM(),
        toy.share_of_target,
        teacher="ema",
        **toy.options(max_steps=3, teacher_prompt=write, advantage_fn="zero", mask_unhinted=True),
    )
    take, weights, shares = trainer.train_step, [flatten_weights(trainer)], []

    def take_step(*given: Any) -> dict[str, float]:
        now["hinted"] = next(hints)
        metrics = take(*given)
        weights.append(flatten_weights(trainer))
        shares.append(metrics["teacher/hinted_share"])
        return metrics

    trainer.train_step = take_step
    trainer.train(toy.PROMPTS)
    assert shares == [1, 0, 0]
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [False, True, True]


def hint_at_target(row: Any, verdict: Any, siblings: Any) -> list[int]:
    """Token 7 before the prompt, many times."""
    return [*[toy.TARGET] * 12, *row["prompt"]]


def test_a_copy_of_the_policy_is_a_teacher_if_it_reads_another_prompt() -> None:
    copied, live = (
        train(teacher=teacher, teacher_prompt=hint_at_target, max_steps=1) for teacher in (toy.ToyLM(), "self")
    )
    assert abs(live["teacher/kl"]) > 1e-3
    assert copied["teacher/kl"] == pytest.approx(live["teacher/kl"], rel=1e-5)


@pytest.mark.parametrize("options", [{}, FULL, {"mini_batches": 2, "updates_per_batch": 2}], ids=str)
def test_the_policy_learns_what_a_hint_says(options: dict[str, Any]) -> None:
    """A frozen teacher that sees the hint; the policy does not."""
    first, last = (train(max_steps=steps, teacher_prompt=hint_at_target, **options)["teacher/kl"] for steps in (1, 30))
    assert last < first / 3


def test_rewards_are_measured_and_train_nothing() -> None:
    """advantage_fn='zero': the weights are those of the teacher alone, and the metrics are those of the rewards."""
    options = toy.options(max_steps=3)
    alone, measured, both = (
        GRPO(toy.ToyLM(), teacher=make_teacher_model(), **options, **given)
        for given in (
            {},
            {"reward_fn": toy.share_of_target, "advantage_fn": "zero"},
            {"reward_fn": toy.share_of_target},
        )
    )
    alone.train(toy.PROMPTS)
    metrics = measured.train(toy.PROMPTS)
    both.train(toy.PROMPTS)
    assert torch.equal(flatten_weights(alone), flatten_weights(measured))
    assert not torch.equal(flatten_weights(both), flatten_weights(measured))
    assert metrics["mean_reward"] > 0
    assert metrics["rollout/frac_reward_zero_std"] < 1


def hint_at_the_last_words(row: Any, verdict: Any, siblings: Any) -> Any:
    """The environment's last message before the first one."""
    assert [message["role"] for message in verdict.messages] == ["assistant", "user", "assistant"]
    assert siblings[0].messages != verdict.messages or siblings[0].completion == verdict.completion
    (first,) = row["prompt"]
    return [{"role": "user", "content": f"{verdict.messages[1]['content']} 3 {first['content']}"}]


@pytest.mark.parametrize("hint", [hint_at_the_last_words, "{first} = {prompt}", lambda row, verdict, siblings: None])
def test_an_episode_is_scored_after_a_prompt_of_the_teachers_own(hint: Any) -> None:
    """Observations follow the teacher's prompt too, and are not trained on: KL by hand from the episode's tokens."""
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    other = worded.make(16)[0]
    with torch.no_grad():
        other.lm_head.weight.mul_(20.0)
    before = copy.deepcopy(model)
    given = toy.options(max_steps=1, max_turns=2, max_new_tokens=4, prompts_per_step=4, group_size=2, seed=1)
    trainer = GRPO(model, environment=ask_twice, teacher=other, teacher_prompt=hint, tokenizer=tokenizer, **given)
    measured = trainer.train([{"first": first} for first in range(1, 5)])["teacher/kl"]
    written = TeacherPrompts(hint, tokenizer).write(trainer.last_rollout[0])
    values, unhinted = [], []
    for group in trainer.last_rollout[0]:
        for completion in group.group.completions:
            start = (group.group.prompt.token_ids if completion.prompt_ids is None else completion.prompt_ids).tolist()
            ids, sampled = completion.token_ids.tolist(), torch.from_numpy(completion.sampled)
            assert not sampled.all()
            token = torch.arange(len(ids)), torch.tensor(ids)
            p, q, plain = (
                scorer(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)[token]
                for scorer, prompt in ((before, start), (other, written.pop(0).tolist()), (other, start))
            )
            values.append((p - q)[sampled])
            unhinted.append((p - plain)[sampled])
    expected, other_value = (float(torch.cat(of).detach().mean()) for of in (values, unhinted))
    assert measured == pytest.approx(expected, rel=1e-4)
    is_hinted = hint is hint_at_the_last_words or isinstance(hint, str)
    assert (abs(expected - other_value) > 1e-3) == is_hinted


async def ask_by_seed(row: Any, chat: Any) -> float:
    """Episodes of a row that begin differently."""
    await chat.turn(f"{row['first']} + {chat.seed % 5} =")
    await chat.turn("=")
    return 0.0


def hint_before_the_question(row: Any, verdict: Any, siblings: Any) -> Any:
    (first,) = row["prompt"]
    return [{"role": "user", "content": f"9 = {first['content']}"}]


@pytest.mark.parametrize("options", [{}, {"teacher_in": "loss", "teacher_kl": "full"}, {"micro_batch_tokens": 24}])
@pytest.mark.parametrize(
    "hint", [hint_before_the_question, "9 = {prompt} {first}", lambda row, verdict, siblings: None]
)
def test_the_teacher_reads_no_question_twice_if_episodes_begin_differently(hint: Any, options: Any) -> None:
    """The group's prompt is what their first prompts share; the rest, at the start of each row, is not read again."""
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    other = worded.make(16)[0]
    with torch.no_grad():
        other.lm_head.weight.mul_(20.0)
    before = copy.deepcopy(model)
    given = toy.options(max_steps=1, max_turns=2, max_new_tokens=4, prompts_per_step=4, group_size=3, seed=1, **options)
    trainer = GRPO(model, environment=ask_by_seed, teacher=other, teacher_prompt=hint, tokenizer=tokenizer, **given)
    metrics = trainer.train([{"first": first} for first in range(1, 5)])
    values, rests = [], set()
    for group in trainer.last_rollout[0]:
        for completion in group.group.completions:
            first = completion.turns[0]
            rests.add(first)
            ids, sampled = completion.token_ids[first:].tolist(), torch.from_numpy(completion.sampled[first:])
            ours = [*group.group.prompt.token_ids.tolist(), *completion.token_ids[:first].tolist()]
            question = completion.episode.messages[0]["content"]
            assert tokenizer.decode(ours) == f"{question} <eos>"
            asked = {"9 = {prompt} {first}": f"9 = {question} {group.group.prompt.columns['first']}"}
            asked[hint_before_the_question] = f"9 = {question}"
            theirs = tokenizer(f"{asked.get(hint, question)} <eos> ", add_special_tokens=False)["input_ids"]
            p, q = (
                scorer(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for scorer, prompt in ((before, ours), (other, theirs))
            )
            if "teacher_kl" in options:
                values.append((p.exp() * (p - q)).sum(-1)[sampled])
            else:
                token = torch.arange(len(ids)), torch.tensor(ids)
                values.append((p - q)[token][sampled])
    assert max(rests) > 0
    assert metrics["teacher/kl"] == pytest.approx(float(torch.cat(values).detach().mean()), rel=1e-4)
    is_hinted = hint is hint_before_the_question or isinstance(hint, str)
    assert metrics["teacher/hinted_share"] == is_hinted


def roll() -> str:
    """Roll a die."""
    return "3"


def flip() -> str:
    """Flip a coin."""
    return "1"


async def ask_with_tools(row: Any, chat: Any) -> float:
    """An episode with the tools of the run, or with those that it chooses itself."""
    await chat.turn(f"{row['first']} +", **({"tools": [roll, flip]} if row["first"] > 2 else {}))
    return 0.0


def test_the_teachers_prompt_lists_the_tools_of_the_episode(monkeypatch: Any) -> None:
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ {'roll': 9, 'flip': 8}[tool.function.name] }} <eos> {% endfor %}"
        "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    )
    texts = []
    write = TeacherPrompts.write

    def spy(self: TeacherPrompts, scored: Any) -> Any:
        prompts = write(self, scored)
        for group in scored:
            texts.append((tokenizer.decode(group.group.prompt.token_ids), tokenizer.decode(prompts[2 * len(texts)])))
        return prompts

    monkeypatch.setattr(TeacherPrompts, "write", spy)
    given = toy.options(max_steps=1, max_turns=2, max_new_tokens=2, prompts_per_step=4, group_size=2)
    trainer = GRPO(
        model,
        environment=ask_with_tools,
        tools=[roll],
        teacher="self",
        teacher_prompt="1 1 {prompt}",
        tokenizer=tokenizer,
        **given,
    )
    trainer.train([{"first": first} for first in range(1, 5)])
    assert sorted(texts) == sorted(
        (f"{tools} {first} + <eos>", f"{tools} 1 1 {first} + <eos>")
        for first, tools in [(1, "9 <eos>"), (2, "9 <eos>"), (3, "9 <eos> 8 <eos>"), (4, "9 <eos> 8 <eos>")]
    )
    (group, *_) = trainer.last_rollout[0]
    stored = json.loads(json.dumps(encode_scored_group(group)))
    played, restored = (each.group.completions[0] for each in (group, decode_scored_group(stored, group.group.prompt)))
    assert restored.episode.tools == played.episode.tools
    assert len(played.episode.tools) in (1, 2)


def test_a_column_of_the_hint_is_missed_before_the_first_episode() -> None:
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    trainer = GRPO(
        model,
        environment=ask_twice,
        teacher="self",
        teacher_prompt="{answer} {prompt}",
        tokenizer=tokenizer,
        **toy.options(),
    )
    with pytest.raises(
        ValueError, match=r"prompts\[0\]: teacher_prompt reads {answer}: the row has no column 'answer'"
    ):
        trainer.train([{"first": 1}])


def test_a_template_on_messages_trains_a_packed_policy() -> None:
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": f"{number} +"}], "target": 2 * number} for number in range(1, 9)]
    trainer = GRPO(
        model,
        teacher="self",
        teacher_prompt="{target} = {prompt}",
        tokenizer=tokenizer,
        **toy.options(max_steps=2, max_new_tokens=4, seed=1),
    )
    assert trainer.train(rows)["teacher/kl"] != 0


@pytest.mark.parametrize("variables", [{}, {"chat_template_kwargs": {"mode": "3"}}])
def test_the_teachers_prompt_has_the_template_variables_of_its_source(
    variables: dict[str, Any], monkeypatch: Any
) -> None:
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = (
        "{% if mode %}{{ mode }} {% endif %}{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    )
    rows = [{"prompt": [{"role": "user", "content": f"{number} +"}], "target": 2 * number} for number in range(1, 5)]
    options = toy.options(max_steps=1, prompts_per_step=8, group_size=1, max_new_tokens=2, **variables)
    trainer = GRPO(model, teacher="self", teacher_prompt="{target} = {prompt}", tokenizer=tokenizer, **options)
    written = []
    write = TeacherPrompts.write

    def spy(self: TeacherPrompts, scored: Any) -> Any:
        prompts = write(self, scored)
        sources = [group.group.prompt.data_source for group in scored for _ in group.group.completions]
        written.extend(zip(sources, map(tokenizer.decode, prompts), strict=True))
        return prompts

    monkeypatch.setattr(TeacherPrompts, "write", spy)
    trainer.train({"plain": rows, "marked": TrainSource(rows, chat_template_kwargs={"mode": "5 5"})})
    before = "3 " if variables else ""
    hints = [f"{2 * number} = {number} + <eos>" for number in range(1, 5)]
    assert sorted(text for source, text in written if source == "plain") == [f"{before}{hint}" for hint in hints]
    assert sorted(text for source, text in written if source == "marked") == [f"5 5 {hint}" for hint in hints]


def test_the_check_before_a_run_has_the_template_variables_of_the_source() -> None:
    model, tokenizer = worded.make(16)
    tokenizer.chat_template = (
        "{% if mode %}{{ raise_exception('mode') if '=' in messages[0].content }}{% endif %}"
        "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    )
    rows = [{"prompt": [{"role": "user", "content": "3 +"}], "target": 6}]
    trainer = GRPO(model, teacher="self", teacher_prompt="{target} = {prompt}", tokenizer=tokenizer, **toy.options())
    with pytest.raises(ValueError, match=r"prompts\['marked'\]: prompts\[0\]: .*chat template refuses it: mode"):
        trainer.train({"plain": rows, "marked": TrainSource(rows, chat_template_kwargs={"mode": True})})


def test_a_run_with_the_policy_as_teacher_is_resumed(tmp_path: Any) -> None:
    def run(steps: int, folder: Any = None, **options: Any) -> Any:
        saved = {} if folder is None else {"output_dir": str(folder), "checkpoint_steps": 2}
        trainer = GRPO(toy.ToyLM(), toy.share_of_target, **toy.options(**{"max_steps": steps, **saved, **options}))
        trainer.train(toy.PROMPTS)
        return trainer

    options = {"teacher": "self", "teacher_prompt": hint_at_target}
    run(2, tmp_path / "run", **options)
    with pytest.raises(CheckpointError, match="teacher: not those of the run"):
        run(4, tmp_path / "run", teacher=make_teacher_model(), teacher_prompt=hint_at_target)
    with pytest.raises(CheckpointError, match="teacher_prompt"):
        run(4, tmp_path / "run", teacher="self", teacher_prompt=show_the_best_sibling)
    resumed, whole = run(4, tmp_path / "run", **options), run(4, **options)
    assert torch.equal(flatten_weights(resumed), flatten_weights(whole))


NAMED = [
    {"prompt": prompt, "subject": "math" if index % 2 else "code"} for index, prompt in enumerate(toy.PROMPTS.tolist())
]


@pytest.mark.parametrize(
    "options",
    [{}, {"teacher_in": "loss"}, {"micro_batch_tokens": 9}, {"teacher_prompt": hint_at_target}, {"mini_batches": 2}],
    ids=["advantage", "k2", "rows alone", "prompts of their own", "mini-batches"],
)
def test_each_row_has_the_teacher_that_it_names(options: dict[str, Any]) -> None:
    """The signal of each row is that of its teacher alone: two runs with one teacher each have the same values."""
    math, code = make_teacher_model(), toy.ToyLM(seed=7)
    given = toy.options(max_steps=1, group_size=2, prompts_per_step=len(NAMED), **options)
    subjects: list[str] = []

    def run(teacher: Any, **several: Any) -> dict[int, torch.Tensor]:
        trainer = GRPO(toy.ToyLM(), teacher=teacher, **{**given, **several})
        add, scored = trainer._step.fixed_tensors.add, {}

        def record(*arguments: Any) -> Any:
            filled = add(*arguments)
            for batch in (batch for batches in filled for batch in batches):
                assert batch.log_probs.is_teacher_top is not None
                scored.update(zip(batch.row_index.tolist(), batch.log_probs.teacher[:, :2], strict=True))
            subjects[:] = [group.group.prompt.columns["subject"] for group in arguments[1] for _ in range(2)]
            return filled

        object.__setattr__(trainer._step.fixed_tensors, "add", record)
        trainer.train(NAMED)
        return scored

    both = run({"math": math, "code": code}, teacher_column="subject")
    by_math, by_code = run(math), run(code)
    assert len(both) == 2 * len(NAMED)
    for row, values in both.items():
        of_math, of_code = by_math[row], by_code[row]
        assert not torch.allclose(of_math, of_code)
        torch.testing.assert_close(values, of_math if subjects[row] == "math" else of_code, rtol=1e-5, atol=1e-6)
    assert set(subjects) == {"math", "code"}


def test_a_run_file_has_a_table_of_teachers(tmp_path: Any) -> None:
    text = 'model = "a"\ntrain_data = "b.jsonl"\nteacher_column = "subject"\n[teacher]\nmath = "c"\ncode = "d"\n'
    (tmp_path / "run.toml").write_text(text)
    origin, config = read_run_file(tmp_path / "run.toml", {})
    assert origin.teacher == {"math": "c", "code": "d"}
    # As the run writes it into its folder.
    (tmp_path / "config.toml").write_text(config.to_toml(origin.model_dump(exclude_none=True)))
    assert read_run_file(tmp_path / "config.toml", {}) == (origin, config)


def test_a_run_with_several_teachers_is_resumed(tmp_path: Any) -> None:
    def run(steps: int, teachers: Any, folder: Any = None) -> Any:
        saved = {} if folder is None else {"output_dir": str(folder), "checkpoint_steps": 2}
        options = toy.options(max_steps=steps, teacher_column="subject", **saved)
        trainer = GRPO(toy.ToyLM(), teacher=teachers, **options)
        trainer.train(NAMED)
        return trainer

    teachers = {"math": make_teacher_model(), "code": toy.ToyLM(seed=7)}
    run(2, teachers, tmp_path / "run")
    with pytest.raises(CheckpointError, match="teacher: not those of the run"):
        run(4, {"code": teachers["math"], "math": teachers["code"]}, tmp_path / "run")
    resumed, whole = run(4, teachers, tmp_path / "run"), run(4, teachers)
    assert torch.equal(flatten_weights(resumed), flatten_weights(whole))


@pytest.mark.parametrize(
    ("given", "rows", "said"),
    [
        ({}, NAMED, r"teacher has several models \('math', 'code'\): set teacher_column to the column"),
        ({"teacher_column": "subject", "teacher": toy.ToyLM(seed=7)}, NAMED, "is read only with several teachers"),
        ({"teacher_column": "subject", "teacher": {}}, NAMED, "expected at least one teacher"),
        (
            {"teacher_column": "subject", "teacher": {"math": "self"}},
            NAMED,
            r"teacher\['math'\]='self': the policy can",
        ),
        ({"teacher_column": "subject", "teacher": {"math": 3}}, NAMED, r"teacher\['math'\] is int: expected a path"),
        (
            {"teacher_column": "subject", "teacher": {"math": toy.ToyLM()}},
            NAMED,
            r"teacher\['math'\] has the weights of",
        ),
        ({"teacher_column": "subject", **FULL}, NAMED, "teacher_kl='full' with several teachers was never tried"),
        ({"teacher_column": "kind"}, NAMED, r"prompts\[0\] has no column 'kind' \(teacher_column\) with the name"),
        (
            {"teacher_column": "subject"},
            [*NAMED, {"prompt": NAMED[0]["prompt"], "subject": "art"}],
            rf"prompts\[{len(NAMED)}\]: teacher_column='subject' holds 'art', and teacher has 'math', 'code'",
        ),
    ],
)
def test_teachers_that_do_not_fit_are_refused(given: dict[str, Any], rows: Any, said: str) -> None:
    teachers = {"math": make_teacher_model(), "code": toy.ToyLM(seed=7)}
    with pytest.raises((ConfigError, ValueError, TypeError), match=said):
        GRPO(toy.ToyLM(), **{"teacher": teachers, **toy.options(), **given}).train(rows)


def test_a_moving_average_teaches_and_is_resumed(tmp_path: Any) -> None:
    """After each step the teacher is 1/4 the policy and 3/4 itself; a resumed run has the same teacher."""

    def run(steps: int, folder: Any = None) -> Any:
        saved = {} if folder is None else {"output_dir": str(folder), "checkpoint_steps": 2}
        options = {"max_steps": steps, "teacher_prompt": hint_at_target, "teacher_mix": 0.25, **saved}
        trainer = GRPO(toy.ToyLM(), toy.share_of_target, teacher="ema", **toy.options(**options))
        trainer.train(toy.PROMPTS)
        return trainer, trainer._step.fixed_tensors.teacher.reference.state_dict()

    before = dict(toy.ToyLM().named_parameters())
    trainer, mixed = run(1)
    for name, parameter in trainer.model.named_parameters():
        expected = 0.25 * parameter.detach().double() + 0.75 * before[name].detach().double()
        torch.testing.assert_close(mixed[name].double(), expected, rtol=1e-6, atol=1e-7)
    run(2, tmp_path / "run")
    (resumed, resumed_teacher), (whole, whole_teacher) = run(4, tmp_path / "run"), run(4)
    assert torch.equal(flatten_weights(resumed), flatten_weights(whole))
    assert all(torch.equal(resumed_teacher[name], whole_teacher[name]) for name in whole_teacher)

"""A teacher in whole runs: the policy learns its distributions, and what does not fit is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ranked
import toy
import worded
from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError, NonFiniteError


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
    torch.testing.assert_close(weights(3), weights(0), rtol=0, atol=2e-6)


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
        ({"teacher": toy.ToyLM()}, "teacher has the weights of the policy"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError, TypeError), match=said):
        train(**options)


def test_another_vocabulary_is_refused(tmp_path: Any) -> None:
    folder = ranked.save_policy(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"its tokenizer has 62 tokens and the policy's 61; id 61 is 'extra' there"):
        GRPO(str(folder), teacher=other_vocabulary(tmp_path / "other"), **ranked.options(None, kl_coef=0.0))
    small = toy.ToyLM(seed=3)
    small.embedding = torch.nn.Embedding(8, 16)
    with pytest.raises(ConfigError, match="teacher has another vocabulary: 8 ids, and the policy samples 12"):
        train(teacher=small)


def test_the_model_itself_is_refused() -> None:
    model = toy.ToyLM()
    with pytest.raises(ConfigError, match="teacher is the model in training"):
        GRPO(model, teacher=model, **toy.options())


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

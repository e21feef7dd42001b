"""The adapters without their trainers: what they are called with, restated from the trainers' sources.

OpenRLHF 0.11.0 at 3c3be62 (openrlhf/utils/agent.py, openrlhf/trainer/ppo_utils/samples_generator.py), open-instruct at
e6c3044 (open_instruct/ground_truth_utils.py); verl itself is in tests/peers.
"""

from __future__ import annotations

import abc
import asyncio
import gc
import importlib.util
import inspect
import json
import math
import pickle
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.adapters import open_instruct, openrlhf, verl
from rlox_grpo.adapters.samples import fill_missing, read_columns, score_samples
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards import Composite, Countdown, GSM8KAnswer, Overlong, RewardError, TagFormat
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.rewards.workers import InWorkers, closing_workers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration" / "other_trainers.md"
RIGHT, WRONG = "<think>a</think><answer>(7 - 3) * 4</answer>", "<think>a</think><answer>7</answer>"
PROBLEM = {"nums": [3, 4, 7], "target": 16}


# --- all of them ---


def test_import_needs_no_trainer() -> None:
    program = """
import sys
from rlox_grpo.adapters import open_instruct, openrlhf, samples, verl
wanted = {"verl", "openrlhf", "open_instruct", "trl", "ray", "torch"}
print(sorted(wanted & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("peer", "call", "says"),
    [
        ("verl", verl.register, r"verl is not installed: pip install verl==0\.9\.1"),
        (
            "open_instruct",
            lambda: open_instruct.register(GSM8KAnswer(), "gsm8k"),
            "open-instruct is not installed: clone",
        ),
    ],
)
def test_without_the_trainer_the_error_says_how_to_get_it(
    peer: str, call: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == peer]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.partition(".")[0] == peer:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    with pytest.raises(ImportError, match=says):
        call()


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ("18", {"answer": "18"}),
        (18, {"answer": 18}),
        (PROBLEM, PROBLEM),
        (json.dumps(PROBLEM), PROBLEM),
        (" " + json.dumps(PROBLEM), PROBLEM),
        ("{1, 2}", {"answer": "{1, 2}"}),
        ("{", {"answer": "{"}),
        ("{" + '"a":{' * 100_000, {"answer": "{" + '"a":{' * 100_000}),
        ("[1, 2]", {"answer": "[1, 2]"}),
        ("", {"answer": ""}),
    ],
    ids=range(10),
)
def test_ground_truth_to_columns(truth: Any, expected: dict[str, Any]) -> None:
    assert read_columns(truth) == expected


def test_the_ground_truths_columns_come_before_others() -> None:
    extra = {"answer": "a worked solution", "split": "train"}
    assert read_columns("18", extra) == {"answer": "18", "split": "train"}
    assert extra["answer"] == "a worked solution"


def test_functions_and_rules_together() -> None:
    def length(completions: list[str], answer: list[str]) -> list[float | None]:
        return [None if text == "4" else float(len(text)) for text in completions]

    rows = [read_columns("4"), read_columns("5")]
    scores = score_samples([GSM8KAnswer(weight=2.0), length, GSM8KAnswer()], ["4", "5 5"], rows)
    assert list(scores.components) == ["gsm8k_answer", "length", "gsm8k_answer_2"]
    assert scores.total.tolist() == [3.0, 6.0]
    assert np.isnan(scores.components["length"]).tolist() == [True, False]
    assert scores.statuses == ["ok", "ok"]
    assert fill_missing(scores.components["length"], -1.0) == [-1.0, 3.0]


def test_the_worst_status_is_told() -> None:
    scores = score_samples([GSM8KAnswer(), TagFormat()], ["nothing", "4"], [read_columns("4")] * 2)
    assert scores.statuses == ["no_answer", "ok"]


def test_what_does_not_fit_is_named() -> None:
    rule = Countdown()
    with pytest.raises(ValueError, match="rows has 1 entries, expected 2"):
        score_samples([rule], ["a", "b"], [PROBLEM])
    with pytest.raises(
        ValueError, match=r"columns\['nums'\] is 'numbers', and a row has no such column; it has nums, target"
    ):
        score_samples([rule], ["a"], [PROBLEM], rename={"nums": "numbers"})

    def few(completions: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="few returned 1 scores for 2 completions"):
        score_samples([few], ["a", "b"], [PROBLEM] * 2)


# --- verl ---


def test_verl_scores_one_sample() -> None:
    result = verl.compute_score(
        data_source="countdown",
        solution_str=RIGHT,
        ground_truth={"numbers": np.array([3, 4, 7]), "target": np.int64(16)},
        extra_info={"index": 3, "num_turns": None, "rollout_reward_scores": {}},
        rule=[{"name": "tag_format", "weight": 0.5}, "countdown"],
        columns={"nums": "numbers"},
        reward_router_address="ignored",
    )
    assert result == {"score": 1.5, "acc": 1.0, "tag_format": 1.0, "countdown": 1.0, "status": "ok"}


def test_verl_scores_the_first_rule_as_acc() -> None:
    rules = ["countdown", {"name": "tag_format", "weight": 0.5}]
    result = verl.compute_score("countdown", WRONG, PROBLEM, rule=rules)
    assert (result["acc"], result["score"]) == (0.0, 0.5)


def test_verl_has_a_number_where_no_rule_applies() -> None:
    deep = "<answer>" + "(" * 300 + "1" + ")" * 300 + "</answer>"
    rule = {"name": "countdown", "undecided": None}
    result = verl.compute_score("x", deep, PROBLEM, rule=rule, not_applicable=-0.5)
    assert result == {"score": -0.5, "acc": -0.5, "countdown": -0.5, "status": "undecided"}


def test_verl_scores_a_batch_of_several_sources_in_place() -> None:
    results = verl.compute_scores(
        np.array(["openai/gsm8k", "mine", "openai/gsm8k", "mine"], dtype=object),
        ["#### 4", RIGHT, "#### 5", WRONG],
        ["4", PROBLEM, "4", PROBLEM],
        rules={"mine": "countdown"},
    )
    assert [result["score"] for result in results] == [1.0, 1.0, 0.0, 0.0]
    assert [list(result)[2] for result in results] == ["gsm8k_answer", "countdown"] * 2


def test_verl_refuses_what_it_cannot_score() -> None:
    with pytest.raises(ValueError, match=r"no rule for data_source 'mine': set .*; known are openai/gsm8k"):
        verl.compute_score("mine", "4", "4")
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.name is 'gsm8kk'.*gsm8k"):
        verl.compute_score("mine", "4", "4", rule="gsm8kk")
    with pytest.raises(ValueError, match="countdown: column 'nums' is missing; columns given: answer"):
        verl.compute_score("mine", "4", "4", rule="countdown")


def test_verl_advantages_by_hand() -> None:
    """Rows of two prompts in turns; group a has rewards 1, 3 (mean 2, sd √2), group b 0, 0, 6 (mean 2, sd √12)."""
    rewards = torch.tensor([[1.0, 0], [0, 0], [3, 0], [-1, 1], [2, 4]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 1]])
    index = np.array(["a", "b", "a", "b", "b"], dtype=object)
    advantages, returns = verl.compute_advantage(rewards, mask, index=index, epsilon=0.0)
    a, b = 1 / math.sqrt(2), 2 / math.sqrt(12)
    expected = torch.tensor([[-a, -a], [-b, 0], [a, a], [-b, -b], [0, 2 * b]])
    torch.testing.assert_close(advantages, expected)
    assert returns is advantages
    unscaled, _ = verl.compute_advantage(rewards, mask, config={"norm_adv_by_std_in_grpo": False}, index=index)
    assert unscaled[:, 1].tolist() == [-1.0, 0.0, 1.0, -2.0, 4.0]
    own, _ = verl.compute_advantage(rewards, mask, config={"rlox_grpo": {"scaling": "none"}}, index=index)
    assert torch.equal(own, unscaled)


def test_verl_advantages_need_an_index() -> None:
    rewards = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="index has none prompt ids, expected 2"):
        verl.compute_advantage(rewards, torch.ones(2, 3))
    with pytest.raises(ValueError, match="index has 1 prompt ids, expected 2"):
        verl.compute_advantage(rewards, torch.ones(2, 3), index=["a"])


def actor(**given: Any) -> Any:
    values = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, **given}
    return types.SimpleNamespace(
        **values, get=lambda name, default=None: values.get(name, default), global_batch_info={}
    )


def test_verl_loss_by_hand() -> None:
    """Ratios 2, 1/2, 4 and one outside the mask; A = 1, −1, −1.

    2 is clipped to 1.3: −1.3. 1/2 with A = −1 is clipped to 0.8: 0.8. 4 with A = −1 is 4, bounded by 3: 3.
    """
    ratios = torch.tensor([[2.0, 0.5], [4.0, 9.0]])
    loss, metrics = verl.compute_policy_loss(
        old_log_prob=torch.zeros(2, 2),
        log_prob=ratios.log(),
        advantages=torch.tensor([[1.0, -1.0], [-1.0, 1.0]]),
        response_mask=torch.tensor([[1, 1], [1, 0]]),
        config=actor(),
    )
    assert loss.item() == pytest.approx((-1.3 + 0.8 + 3.0) / 3, rel=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(4) / 3, rel=1e-6)
    assert metrics["actor/ratio_mean"] == pytest.approx(6.5 / 3, rel=1e-6)


def test_verl_loss_is_the_formula_of_vanilla() -> None:
    """Value, gradient and metrics on random tensors against verl's own lines, in float64."""
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.randn(3, 16, 9, generator=generator, dtype=torch.float64).unbind()
    new = (old + noise).requires_grad_()
    mask = torch.ones(16, 9)
    ratio = (new - old).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.3)
    both, bound = torch.maximum(unclipped, clipped), -advantages * 3.0
    expected = torch.where(advantages < 0, torch.minimum(bound, both), both)
    (their_gradient,) = torch.autograd.grad(expected.mean(), new, retain_graph=True)
    loss, metrics = verl.compute_policy_loss(old, new, advantages, mask, config=actor())
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(loss, expected.mean(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=1e-14)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float((clipped > unclipped).double().mean()))
    lower = (both > bound) & (advantages < 0)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(float(lower.double().mean()))
    assert 0 < metrics["actor/pg_clipfrac_lower"] < metrics["actor/pg_clipfrac"]


def test_verl_loss_refuses() -> None:
    tensors = [torch.zeros(1, 2)] * 4
    with pytest.raises(ValueError, match="config is None"):
        verl.compute_policy_loss(*tensors)
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean', expected token-mean"):
        verl.compute_policy_loss(*tensors, loss_agg_mode="mean", config=actor())
    config = actor()
    config.global_batch_info = {"dp_size": 2, "batch_num_tokens": 5}
    with pytest.raises(ValueError, match="dp_size is 2, and .* lacks the denominator of seq-mean-token-sum"):
        verl.compute_policy_loss(*tensors, loss_agg_mode="seq-mean-token-sum", config=config)


# --- every adapter ---


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_a_percent_sign_may_be_added_unless_the_table_says_exact(name: str) -> None:
    strict = {"name": name, "percent": "exact"}
    for rule, score in ((name, 1.0), (strict, 0.0)):
        assert verl.compute_score("x", "#### 25%", "25", rule=rule)["score"] == score
        table = [{"name": rule}] if isinstance(rule, str) else [rule]
        rules = make_rewards(table)  # as a run file and the command line make them
        assert openrlhf.reward_function(rules)(["p#### 25%"], ["p"], ["25"])["rewards"].tolist() == [score]
        assert rules[0](prompts=["p"], completions=["#### 25%"], answer=["25"], trainer_state=None) == [score]  # TRL


# --- OpenRLHF ---


def as_openrlhf_does(reward_func: Any, query: str, prompt: str, label: str) -> dict[str, Any]:
    """One sample: by position, in a thread, in lists of one; what it then makes of the result."""

    async def call() -> Any:
        return await asyncio.to_thread(reward_func, [query], [prompt], [label])

    info = asyncio.run(call())
    score = info.get("scores")
    score = info.get("rewards") if score is None else score
    extra = info.get("extra_logs") or {}
    logs = {
        key: value.flatten()[0].item() if isinstance(value, torch.Tensor) else value for key, value in extra.items()
    }
    return {
        "rewards": torch.tensor([info.get("rewards")]),
        "filter": torch.tensor([score])[0].item(),
        "info": {key: torch.tensor([value]) for key, value in logs.items()},
    }


def from_page(section: str, tmp_path: Path) -> Any:
    """The page's file, loaded from its path as OpenRLHF loads it."""
    text = PAGE.read_text(encoding="utf-8")
    block = re.search(rf"^## {section}\n.*?```python\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert block
    path = tmp_path / "reward.py"
    path.write_text(block[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def test_the_pages_file_scores_inside_openrlhfs_call(tmp_path: Path) -> None:
    reward_func = from_page("OpenRLHF", tmp_path)
    prompt = "<|im_start|>user\nEnd with #### 18.<|im_end|>\n<|im_start|>assistant\n"
    response = "<think>9 + 9</think><answer>18</answer><|im_end|>\n"
    seen = as_openrlhf_does(reward_func, prompt + response, prompt, "18")
    assert seen["rewards"].tolist() == pytest.approx([1.1])
    assert seen["filter"] == 1.0
    assert {name: value.item() for name, value in seen["info"].items()} == {"gsm8k_answer": 1.0, "tag_format": 1.0}
    wrong = as_openrlhf_does(reward_func, prompt + "<think>9</think><answer>17</answer>", prompt, "18")
    assert wrong["rewards"].tolist() == pytest.approx([0.1])
    assert wrong["filter"] == 0.0
    said_nothing = as_openrlhf_does(reward_func, prompt + "well<|im_end|>", prompt, "18")
    assert said_nothing["rewards"].item() == 0.0, "what the prompt says is not what the model says"


def test_openrlhf_batch_and_labels_of_columns() -> None:
    reward_func = openrlhf.reward_function(Countdown())
    label = json.dumps(PROBLEM)
    scores = reward_func(["p" + RIGHT, "p" + WRONG], ["p", "p"], [label, label], extra=1)
    assert scores["rewards"].dtype == torch.float32
    assert scores["rewards"].tolist() == scores["scores"].tolist() == [1.0, 0.0]
    assert pickle.loads(pickle.dumps(reward_func)) == reward_func  # noqa: S301  our own


PROMPT = "A prompt that is somewhat long, with words in it:"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (PROMPT + " yes</s>", " yes"),
        ("<s>" + PROMPT + "yes", "yes"),
        (PROMPT + "yes<|im_end|>\n<|endoftext|>\n", "yes"),
        (PROMPT + "a </s> b", "a </s> b"),
        (PROMPT + PROMPT + "again", PROMPT + "again"),
        (PROMPT[12:] + "yes", "yes"),
        (PROMPT[-16:] + "yes", "yes"),
        (PROMPT, ""),
    ],
    ids=range(8),
)
def test_openrlhf_response_of_a_query(query: str, expected: str) -> None:
    assert openrlhf.extract_completion(query, PROMPT) == expected


@pytest.mark.parametrize("query", ["yes", "", PROMPT[-15:] + "yes", "it:yes"])
def test_openrlhf_refuses_a_query_without_its_prompt(query: str) -> None:
    with pytest.raises(ValueError, match="the query does not begin with its prompt"):
        openrlhf.extract_completion(query, PROMPT)


def test_openrlhf_refuses_no_rule() -> None:
    with pytest.raises(ValueError, match=r"rules is \[\], expected a reward function or several"):
        openrlhf.reward_function([])


# --- open-instruct ---


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """open-instruct's base class and how it finds and calls verifiers, restated."""

    class Config:
        @classmethod
        def from_args(cls, *sources: Any) -> Any:
            return cls()

    class VerifierFunction(abc.ABC):
        def __init__(self, name: str, weight: float = 1.0, verifier_config: Any = None) -> None:
            self.name, self.weight, self.verifier_config = name, weight, verifier_config

        @classmethod
        def get_config_class(cls) -> type:
            return Config

        @abc.abstractmethod
        def __call__(
            self,
            tokenized_prediction: list[int],
            prediction: str,
            label: Any,
            query: str | None = None,
            rollout_state: dict[str, Any] | None = None,
        ) -> Any: ...

        async def async_call(
            self,
            tokenized_prediction: list[int],
            prediction: str,
            label: Any,
            query: str | None = None,
            rollout_state: dict[str, Any] | None = None,
        ) -> Any:
            loop = asyncio.get_event_loop()
            return await loop.run_in_executor(
                None, lambda: self(tokenized_prediction, prediction, label, query, rollout_state)
            )

    class Theirs(VerifierFunction):
        def __init__(self, verifier_config: Any = None) -> None:
            super().__init__("gsm8k", verifier_config=verifier_config)

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("ours should be called")

    module = types.ModuleType("open_instruct.ground_truth_utils")
    module.VerifierFunction, module.Theirs = VerifierFunction, Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "open_instruct", types.ModuleType("open_instruct"))
    monkeypatch.setitem(sys.modules, "open_instruct.ground_truth_utils", module)
    monkeypatch.setattr(open_instruct, "_REGISTERED", [])
    return module


def found(peer: Any) -> dict[str, Any]:
    verifiers = {}
    for subclass in peer.VerifierFunction.__subclasses__():
        instance = subclass(subclass.get_config_class().from_args(object(), None))
        verifiers[instance.name.lower()] = instance
    return verifiers


def rewarded(verifiers: dict[str, Any], samples: list[tuple[list[int], str, Any, str]]) -> list[float]:
    async def every() -> list[Any]:
        return await asyncio.gather(
            *(
                verifiers[dataset.lower()].async_call(
                    tokenized_prediction=ids, prediction=text, label=label, query="q", rollout_state=None
                )
                for ids, text, label, dataset in samples
            )
        )

    results = asyncio.run(every())
    return [
        result.score * verifiers[dataset.lower()].weight for result, (*_, dataset) in zip(results, samples, strict=True)
    ]


def test_open_instruct_finds_and_calls_registered_rules(peer: Any) -> None:
    open_instruct.register(GSM8KAnswer(), "gsm8k")
    open_instruct.register(Composite((Countdown(), TagFormat(weight=0.5))), "Countdown", weight=2.0)
    open_instruct.register(Overlong(max_length=4, buffer=2), "short")
    gc.collect()  # __subclasses__() holds its classes weakly
    verifiers = found(peer)
    assert set(verifiers) == {"gsm8k", "countdown", "short"}
    samples = [
        ([1], "#### 1,018", "1018", "gsm8k"),
        ([1], "#### 17", "1018", "GSM8K"),
        ([1], RIGHT, json.dumps(PROBLEM), "countdown"),
        ([1], WRONG, PROBLEM, "countdown"),
        ([1, 2, 3], "", "", "short"),
    ]
    assert rewarded(verifiers, samples) == [1.0, 0.0, 3.0, 1.0, -0.5]


def test_open_instruct_by_shape() -> None:
    ours = open_instruct.verifier(GSM8KAnswer(), "gsm8k", weight=0.5)
    assert (ours.name, ours.weight) == ("gsm8k", 0.5)
    expected = ["tokenized_prediction", "prediction", "label", "query", "rollout_state"]
    for method in (ours.__call__, ours.async_call):
        parameters = inspect.signature(method).parameters
        assert list(parameters) == expected
        assert [parameters[name].default for name in expected[3:]] == [None, None]
    result = ours([1], "no number", "4")
    assert (result.score, result.cost, result.reasoning) == (0.0, 0.0, "no_answer")
    assert ours([1], "4", "4") == open_instruct.VerificationResult(1.0)
    assert rewarded({"gsm8k": ours}, [([1], "4", "4", "gsm8k")]) == [0.5]
    assert pickle.loads(pickle.dumps(ours)) == ours  # noqa: S301  our own


def test_a_sample_that_failed_has_no_score_from_the_other_rules() -> None:
    """The adapters give it ``not_applicable``, as other trainers have no missing reward."""

    def slow(completions: list[str], **_: Any) -> list[float]:
        if completions[0] == WRONG:
            time.sleep(60)
        return [5.0]

    function = InWorkers(slow, timeout=0.5, workers=1)
    with closing_workers([function]):
        scores = score_samples((function, TagFormat()), [RIGHT, WRONG], [{}, {}])
    np.testing.assert_array_equal(scores.total, [6.0, np.nan])
    assert np.isnan(scores.components["tag_format"][1])
    assert fill_missing(scores.total, 0.0) == [6.0, 0.0]

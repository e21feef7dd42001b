"""Rules inside TRL's own trainer: real runs of a tiny model, and the lines of docs/migration/other_trainers.md."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_judge import fake_judge
from rlox_grpo.config.foreign_names import read_foreign_names
from rlox_grpo.config.records import EpisodeConfig
from rlox_grpo.rewards import Countdown, ExactAnswer, GSM8KAnswer, Judge, Overlong, Repetition, TagFormat
from rlox_grpo.rollout.episodes.play import play_episode

pytest.importorskip("trl", reason="TRL 1.16 needs Python 3.11")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration" / "other_trainers.md"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


@pytest.fixture
def tiny(make_tiny_model: Any, byte_tokenizer: Any) -> dict[str, Any]:
    """A byte model and its tokenizer, as the arguments of a trainer."""
    tokenizer = copy.deepcopy(byte_tokenizer)  # the fixture is shared with other files
    tokenizer.chat_template = TEMPLATE
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1, max_position_embeddings=512)
    return {"model": model, "processing_class": tokenizer}


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """GRPOConfig of a run of two short steps, four completions of each of two prompts."""

    def make(**options: Any) -> GRPOConfig:
        defaults = {
            "output_dir": str(tmp_path),
            "max_steps": 2,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        return GRPOConfig(**{**defaults, **options})

    return make


def steps(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "reward" in row]


def problems(chat: bool) -> Dataset:
    """Three prompts; each row's numbers are its own."""
    rows = []
    for row in range(3):
        text = f"Make {row + 10} from {row}, {row + 10}."
        prompt = [{"role": "user", "content": text}] if chat else text
        rows.append({"prompt": prompt, "nums": [row, row + 10], "target": row + 10, "answer": str(row), "id": row})
    return Dataset.from_list(rows)


class Spy:
    """A reward of ours and what it was called with."""

    def __init__(self, rule: Any) -> None:
        self.rule, self.calls, self.__name__ = rule, [], rule.__name__

    def __call__(self, **given: Any) -> list[float | None]:
        scores = self.rule(**given)
        self.calls.append({**given, "scores": scores})
        return scores


@pytest.mark.parametrize("chat", [False, True], ids=["standard", "conversational"])
def test_every_rule_runs_inside_trl(tiny: dict[str, Any], arguments: Any, chat: bool) -> None:
    rules = [
        Countdown(),
        GSM8KAnswer(),
        ExactAnswer(),
        TagFormat("think", "answer"),
        Repetition(unit="tokens"),
        Overlong(max_length=8, buffer=6),
    ]
    spies = [Spy(rule) for rule in rules]
    weights = [1.0, 0.5, 0.25, 0.1, 0.3, 2.0]
    before = [parameter.detach().clone() for parameter in tiny["model"].parameters()]
    trainer = GRPOTrainer(
        **tiny, reward_funcs=spies, args=arguments(reward_weights=weights), train_dataset=problems(chat)
    )
    assert trainer.args.remove_unused_columns is False, "TRL's default: every column reaches the rules"
    trainer.train()
    assert len(steps(trainer)) == 2
    for step, logged in enumerate(steps(trainer)):
        means = []
        for spy in spies:
            call = spy.calls[step]
            assert [set(group) for group in zip(*[iter(call["id"])] * 4, strict=True)] == [
                {call["id"][0]},
                {call["id"][4]},
            ], "each row is repeated for its completions, prompt by prompt"
            assert call["nums"] == [[row, row + 10] for row in call["id"]]
            assert len(call["completion_ids"]) == len(call["completions"]) == 8
            assert all(isinstance(completion, list if chat else str) for completion in call["completions"])
            scores = call["scores"]
            means.append(sum(scores) / 8)
            assert logged[f"rewards/{spy.__name__}/mean"] == pytest.approx(means[-1], abs=1e-6)
        assert logged["reward"] == pytest.approx(
            sum(weight * mean for weight, mean in zip(weights, means, strict=True)), abs=1e-6
        )
    lengths = [len(ids) for ids in spies[-1].calls[0]["completion_ids"]]
    assert spies[-1].calls[0]["scores"] == [-max(0, length - 2) / 6 for length in lengths]
    after = list(tiny["model"].parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_right_answer_is_rewarded_inside_trl(tiny: dict[str, Any], arguments: Any) -> None:
    """The model writes nothing that scores, so the completions are replaced where TRL hands them to the rules."""
    said = ["<answer>{0} + {1}</answer>", "<answer>{1} - {0}</answer>", "<answer>{1}</answer>", ""]

    class Told(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            told = [said[place % 4].format(*row["nums"]) for place, row in enumerate(inputs)]
            self.seen = super()._calculate_rewards(inputs, prompts, told, completion_ids_list)
            return self.seen

    data = Dataset.from_list([{"prompt": f"{a} {b}", "nums": [a, b], "target": a + b} for a, b in [(1, 2), (3, 5)]])
    trainer = Told(**tiny, reward_funcs=Countdown(), args=arguments(max_steps=1), train_dataset=data)
    trainer.train()
    assert trainer.seen[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0] * 2
    (logged,) = steps(trainer)
    assert logged["rewards/countdown/mean"] == 0.25
    assert logged["frac_reward_zero_std"] == 0


def test_none_is_left_out(tiny: dict[str, Any], arguments: Any) -> None:
    """A rule that says None for some rows: TRL averages the others, and the row's other rules count."""

    class Even:
        """Applies to rows of an even id only."""

        __name__ = "even"

        def __call__(self, completions: Any, id: Any, **_: Any) -> list[float | None]:
            scores = Overlong(max_length=8, buffer=8)(completions=completions, **_)
            return [score if row % 2 == 0 else None for score, row in zip(scores, id, strict=True)]

    even, plain = Spy(Even()), Spy(TagFormat())
    trainer = GRPOTrainer(
        **tiny,
        reward_funcs=[even, plain],
        args=arguments(max_steps=1, per_device_train_batch_size=12),
        train_dataset=problems(False),
    )
    trainer.train()
    scores = even.calls[0]["scores"]
    given = [score for score in scores if score is not None]
    assert scores.count(None) == 4
    (logged,) = steps(trainer)
    assert logged["rewards/even/mean"] == pytest.approx(sum(given) / 8)
    assert logged["reward"] == pytest.approx(sum(given) / 12)


def test_undecided_as_none_reaches_trl_as_nan(tiny: dict[str, Any], arguments: Any) -> None:
    deep = "<answer>" + "(" * 300 + "1" + ")" * 300 + "</answer>"

    class Deep(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            told = [deep, *completions[1:]]
            self.seen = super()._calculate_rewards(inputs, prompts, told, completion_ids_list)
            return self.seen

    rules = [Countdown(undecided=None), TagFormat()]
    trainer = Deep(**tiny, reward_funcs=rules, args=arguments(max_steps=1), train_dataset=problems(False))
    trainer.train()
    assert trainer.seen[:, 0].isnan().tolist() == [True] + [False] * 7
    assert not math.isnan(steps(trainer)[0]["rewards/countdown/mean"])


@pytest.mark.parametrize("chat", [False, True], ids=["standard", "conversational"])
def test_a_judge_runs_inside_trl(tiny: dict[str, Any], arguments: Any, tmp_path: Path, chat: bool) -> None:
    """TRL awaits it; what has no verdict is no 0, and a copy with the same cache asks nothing."""

    def score(data: dict[str, Any]) -> float | None:
        share = sum(map(ord, data["completion"])) % 5 / 4
        return None if share == 1 else share

    def answer(data: dict[str, Any], _: int) -> str:
        assert isinstance(data["prompt"], str)
        return "?" if (value := score(data)) is None else f'Because. {{"score": {value}}}'

    class Watched(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            self.texts = [each[0]["content"] if chat else each for each in completions]
            self.batch = {"prompts": prompts, "completions": completions, "answer": [row["answer"] for row in inputs]}
            self.seen = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return self.seen

    with fake_judge(answer) as server:
        judge = Judge(server.url, "judge-1", "Is it short?", columns=["answer"], retries=0, cache=tmp_path / "judge")
        trainer = Watched(
            **tiny, reward_funcs=[judge, TagFormat()], args=arguments(max_steps=1), train_dataset=problems(chat)
        )
        trainer.train()
        asked = len(server.questions)
        assert 1 < asked == len({*server.questions}) <= 8
        wanted = [score({"completion": text}) for text in trainer.texts]
        assert None in wanted
        assert [None if math.isnan(value) else value for value in trainer.seen[:, 0].tolist()] == wanted
        (logged,) = steps(trainer)
        given = [value for value in wanted if value is not None]
        assert logged["rewards/judge/mean"] == pytest.approx(sum(given) / len(given))
        other = pickle.loads(pickle.dumps(judge))  # noqa: S301  our own
        assert asyncio.run(other(**trainer.batch)) == wanted
        assert len(server.questions) == asked


def test_a_missing_column_stops_the_run_and_is_named(tiny: dict[str, Any], arguments: Any) -> None:
    data = problems(False).remove_columns("target")
    trainer = GRPOTrainer(**tiny, reward_funcs=Countdown(), args=arguments(), train_dataset=data)
    with pytest.raises(ValueError, match="countdown: column 'target' is missing; columns given: .*nums"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12: any fork
def test_loader_processes_and_pickles(tiny: dict[str, Any], arguments: Any) -> None:
    """With worker processes of the data loader; and a rule travels by pickle, as TRL's async trainer sends it."""
    rule = pickle.loads(pickle.dumps(TagFormat("think", "answer", weight=0.5)))  # noqa: S301  our own
    assert rule == TagFormat("think", "answer", weight=0.5)
    trainer = GRPOTrainer(
        **tiny, reward_funcs=[rule], args=arguments(dataloader_num_workers=1), train_dataset=problems(False)
    )
    trainer.train()
    assert [logged["rewards/tag_format/mean"] for logged in steps(trainer)] == [0.0, 0.0]


# --- the page ---


def blocks(section: str) -> list[str]:
    """The section's ```python blocks that run here; one that begins with `# sketch` does not."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/migration/other_trainers.md has no section {section}"
    code = [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", found[1], re.DOTALL)]
    return [block for block in code if not block.startswith("# sketch")]


def test_the_pages_lines_run(tiny: dict[str, Any], arguments: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Only what costs time is put in its place: the model, the length of the run, where it writes."""
    import datasets
    import trl

    monkeypatch.chdir(tmp_path)
    short = {
        name: value for name, value in arguments().to_dict().items() if name in ("max_completion_length", "use_cpu")
    }
    quick = {"max_steps": 1, "report_to": "none", "save_strategy": "no", "bf16": False, "disable_tqdm": True}

    def config(**options: Any) -> GRPOConfig:
        return GRPOConfig(**{**options, **short, **quick, "output_dir": str(tmp_path)})

    class Trainer(GRPOTrainer):
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__(**{**options, **tiny})

    rows = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a, b in [(1, 2), (3, 5), (4, 4)]]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Dataset.from_list(rows))
    monkeypatch.setattr(trl, "GRPOConfig", config)
    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)
    first, second = blocks("TRL")
    scope: dict[str, Any] = {}
    exec(first, scope)  # noqa: S102  our own page
    (logged,) = steps(scope["trainer"])
    assert "rewards/gsm8k_answer/mean" in logged
    assert "rewards/tag_format/mean" in logged
    exec(second, scope)  # noqa: S102
    ours = scope["OurAdvantages"]
    for options, same in [({}, True), ({"baseline": "leave_one_out", "scaling": "none"}, False)]:
        seen = advantages_of(ours, options, tiny, arguments)
        theirs = seen["theirs"]
        # float32 statistics of four numbers against float64 ones.
        assert torch.allclose(seen["ours"], theirs, atol=1e-5) == same
        assert theirs.abs().max() > 0.1


def advantages_of(ours: Any, options: dict[str, Any], tiny: dict[str, Any], arguments: Any) -> dict[str, torch.Tensor]:
    """What the page's class puts in the place of TRL's advantages, and TRL's."""
    seen: dict[str, torch.Tensor] = {}

    class Watched(ours):  # type: ignore[misc]
        advantage_options = options

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            seen["ours"], seen["theirs"] = output["advantages"], torch.tensor(list(self._logs["advantages"])[-8:])
            return output

    def length(completion_ids: Any, **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    trainer = Watched(None, reward_funcs=[length], args=arguments(max_steps=1), train_dataset=problems(False))
    trainer.train()
    return seen


def test_the_bring_up_of_a_gpu_machine_times_a_step_of_trl(monkeypatch):
    """On the CPU, as TRL does not run on the simulated device (`make gpu`)."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds to it
    from parts import Place, _time_trl

    row = _time_trl(Place("cpu"), "tiny", rows=4, prompt=16, new=8)
    assert row["what"].startswith("TRL, a whole step")
    assert row["seconds"] > 0


def test_the_run_on_the_migration_page(tiny: dict[str, Any], arguments: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """TRL's side of docs/migration/from_trl.md; tests/unit/test_readme.py runs ours."""
    import trl

    monkeypatch.chdir(tmp_path)
    short = {
        name: value
        for name, value in arguments().to_dict().items()
        if name in ("max_completion_length", "use_cpu", "save_strategy", "disable_tqdm", "gradient_checkpointing")
    }
    theirs: dict[str, Any] = {}

    def config(**options: Any) -> GRPOConfig:
        theirs.update(options)
        return GRPOConfig(**{**options, **short, "bf16": False, "max_steps": 1, "output_dir": str(tmp_path)})

    for part in tiny.values():  # beta above 0: TRL loads the reference from the model's folder
        part.save_pretrained(tmp_path / "tiny")

    class Trainer(GRPOTrainer):
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__(str(tmp_path / "tiny"), **options)

    monkeypatch.setattr(trl, "GRPOConfig", config)
    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)
    page = (PAGE.parent / "from_trl.md").read_text(encoding="utf-8")
    code, ours = re.findall(r"```python title=[^\n]*\n(.*?)```", page, re.DOTALL)
    assert code.startswith("# trl\n")
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102  our own page
    assert len(steps(scope["trainer"])) == 1
    assert (tmp_path / "out_trl" / "config.json").exists()
    for name in ("learning_rate", "num_generations", "max_completion_length", "beta", "num_iterations", "max_steps"):
        option = read_foreign_names().trl.get(name, name)
        assert f"{option}={theirs[name]}" in ours.replace("1e-5", "1e-05"), name  # both sides ask for the same
    assert theirs["per_device_train_batch_size"] == 8 * 4


def test_the_environment_of_the_guide_is_played_by_trl_and_here(
    tiny: dict[str, Any], arguments: Any, make_tiny_model: Any, monkeypatch: Any
) -> None:
    """Four replies of three more each; the model writes no calls, so they are replaced where TRL reads them."""
    import trl
    from trl.trainer import grpo_trainer

    page = (PAGE.parents[1] / "guides" / "other_environments.md").read_text(encoding="utf-8")
    code = page.split("\n## TRL\n")[1].split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code[code.index("class ") : code.index("trainer = ")], scope)  # noqa: S102  our own page
    reach_ten = scope["ReachTen"]
    call = {"name": "add", "arguments": {"amount": 3}}
    outcome = play_episode(
        reach_ten, {"start": 1}, iter([json.dumps(call)] * 3 + ["done"]).__next__, (said := []).append,
        config=EpisodeConfig.create(max_turns=4, call_format="json"),
    )  # fmt: skip
    shown = [line for line in said if "The total is" in line]
    assert [re.findall(r"total is (\d+)", line) for line in shown] == [["1"], ["4"], ["7"], ["10"]]
    assert outcome.reward == 1.0

    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(grpo_trainer, "parse_response", lambda *_, **__: copy.deepcopy(answer))
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tiny["processing_class"].chat_template = template.read_text(encoding="utf-8")
    tiny["model"] = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1, max_position_embeddings=4096)
    rows = [{"prompt": [{"role": "user", "content": "Play. "}], "start": 1}] * 2
    trainer = GRPOTrainer(
        **tiny, environment_factory=reach_ten, train_dataset=Dataset.from_list(rows),
        args=arguments(
            max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=1024,
            max_tool_calling_iterations=3, generation_kwargs={"max_new_tokens": 4},
        ),
    )  # fmt: skip
    trainer.train()
    (logged,) = steps(trainer)
    assert logged["reward"] == 1.0
    assert {environment.total for environment in trainer.environments} == {10}

"""Episodes with pictures through GRPO: the update against each row forwarded whole with its pixels.

An environment and a tool return pictures in later turns. Weights are float32; the reference is float64.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlox_grpo import GRPO
from rlox_grpo.environments import ToolCall
from rlox_grpo.types import Batch, Picture
from tiny_vlms import draw_picture, make_tiny_vlm

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = 2e-5  # float32 against float64
IMAGE, EXCLUDED = 5, (5, 6)
OPTIONS = {
    **{"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 5, "max_turns": 3, "log_to": (), "max_steps": 1},
    **{"learning_rate": 0.05, "adam_epsilon": 1.0, "max_grad_norm": 0.0, "seed": 3, "loss_aggregation": "token_mean"},
}
ROWS = [
    {"prompt": "look", "images": [draw_picture(0)], "later": 2},
    {"prompt": "look", "images": [draw_picture(1)], "later": 3},
    {"prompt": "text", "images": [], "later": 2},
]


def part(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def pay(text: str) -> float:
    return float(sum(text.encode()) % 11)


async def look_twice(row: Any, chat: Any) -> float:
    """A picture in the second turn, and text in the third; the first prompt may have one."""
    await chat.turn(row["prompt"])
    await chat.turn([{"role": "user", "content": [{"type": "text", "text": "now "}, part(draw_picture(row["later"]))]}])
    reply = await chat.turn("and?")
    return pay(reply.text) + chat.seed % 7


def make_trainer(
    folder: Path, environment: Any = look_twice, family: str = "qwen3_vl", forgets: bool = False, **changes: Any
) -> GRPO:
    model, processor = make_tiny_vlm(family)
    if forgets:
        template = processor.tokenizer.chat_template
        processor.chat_template = template.replace(
            "{{ m['content'] }}", "{{ '~' if m['role'] == 'assistant' and not loop.last }}{{ m['content'] }}"
        )
    options = {**OPTIONS, "output_dir": str(folder), **changes}
    return GRPO(model.float(), processor=processor, environment=environment, **options)


def make_batches(trainer: GRPO, scored: Any) -> list[Batch]:
    step = trainer._step
    return [b for part in step.batcher.make_mini_batches(*step.compute_advantages(scored, 0, 1), 0) for b in part]


def run_row(model: Any, ids: Tensor, pictures: tuple[Picture, ...]) -> Tensor:
    """Log-probs of all tokens but the first, ``[L − 1]``, of one row forwarded alone with its pixels."""
    tensors = [picture.read() for picture in pictures]
    inputs = {name: torch.cat([each[name] for each in tensors]) for name in (tensors[0] if tensors else ())}
    if tensors:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()[None]
    logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
    model.base_model.rope_deltas = None
    logits = logits.index_fill(-1, torch.tensor(EXCLUDED), -torch.inf)
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]


def play(folder: Path, rows: Any, environment: Any = look_twice, **changes: Any) -> tuple[GRPO, Any, list[Batch]]:
    """The trainer, the scored groups of a step, and its batches."""
    trainer = make_trainer(folder, environment, zero_variance="keep", kl_coef=0.0, **changes)
    scored = trainer.evaluate_sets(rows, samples=2)[""][1]
    return trainer, scored, make_batches(trainer, scored)


def list_lines(batches: list[Batch]) -> list[tuple[Batch, int, Tensor]]:
    """Each row of the batches with its token ids."""
    return [
        (batch, line, batch.input_ids[line, : int(batch.attention_mask[line].sum())])
        for batch in batches
        for line in range(len(batch.input_ids))
    ]


def score_rows(model: Any, batches: list[Batch], *, swaps: bool = False) -> float:
    """The largest gap between the sampled log-probs and those of each row alone; ``swaps`` shows the last picture of
    a row as all of its pictures."""
    gap = 0.0
    for batch, line, ids in list_lines(batches):
        pictures = batch.pictures[line]
        if swaps and pictures:
            pictures = (pictures[-1],) * (len(pictures) - 1) + (pictures[0],)
        with torch.no_grad():
            log_probs = run_row(model, ids, pictures)[int(batch.prompt_lengths[line]) - 1 :]
        mask = batch.loss_mask[line, : len(log_probs)]
        gap = max(gap, float((log_probs[mask] - batch.log_probs.sampling[line, : len(log_probs)][mask]).abs().max()))
    return gap


def reference_gradient(model: Any, batches: list[Batch], coef: float = 0.0) -> dict[str, Tensor]:
    """The gradient of the loss at ratio 1, row by row: −advantage × log-prob over all loss tokens, and the mean over
    rows of the mean over the environment's tokens."""
    model = copy.deepcopy(model).double()
    loss: Any = 0.0
    tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    lines = list_lines(batches)
    for batch, line, ids in lines:
        log_probs = run_row(model, ids, batch.pictures[line])[int(batch.prompt_lengths[line]) - 1 :]
        mask = batch.loss_mask[line, : len(log_probs)]
        loss = loss - float(batch.advantages[line]) * log_probs[mask].sum() / tokens
        if batch.environment is not None:
            shown = batch.environment.mask[line, : len(log_probs)]
            loss = loss - coef * log_probs[shown].mean() / len(lines)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def measured_gradient(trainer: GRPO, batches: list[Batch]) -> dict[str, Tensor]:
    trainer.model.zero_grad()
    for batch in batches:
        log_probs, entropy = trainer._step.fixed_tensors.forward(batch)
        trainer._step._compute_loss(log_probs, batch, entropy=entropy).loss.backward()
    return {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference relative to the largest entry of all."""
    assert found.keys() >= {name for name, grad in wanted.items() if grad.abs().max() > 0}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((found[name].double() - wanted[name]).abs().max()) for name in found if name in wanted) / largest


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_the_update_sees_every_picture(tmp_path: Path, family: str) -> None:
    """Sampled log-probs and the gradient are those of each row alone; with swapped pictures they are not."""
    trainer, scored, batches = play(tmp_path, ROWS, family=family)
    completions = [completion for group in scored for completion in group.group.completions]
    assert [len(completion.pictures or ()) for completion in completions] == [2, 2, 2, 2, 1, 1]
    model = copy.deepcopy(trainer.model).double()
    assert score_rows(model, batches) < CLOSE
    assert score_rows(model, batches, swaps=True) > 100 * CLOSE
    wanted = reference_gradient(trainer.model, batches)
    assert compare(measured_gradient(trainer, batches), wanted) < CLOSE
    swapped = [batch_with_swapped_pictures(batch) for batch in batches]
    assert compare(measured_gradient(trainer, swapped), wanted) > 100 * CLOSE


def batch_with_swapped_pictures(batch: Batch) -> Batch:
    return replace(batch, pictures=tuple(tuple(reversed(pictures)) for pictures in batch.pictures))


async def look_at(row: Any, chat: Any) -> float:
    """The picture of an episode depends on the episode: the first two turns have equal ids in all of them."""
    picture = draw_picture(int(chat.seed % 97))
    reply = await chat.turn([{"role": "user", "content": [part(picture), {"type": "text", "text": "look"}]}])
    return pay(reply.text)


def test_equal_ids_of_other_pictures_are_apart(tmp_path: Path) -> None:
    """First prompts of a group with equal token ids and other pictures: each row keeps its own."""
    trainer, scored, batches = play(tmp_path, [{"prompt": "x"}], look_at)
    first, second = scored[0].group.completions
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    assert first.pictures[0].digest != second.pictures[0].digest
    model = copy.deepcopy(trainer.model).double()
    assert score_rows(model, batches) < CLOSE
    assert compare(measured_gradient(trainer, batches), reference_gradient(trainer.model, batches)) < CLOSE
    shown = {digest for batch in batches for pictures in batch.pictures for digest in [p.digest for p in pictures]}
    assert shown == {first.pictures[0].digest, second.pictures[0].digest}
    assert len({int(index) for batch in batches for index in batch.prompt_index}) == 2


def test_an_environment_loss_leaves_pictures_out(tmp_path: Path) -> None:
    """Its tokens are those of texts: a picture's have no log-prob."""
    trainer, _, batches = play(tmp_path, ROWS, environment_loss_coef=0.5)
    for batch in batches:
        assert batch.environment is not None
        assert not (batch.environment.mask & (batch.completion_ids == IMAGE)).any()
        assert batch.environment.mask.any()
    found = measured_gradient(trainer, batches)
    assert all(bool(torch.isfinite(grad).all()) for grad in found.values())
    assert compare(found, reference_gradient(trainer.model, batches, 0.5)) < CLOSE


def test_rewritten_histories_keep_their_pictures(tmp_path: Path) -> None:
    """The chat template marks each earlier reply, so that each turn is a branch with its own prompt and pictures."""
    trainer, scored, batches = play(tmp_path, ROWS, forgets=True)
    rows = [row for group in scored for c in group.group.completions for row in (c, *c.branches)]
    assert max(len(c.branches) for group in scored for c in group.group.completions) >= 1
    assert {len(row.pictures or ()) for row in rows} == {0, 1, 2}
    assert score_rows(copy.deepcopy(trainer.model).double(), batches) < CLOSE


def crop(corner: int) -> Any:
    """Show a part of the picture.

    Args:
        corner: its number.
    """
    return [{"type": "text", "text": f"corner {corner}"}, part(draw_picture(int(corner)))]


async def ask_tool(row: Any, chat: Any) -> float:
    """Calls the tool itself, because a model of noise does not."""
    reply = await chat.turn(row["prompt"])
    call = ToolCall("crop", {"corner": row["later"]}, "call00000")
    answers = await chat.call_tools(replace(reply, tool_calls=(call,), parse_error=None))
    reply = await chat.turn(answers)
    return pay(reply.text)


def test_a_tool_shows_pictures(tmp_path: Path) -> None:
    trainer, scored, batches = play(tmp_path, ROWS, ask_tool, tools=[crop])
    for group in scored:
        for completion in group.group.completions:
            assert completion.episode.messages[-2]["content"][1]["digest"] == completion.pictures[-1].digest
            assert completion.episode.tool_errors == 0
    assert score_rows(copy.deepcopy(trainer.model).double(), batches) < CLOSE


def test_a_run_resumes_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two steps, and the second one again from the checkpoint of the first: equal weights. The update has ratio 1."""
    options = {"max_steps": 2, "checkpoint_steps": 1, "keep_checkpoints": 9}
    whole = make_trainer(tmp_path, **options)
    metrics = whole.train(ROWS[:2])
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    resumed = make_trainer(tmp_path, resume=str(tmp_path / "checkpoints" / "step_000001"), **options)
    with caplog.at_level("INFO"):
        resumed.train(ROWS[:2])
    assert "step 1 of 2" in caplog.text
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


async def look_often(row: Any, chat: Any) -> float:
    """Four turns, of which the second and the third show pictures; their number differs between episodes."""
    await chat.turn(row["prompt"])
    for turn in range(1, 2 + chat.seed % 3):
        picture = draw_picture(row["later"] + turn)
        await chat.turn([{"role": "user", "content": [part(picture), {"type": "text", "text": "go on"}]}])
    return pay((await chat.turn("and?")).text) + chat.seed % 7


LONG = [{**row, "prompt": f"{row['prompt']} {index}"} for index, row in enumerate(ROWS * 2)]
UNDER_WAY = {
    "async": {"async_steps": 1},
    "partial": {"partial_rollout_turns": 1},
    "async partial": {"async_steps": 1, "partial_rollout_turns": 1},
    "compacted": {"compact_at_tokens": 60},
    "compacted partial": {"compact_at_tokens": 60, "partial_rollout_turns": 2, "async_steps": 1},
}


@pytest.mark.parametrize("name", UNDER_WAY)
def test_batches_under_way_resume_to_the_bit(tmp_path: Path, name: str) -> None:
    """The checkpoint has the pictures of episodes that were played: the resumed run has the weights of the whole."""
    options = {**UNDER_WAY[name], "max_steps": 3, "max_turns": 5, "checkpoint_steps": 1, "keep_checkpoints": 9}
    whole = make_trainer(tmp_path, look_often, **options)
    whole.train(LONG)
    folder = tmp_path / "checkpoints" / "step_000001"
    rollouts = json.loads((folder / "state.json").read_text())["rollouts"]
    if name != "compacted":
        assert '"png"' in json.dumps(rollouts)
    resumed = make_trainer(tmp_path / "resumed", look_often, resume=str(folder), **options)
    resumed.train(LONG)
    for key, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[key]), key


def test_a_summary_drops_pictures(tmp_path: Path) -> None:
    """Rows after a compaction have the pictures of the messages that stay; every row is exact."""
    changes = {"compact_at_tokens": 60, "max_turns": 5}
    trainer, scored, batches = play(tmp_path, ROWS, look_often, **changes)
    completions = [completion for group in scored for completion in group.group.completions]
    assert any(completion.episode.compactions for completion in completions)
    shown = [[len(row.pictures or ()) for row in (c, *c.branches)] for c in completions if c.branches]
    assert any(min(counts) < max(counts) for counts in shown), shown
    model = copy.deepcopy(trainer.model).double()
    assert score_rows(model, batches) < CLOSE
    assert score_rows(model, batches, swaps=True) > 100 * CLOSE
    assert compare(measured_gradient(trainer, batches), reference_gradient(trainer.model, batches)) < CLOSE

"""The live display of a run in a notebook."""

import asyncio
import math
import re

import pytest

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.rollout.episodes.play import play_episode
from rlox_grpo.run.notebook import NotebookSink, draw_curve, thin
from rlox_grpo.run.sinks import make_sinks


def shown(seconds=1.0, **changes):
    """Pages that 4 steps of a run show, ``seconds`` after each other."""
    pages, clock = [], [0.0]
    sink = NotebookSink(4, publish=pages.append, now=lambda: clock[0], **changes)
    for step in range(1, 5):
        clock[0] += seconds
        evaluated = {"eval/mean_reward": 0.25} if step == 2 else {}
        sink.write(step, {"reward/mean": step / 10, "policy/kl": math.nan, "time/step_s": 2.0, **evaluated})
    sink.close()
    return pages


def test_each_step_updates_the_bar_the_numbers_and_the_curves():
    pages = shown()
    assert [re.search(r'value="(\d)" max="4"', page["text/html"])[1] for page in pages] == list("012344")
    last = pages[-1]["text/html"]
    assert "reward 0.400" in last
    assert "<b>0.4</b>, 0.1 to 0.4" in last
    assert (last.count("<polyline"), last.count("<circle")) == (1, 1)  # the reward; its evaluation
    assert "nan" not in last
    assert pages[-1]["text/plain"] == "step 4/4  0.0 s left  reward 0.400  held-out reward 0.250  s/step 2.00"


def test_fast_steps_do_not_update_it_each_time_and_the_end_always_does():
    pages = shown(seconds=0.1)
    assert [re.search(r'value="(\d)"', page["text/html"])[1] for page in pages] == ["0", "4"]


def test_the_curves_begin_before_a_resume():
    pages = shown(earlier=[(1, {"reward/mean": 0.0}), (2, {"reward/mean": None})])
    assert "0 to 0.4" in pages[-1]["text/html"]


def test_episodes_that_end_within_a_step_are_counted():
    pages, clock = [], [0.0]
    sink = NotebookSink(4, publish=pages.append, now=lambda: clock[0])
    clock[0] = 1.0
    sink.show_episodes(3, 8)
    assert "3 of 8 episodes ended" in pages[-1]["text/html"]
    clock[0] = 2.0
    sink.write(1, {"reward/mean": 0.5})
    assert "episodes ended" not in pages[-1]["text/html"]


def test_a_reload_of_the_kernel_shows_earlier_steps_from_the_folder(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("rlox_grpo.run.notebook.is_notebook", lambda: True)
    monkeypatch.setattr("rlox_grpo.run.notebook._make_publisher", lambda: made.append)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "reward/mean": {k}.5}}\n' for k in (1, 2, 3)))
    sinks = make_sinks(["console"], tmp_path, total_steps=5, resume_step=2)
    sinks.write(3, {"reward/mean": 9.0})
    sinks.close()
    assert "1.5 to 9" in made[-1]["text/html"]
    assert "3.5" not in made[-1]["text/html"]  # of a step past the checkpoint


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [5e-324] * 3, [0.0], [1.0] * 500, [1e300, -1e300, 0.0]])
def test_values_of_any_size_are_drawn_within_the_curve(values):
    page = draw_curve("x", list(enumerate(values)), [])
    numbers = [float(one) for one in re.search('points="(.*?)"', page)[1].replace(",", " ").split()]
    assert numbers
    assert all(0 <= one <= 220 for one in numbers)
    assert all(0 <= one <= 72 for one in numbers[1::2])


def test_a_curve_without_a_point_is_not_drawn():
    assert draw_curve("x", [], []) == ""


def test_a_long_line_is_thinned_to_means():
    line = [(step, float(step % 2)) for step in range(1000)]
    thinned = thin(line, 100)
    assert len(thinned) == 100
    assert thinned[0] == (9, pytest.approx(0.5))
    assert thin(line[:100], 100) == line[:100]


def test_play_works_inside_a_running_loop():
    async def environment(row, chat):
        return Outcome(float((await chat.turn("?")).text == "yes"))

    async def cell():
        return play_episode(environment, {}, lambda: "yes", lambda line: None, config=EpisodeConfig.create())

    assert asyncio.run(cell()).reward == 1.0

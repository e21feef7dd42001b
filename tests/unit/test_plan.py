"""The steps of one call of train, and the prompts of each."""

import pytest

from rlox_grpo.run.plan import make_plan


@pytest.mark.parametrize(
    ("prompts", "epochs", "max_steps", "per_step", "total", "drawn"),
    [
        pytest.param(10, 1, None, 4, 3, [4, 4, 2, 0], id="the last step has the rest"),
        pytest.param(10, 2, None, 4, 5, [4, 4, 4, 4, 4, 0], id="a step crosses the end of an epoch"),
        pytest.param(3, 1, None, 8, 1, [3, 0], id="fewer prompts than a step"),
        pytest.param(3, 1, 2, 8, 2, [3, 3, 0], id="max_steps overrides the epochs"),
    ],
)
def test_plan_of_a_new_run(
    prompts: int, epochs: int, max_steps: int | None, per_step: int, total: int, drawn: list[int]
) -> None:
    plan = make_plan(prompts, epochs, max_steps, per_step, start_step=0)
    assert plan.total_steps == total
    assert [plan.count_prompts(step) for step in range(len(drawn))] == drawn


def test_second_call_of_train_counts_from_its_start() -> None:
    plan = make_plan(10, 1, None, 4, start_step=7)
    assert (plan.total_steps, plan.draws) == (10, 10)
    assert [plan.count_prompts(step) for step in (7, 8, 9, 10)] == [4, 4, 2, 0]

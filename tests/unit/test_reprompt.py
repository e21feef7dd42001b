"""The teacher's prompt of SDPO."""

from __future__ import annotations

import pytest

from rlox_grpo.prompts.reprompt import show_solution_or_feedback
from rlox_grpo.prompts.teacher_prompts import Verdict

ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}]}
WRONG = Verdict("7", 0.0, feedback={"python_tests": "Test 1 failed."})


def test_a_right_sibling_is_shown_without_its_thinking() -> None:
    siblings = [
        Verdict("8", 0.0),
        Verdict("<think>It is 6 or 7.</think>\n6", 1.0),
        Verdict("six", 1.0),
        Verdict("", None),
    ]
    assert show_solution_or_feedback(ROW, WRONG, siblings) == [
        ROW["prompt"][0],
        {
            "role": "user",
            "content": "3 + 3?\nCorrect solution:\n\n6\n\nCorrectly solve the original question.",
        },
    ]


def test_feedback_is_shown_where_no_sibling_is_right() -> None:
    assert show_solution_or_feedback({"prompt": "3 + 3?"}, WRONG, [Verdict("8", 0.4)]) == (
        "3 + 3?\nThe following is feedback from your unsuccessful earlier attempt:\n\nTest 1 failed."
        "\n\nCorrectly solve the original question."
    )
    assert show_solution_or_feedback(ROW, Verdict("6", 1.0), [Verdict("7", None)]) is None


def test_token_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is not text: write a teacher_prompt of your own"):
        show_solution_or_feedback({"prompt": [1, 2]}, WRONG, [Verdict("6", 1.0)])
    with pytest.raises(ValueError, match="the completions are token ids"):
        show_solution_or_feedback(ROW, WRONG, [Verdict([1, 2], 1.0)])

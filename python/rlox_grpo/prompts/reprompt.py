"""The teacher's prompt of SDPO: the question, with a right completion of the group or what the rewards say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlox_grpo.prompts.teacher_prompts import Verdict, replace_user_text

SUCCESS = 0.5
"""The least reward of a right completion (``success_reward_threshold``)."""


def show_solution_or_feedback(row: dict[str, Any], verdict: Verdict, siblings: Sequence[Verdict]) -> Any:
    """Return the prompt with the first right sibling; without one, with the feedback on the completion itself.

    This function is a ``teacher_prompt``. The text is that of SDPO (arXiv:2601.20802; github.com/lasgroup/SDPO,
    actor.yaml), with its ``dont_reprompt_on_self_success``, ``remove_thinking_from_demonstration`` and
    ``environment_feedback_only_without_solution``.

    Returns:
        messages or text, in the form of the row's prompt; None if there is neither a solution nor feedback.

    Raises:
        ValueError: the prompt or the completions are token ids.
    """
    right = [sibling.completion for sibling in siblings if sibling.reward is not None and sibling.reward >= SUCCESS]
    if right:
        hint = f"\nCorrect solution:\n\n{_leave_out_thinking(right[0])}"
    elif verdict.feedback:
        said = "\n\n".join(verdict.feedback.values())
        hint = f"\nThe following is feedback from your unsuccessful earlier attempt:\n\n{said}"
    else:
        return None

    def ask_again(text: Any) -> str:
        if not isinstance(text, str):
            raise ValueError("the prompt is not text: write a teacher_prompt of your own")
        return f"{text}{hint}\n\nCorrectly solve the original question."

    return replace_user_text(row["prompt"], ask_again)


def _leave_out_thinking(completion: Any) -> str:
    if not isinstance(completion, str):
        raise ValueError("the completions are token ids: write a teacher_prompt of your own")
    return completion.rpartition("</think>")[2].strip()

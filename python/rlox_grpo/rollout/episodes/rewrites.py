r"""Find out whether a chat template rewrites a conversation when it goes on.

A template that drops earlier reasoning shows a reply with it once, and without it as soon as a user's message follows::

    given      <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n
    sampled    <think>\nhm\n</think>\n\nyes<|im_end|>
    later      <|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n…

What is rendered later no longer extends what was given and sampled, so the next reply begins another row.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlox_grpo.rollout.episodes.template import Message, Template, TemplateError


def extends(template: Template, history: Sequence[Message], reply: Message, new: Sequence[Message], said: str) -> bool:
    """Whether the rendering of ``history``, ``reply`` and ``new`` extends the tokens of the first two.

    A reply that the template shows in another form than it was sampled, such as a tool call with other spaces, extends
    as long as later messages do not change that form.

    Args:
        template: renders them.
        history: the messages that the policy was given.
        reply: what it said, as a message.
        new: the messages that follow.
        said: the reply as it was sampled, without its end token.

    Raises:
        TemplateError: the template refuses the conversation.
    """
    prompt, later = template.render(history), template.render([*history, reply, *new])
    try:
        increment = template.render_increment(new)
    except TemplateError:
        return False
    if not later.startswith(prompt) or not later.endswith(increment) or len(later) < len(prompt) + len(increment):
        return False
    body = later[len(prompt) : len(later) - len(increment)]
    if body == said:
        return True
    final = template.render([*history, reply], generation_prompt=False)
    if not final.startswith(prompt + body) or not increment.startswith(final[len(prompt + body) :].rstrip()):
        return False
    reasoning = str(reply.get("reasoning_content") or "").strip()
    return reasoning in body

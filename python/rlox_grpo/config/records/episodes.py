"""Options of episodes of several turns."""

from __future__ import annotations

from typing import Literal

from rlox_grpo.config.records.option import SET, Record, option

_EPISODES = ({"environment": SET}, {"tools": SET})


class EpisodeConfig(Record, title="Episodes of several turns"):
    """How episodes run, given ``GRPO(environment=…)`` or ``GRPO(tools=…)``; see docs/guides/several_turns.md."""

    max_turns: int = option(
        8, "Maximum number of replies in an episode; max_new_tokens is of one reply.", ge=1, only_with=_EPISODES
    )
    max_episode_tokens: int | None = option(
        None,
        "Maximum number of tokens of an episode after its first prompt, replies and messages to the policy; None: as "
        "many as the model takes.",
        ge=1,
        only_with=_EPISODES,
    )
    turn_timeout: float | None = option(
        None,
        "Timeout of an async environment between two turns, in seconds; it ends the episode with `timeout`.",
        gt=0,
        only_with=_EPISODES,
        resumable=True,
    )
    tool_timeout: float | None = option(
        None,
        "Timeout of a call of an async tool, in seconds; the policy gets an error message.",
        gt=0,
        only_with=_EPISODES,
        resumable=True,
    )
    max_observation_chars: int = option(
        8192,
        "Maximum length of a tool's result, in characters; a longer one is cut, with a mark.",
        ge=1,
        only_with=_EPISODES,
    )
    limit_reward: float | None = option(
        0.0,
        "Environment's reward of an episode that ended by max_turns, max_tokens, context or parse_error; None: "
        "unscored.",
        only_with=_EPISODES,
    )
    failure_reward: float | None = option(
        None,
        "Environment's reward of an episode that ended by timeout, tool_error or environment_error; None: unscored.",
        only_with=_EPISODES,
    )
    on_parse_error: Literal["answer", "end"] = option(
        "answer",
        "A tool call that cannot be read: answer with an error message, or end the episode.",
        only_with=_EPISODES,
    )
    on_tool_error: Literal["answer", "end"] = option(
        "answer", "A tool call that fails: answer with an error message, or end the episode.", only_with=_EPISODES
    )
    on_environment_error: Literal["stop", "end"] = option(
        "stop",
        "When the environment raises: stop the run, or end the episode with `environment_error`.",
        only_with=_EPISODES,
        resumable=True,
    )
    history: Literal["template", "keep"] = option(
        "template",
        "A chat template that rewrites earlier replies, such as one that drops reasoning: refuse it, or keep replies "
        "as they were sampled.",
        only_with=_EPISODES,
    )

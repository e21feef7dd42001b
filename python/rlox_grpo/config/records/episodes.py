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
        "Timeout of an environment between two turns, in seconds; it ends the episode with `timeout`. Sync "
        "environments run in worker processes.",
        gt=0,
        only_with=_EPISODES,
        resumable=True,
    )
    episode_timeout: float | None = option(
        None,
        "Timeout of an episode, in seconds since it began; it ends with `timeout`, also in the middle of a reply. Sync "
        "environments run in worker processes.",
        gt=0,
        only_with=_EPISODES,
        resumable=True,
    )
    max_live_episodes: int | None = option(
        None,
        "Maximum number of episodes that run at the same time, for each rank; the next begins when one ends, in the "
        "order of the batch. What is sampled does not depend on it, except with partial_rollout_turns. None: all of a "
        "batch; of a command, 32.",
        ge=1,
        only_with=_EPISODES,
        resumable=True,
    )
    partial_rollout_turns: int | None = option(
        None,
        "Replies of an episode in a round of a step. The prompts of two steps are under way; a step ends after the "
        "round in which prompts_per_step groups have ended, and the other episodes go on in the next step. None: a "
        "step waits for all its episodes.",
        ge=1,
        only_with=_EPISODES,
        only_training=True,
        source="Kimi k1.5, arXiv:2501.12599",
    )
    drop_stale: int | None = option(
        None,
        "Leave replies out of the loss and its denominators that weights more than this many steps old sampled. None: "
        "all replies are trained.",
        ge=0,
        only_with={"partial_rollout_turns": SET},
        only_training=True,
    )
    tool_timeout: float | None = option(
        None,
        "Timeout of a tool's call, in seconds; the policy gets an error message. Sync tools run in worker processes.",
        gt=0,
        only_with=_EPISODES,
        resumable=True,
    )
    episode_workers: int = option(
        32,
        "Maximum number of worker processes of a sync environment, and of sync tools; an episode keeps one to its end.",
        ge=1,
        only_with=({"turn_timeout": SET}, {"episode_timeout": SET}, {"tool_timeout": SET}),
        resumable=True,
    )
    max_observation_chars: int = option(
        8192,
        "Maximum length of a tool's result and of an environment's later messages, in characters; a longer one is cut, "
        "with a mark.",
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
    call_format: Literal["auto", "hermes", "llama3", "mistral", "qwen_xml", "glm", "json"] = option(
        "auto",
        "Form of the policy's tool calls.",
        choices={
            "auto": "the form that the chat template writes",
            "hermes": '`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen; or as json',
            "llama3": '`{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`; several are separated by `;`',
            "mistral": "`[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}` for each; or as json",
            "qwen_xml": "`<tool_call><function=name><parameter=x>…</parameter></function></tool_call>`, as Qwen 3.5, "
            "Qwen3-Coder and Nemotron",
            "glm": "`<tool_call>name<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>`, as GLM 4.5",
            "json": "a reply that is one JSON object with name and arguments, or a list of them",
        },
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
        "What the policy is shown of earlier replies where the chat template rewrites them, such as one that drops "
        "reasoning.",
        choices={
            "template": "what the template writes; a rewritten history opens a branch, a further row of the episode",
            "keep": "its replies as it sampled them; an episode is one row",
        },
        only_with=_EPISODES,
    )

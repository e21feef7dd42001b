"""Options of episodes of several turns."""

from __future__ import annotations

from functools import partial
from typing import Literal

from rlox_grpo.config.records.option import LONGEST_TIMEOUT, SET, Record, option

ObservationCut = Literal["middle", "head", "tail"]

_episode_option = partial(option, only_with=({"environment": SET}, {"tools": SET}))


class EpisodeConfig(Record, title="Episodes of several turns"):
    """How episodes run, given ``GRPO(environment=…)`` or ``GRPO(tools=…)``; see docs/guides/several_turns.md."""

    max_turns: int = _episode_option(
        8, "Maximum number of replies of the policy in an episode. max_new_tokens limits each reply.", ge=1
    )
    max_episode_tokens: int | None = _episode_option(
        None,
        "Maximum length of an episode after its first prompt, in tokens, including messages to the policy. None: the "
        "context length of the model.",
        ge=1,
    )
    compact_at_tokens: int | tuple[int, int] | None = _episode_option(
        None,
        "Compaction: length of a conversation, in tokens, above which the policy writes a summary that replaces it. "
        "[low, high]: a length in this range is drawn once for each prompt. The summary is trained like other "
        "replies. None: no compaction.",
        source="CompactionRL, arXiv:2607.05378",
    )
    compact_prompt: str = option(
        "The conversation has become too long and will be replaced by your summary of it. Write the summary now, "
        "without calling a tool: the task as it was asked, what was done and learned, every value that is still "
        "needed, and what is left to do.",
        "Message that asks the policy for the summary.",
        only_with={"compact_at_tokens": SET},
    )
    compact_keep: int = option(
        1,
        "Number of last replies that stay after the summary, with the messages between them. System messages and "
        "tools always stay.",
        ge=1,
        only_with={"compact_at_tokens": SET},
    )
    turn_timeout: float | None = _episode_option(
        None,
        "Timeout of the environment between two turns, in seconds, after which the episode ends with `timeout`. With a "
        "timeout, sync environments run in worker processes.",
        gt=0,
        le=LONGEST_TIMEOUT,
        resumable=True,
    )
    episode_timeout: float | None = _episode_option(
        None,
        "Timeout of an episode, in seconds, after which the episode ends with `timeout`, even within a reply. With a "
        "timeout, sync environments run in worker processes.",
        gt=0,
        le=LONGEST_TIMEOUT,
        resumable=True,
    )
    max_live_episodes: int | None = _episode_option(
        None,
        "Maximum number of episodes that run at the same time on each rank. The samples do not depend on this limit, "
        "except with partial_rollout_turns. None: all episodes of a batch, or 32 for an agent program.",
        ge=1,
        resumable=True,
    )
    max_live_by_source: dict[str, int] = _episode_option(
        {},
        "Maximum number of episodes of a source of a mixture that run at the same time on each rank, by the name of "
        "the source, so that a slow environment does not delay the others. The samples do not depend on this limit, "
        "except with partial_rollout_turns.",
        resumable=True,
        only_training=True,
    )
    partial_rollout_turns: int | None = _episode_option(
        None,
        "Partial rollouts: maximum number of replies of an episode in each round. Episodes that began "
        "in different steps run together. A step ends after the round in which prompts_per_step groups are complete; "
        "the other episodes continue in the next step. None: every episode ends in its own step.",
        ge=1,
        only_training=True,
        source="Kimi k1.5, arXiv:2501.12599",
    )
    drop_stale: int | None = option(
        None,
        "Maximum age of the weights that sampled a reply, in steps. Older replies are left out of the loss and its "
        "denominators. None: no limit.",
        ge=0,
        only_with={"partial_rollout_turns": SET},
        only_training=True,
    )
    tool_timeout: float | None = _episode_option(
        None,
        "Timeout of a tool call, in seconds, after which the policy gets an error message. With a timeout, sync "
        "tools run in worker processes.",
        gt=0,
        le=LONGEST_TIMEOUT,
        resumable=True,
    )
    episode_workers: int = option(
        32,
        "Maximum number of worker processes for a sync environment, and for sync tools. Each running episode uses one "
        "process.",
        ge=1,
        only_with=({"turn_timeout": SET}, {"episode_timeout": SET}, {"tool_timeout": SET}),
        resumable=True,
    )
    max_observation_chars: int = _episode_option(
        8192,
        "Maximum length of tool results and of messages of the environment after the first, in characters. A tool can "
        "set its own limit in the attribute max_observation_chars.",
        ge=1,
    )
    observation_cut: ObservationCut = _episode_option(
        "middle",
        "The part of a text longer than max_observation_chars that is left out; a mark says how many characters are "
        "missing. A tool can set the part for its results in the attribute observation_cut.",
        choices={
            "middle": "the beginning and the end stay, such as a command and its traceback",
            "head": "the end stays, such as the end of a log",
            "tail": "the beginning stays, such as the beginning of a search result",
        },
    )
    limit_reward: float | None = _episode_option(
        0.0,
        "Reward of the environment for an episode that ends with max_turns, max_tokens, context or parse_error. None: "
        "no score.",
    )
    failure_reward: float | None = _episode_option(
        None,
        "Reward of the environment for an episode that ends with timeout, tool_error or environment_error. None: no "
        "score, even if reward functions score the episode.",
    )
    call_format: Literal["auto", "hermes", "llama3", "mistral", "qwen_xml", "glm", "json"] = _episode_option(
        "auto",
        "Format of the policy's tool calls.",
        choices={
            "auto": "the format of the chat template",
            "hermes": '`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as in Qwen; json is accepted too',
            "llama3": '`{"name": …, "parameters": {…}}`, optionally after `<|python_tag|>`; several calls are '
            "separated by `;`",
            "mistral": "`[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}` for each call; json is "
            "accepted too",
            "qwen_xml": "`<tool_call><function=name><parameter=x>…</parameter></function></tool_call>`, as in Qwen "
            "3.5, Qwen3-Coder and Nemotron",
            "glm": "`<tool_call>name<arg_key>x</arg_key><arg_value>…</arg_value></tool_call>`, as in GLM 4.5",
            "json": "a reply that is one JSON object with name and arguments, or a list of such objects",
        },
    )
    on_parse_error: Literal["answer", "end"] = _episode_option(
        "answer", "If a tool call cannot be parsed: answer with an error message, or end the episode."
    )
    parse_error_penalty: float = _episode_option(
        0.0,
        "Penalty that is subtracted from the total reward of an episode in training, for each reply with a tool call "
        "that cannot be parsed. The metric is `episode/parse_errors`.",
        ge=0,
        only_training=True,
    )
    on_tool_error: Literal["answer", "end"] = _episode_option(
        "answer", "If a tool call fails: answer with an error message, or end the episode."
    )
    on_environment_error: Literal["stop", "end"] = _episode_option(
        "stop",
        "If the environment raises an error: stop the run, or end the episode with `environment_error`.",
        resumable=True,
    )
    history: Literal["template", "keep"] = _episode_option(
        "template",
        "How earlier replies appear in the context of the policy if the chat template rewrites them, for example "
        "without their reasoning.",
        choices={
            "template": "as the chat template writes them; a rewritten history starts a branch, another row of the "
            "episode",
            "keep": "as the policy sampled them; an episode is one row",
        },
    )

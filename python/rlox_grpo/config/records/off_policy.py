"""Options of completions that the policy did not sample in this step: demonstrations and replay."""

from __future__ import annotations

from typing import Literal

from rlox_grpo.config.records.option import SET, Record, option

_REPLAYS = {"replay": ("positive",)}


class OffPolicyConfig(Record, title="Demonstrations and replay"):
    """When demonstrations and earlier completions join the group of their prompt; docs/guides/demonstrations.md."""

    demo_when: Literal["always", "none_right"] = option(
        "always",
        "always: the demonstration of a row is in its group in every step; none_right: only if none of the sampled "
        "completions is right, that is, has a first reward of at least 1.",
        only_with={"demo_loss": SET},
        source="LUFFY, arXiv:2504.14945",
    )
    demo_in_baseline: bool = option(
        False,
        "ce: Count the reward of the demonstration in the mean and the standard deviation of its group, so that "
        "samples that are worse have negative advantages. With luffy it always counts.",
        only_with={"demo_loss": ("ce",)},
        source="CHORD, arXiv:2508.11408",
    )
    replay: Literal["none", "positive"] = option(
        "none",
        "positive: keep the last right completion of each prompt with its log-probs. It joins the group of its prompt "
        "when none of the new completions is right.",
        source="positive: ARPO, arXiv:2505.16282",
    )
    replay_prompts: int = option(
        1024,
        "Number of prompts whose completion is kept; beyond it the one that was stored first is dropped. There is no "
        "published default.",
        ge=1,
        only_with=_REPLAYS,
    )
    replay_max_age: int = option(
        100,
        "Most steps since the weights that sampled a completion; an older one is dropped. There is no published "
        "default.",
        ge=1,
        only_with=_REPLAYS,
    )

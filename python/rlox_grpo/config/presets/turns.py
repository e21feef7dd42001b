"""Presets of papers on episodes of several turns; they need ``GRPO(environment=…)``."""

from __future__ import annotations

from collections.abc import Mapping

from rlox_grpo.config.presets.preset import (
    GROUP_MEAN,
    K3_IN_LOSS,
    PPO_CLIP,
    VERL_DEFAULTS,
    Defect,
    Preset,
)

TURNS: Mapping[str, Preset] = {
    "gagpo": Preset(
        source="GAGPO, arXiv:2605.13217, and verl-agent, examples/gigpo_trainer/run_alfworld.sh",
        summary="Advantages of turns by GAE, with the mean return of each state in the group as its value; one ratio "
        "for each turn. It needs an environment.",
        reward="the environment's",
        sections={
            "arXiv:2605.13217": {
                **GROUP_MEAN,
                "turn_credit": "gae",
                "turn_state": "observation",
                "policy_loss": "gspo_turn",
            },
            "run_alfworld.sh": {
                "turn_discount": 0.95,
                "prompts_per_step": 16,
                "group_size": 8,
                "max_new_tokens": 512,
                "learning_rate": 1e-6,
                "kl_coef": 0.01,
                **K3_IN_LOSS,
                "reference": "frozen",
            },
            "PPO, arXiv:1707.06347, table 3: the paper's λ is not known": {"turn_lambda": 0.95},
            "the defaults of verl, on which verl-agent runs": {
                "ddof": 1,
                "std_epsilon": 1e-6,
                **PPO_CLIP,
                "delta": None,
                **VERL_DEFAULTS,
                "max_grad_norm": 1.0,
            },
        },
        defects=(
            Defect(
                "A difference: the source compares the text of observations; here the token ids are compared, and the "
                "state of a first turn is the prompt."
            ),
            Defect(
                "A difference: the script splits a batch by turns into several optimizer steps; here a batch is one."
            ),
        ),
    ),
}

"""Options of mixtures of experts."""

from __future__ import annotations

from typing import Literal

from rlox_grpo.config.records.option import Record, option


class ExpertConfig(Record, title="Mixture of experts"):
    """Losses of the routers, and replay of their choices."""

    router_aux_loss_coef: float = option(
        0.0,
        "Weight of the load-balancing loss E · Σ f_i P_i over the experts i of each layer: f_i is the share of the "
        "loss tokens that are routed to expert i, over the whole optimizer step, and P_i is the mean router "
        "probability of expert i. Pre-training uses 0.001 to 0.01.",
        ge=0,
        only_with={"updater": ("torch",), "torch_compile": (False,)},
        source="Switch Transformer, arXiv:2101.03961, eq. 4 to 6; f_i over the step: arXiv:2501.11873",
    )
    router_z_loss_coef: float = option(
        0.0,
        "Weight of the router z-loss, the mean of (log Σ exp x_i)² over the router's logits x. Pre-training uses "
        "0.001.",
        ge=0,
        only_with={"updater": ("torch",), "torch_compile": (False,)},
        source="ST-MoE, arXiv:2202.08906, eq. 5",
    )
    router_replay: Literal["none", "trainer", "sampler"] = option(
        "none",
        "Experts that the updates use: the experts that the routers choose in each forward pass, those chosen in the "
        "forward pass that computes the old log-probs, or those that the engine chose while it sampled. The gates get "
        "gradients in all cases.",
        only_with={"updater": ("torch",), "torch_compile": (False,), "bypass_old_log_probs": (False,)},
        source="Routing Replay, GSPO, arXiv:2507.18071, section 5.3; Rollout Routing Replay (R3), arXiv:2510.11370",
        choices={
            "none": "the routers choose in each forward pass.",
            "trainer": "every update of the batch uses the experts that the old policy chose in the trainer.",
            "sampler": "the forward pass of the old log-probs and every update of the batch use the experts that the "
            "engine chose while it sampled.",
        },
    )

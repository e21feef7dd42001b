"""The quick start of the README on a toy model; run as a script in an environment that holds the wheel alone."""

import copy
import math

import torch
from torch import nn

from rlox_grpo import GRPO

VOCABULARY = 16
WANTED = 3


class Bigram(nn.Module):
    """The next token depends on the last one: ``input_ids [N, L]`` to logits ``[N, L, VOCABULARY]``."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids):
        return self.table(input_ids)


def share_of_wanted_token(completions, prompts):
    """Between 0 and 1 for each completion: how much of it is the wanted token."""
    assert len(completions) == len(prompts) == 16
    return [(completion == WANTED).float().mean().item() for completion in completions]


torch.manual_seed(0)
model = Bigram()
before = copy.deepcopy(model.state_dict())
trainer = GRPO(
    model=model,
    ref_model=copy.deepcopy(model),
    reward_fn=share_of_wanted_token,
    group_size=4,
    kl_coef=0.1,
    learning_rate=1e-2,
    max_new_tokens=8,
)
metrics = trainer.train(prompts=torch.randint(0, VOCABULARY, (4, 5)), n_epochs=3)

assert 0.0 <= metrics["mean_reward"] <= 1.0, metrics
assert math.isfinite(metrics["kl"]), metrics
assert not torch.equal(model.state_dict()["table.weight"], before["table.weight"]), "the weights never moved"
print(f"quick start: mean_reward {metrics['mean_reward']:.3f}, kl {metrics['kl']:.5f}")

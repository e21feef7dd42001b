"""A whole training step beside rlox 1.2.0's GRPO on the same toy module, prompts, lengths and threads.

rlox calls the module's own ``generate``; ours samples by itself. The module generates by sampling in the plainest way,
which is what rlox's documentation shows.
"""

import copy
import time

import numpy as np
import pytest
import torch
from torch import nn

from rlox_grpo import GRPO
from rlox_grpo.prompts import load_prompts

VOCABULARY, PROMPTS, PROMPT_LENGTH, GROUP, NEW_TOKENS = 1000, 16, 16, 8, 16


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.hidden(self.embedding(input_ids).cumsum(dim=1))))

    @torch.no_grad()
    def generate(self, prompt_ids, max_new_tokens):
        ids = prompt_ids
        for _ in range(max_new_tokens):
            probabilities = torch.softmax(self(ids)[:, -1], dim=-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
        return ids


def reward(completions, prompts):
    return [float((completion[-NEW_TOKENS:] % 10 == 7).float().mean()) for completion in completions]


@pytest.fixture(scope="module")
def prompts():
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_LENGTH)))


def ours(model, reference, prompts):
    trainer = GRPO(
        model,
        reward,
        ref_model=reference,
        group_size=GROUP,
        prompts_per_step=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        kl_coef=0.1,
        learning_rate=1e-4,
        log_to=(),
    )
    loaded = load_prompts(prompts)
    return lambda: trainer.train_step(loaded)


def rloxs(model, reference, prompts):
    from rlox.algorithms.grpo import GRPO as RloxGRPO

    trainer = RloxGRPO(
        model=model,
        ref_model=reference,
        reward_fn=reward,
        group_size=GROUP,
        max_new_tokens=NEW_TOKENS,
        kl_coef=0.1,
        learning_rate=1e-4,
    )
    return lambda: trainer.train_step(prompts)


@pytest.mark.benchmark(group=f"toy step, {PROMPTS} x {GROUP} rows of {PROMPT_LENGTH} + {NEW_TOKENS} tokens")
@pytest.mark.parametrize(("name", "make"), [("rlox_grpo", ours), ("rlox 1.2.0", rloxs)])
def test_toy_step(benchmark, name, make, prompts):
    model = Toy()
    benchmark(make(model, copy.deepcopy(model), prompts))


def paired(rounds: int = 25, warm_up: int = 3) -> None:
    """Alternate the two and print the median of their ratios: what a machine with noisy neighbours can still tell."""
    prompts = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_LENGTH)))
    steps = ours(Toy(), Toy(), prompts), rloxs(Toy(), Toy(), prompts)
    times = []
    for _ in range(rounds):
        pair = []
        for step in steps:
            start = time.perf_counter()
            step()
            pair.append(time.perf_counter() - start)
        times.append(pair)
    kept = np.array(times[warm_up:])
    mine, theirs = np.median(kept, axis=0)
    ratio = np.median(kept[:, 1] / kept[:, 0])
    print(f"rlox_grpo {mine * 1e3:.0f} ms, rlox 1.2.0 {theirs * 1e3:.0f} ms, median of the paired ratios {ratio:.2f}")


if __name__ == "__main__":
    paired()

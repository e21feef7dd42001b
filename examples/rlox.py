"""rlox: a module with ``forward(input_ids) -> logits``, a reward on token tensors, and no tokenizer.

The task is to continue counting: 3, 4, 5 is followed by 6, modulo 16.

python examples/rlox.py [--out DIR] [--steps N] [--any_field value]
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from learner import summary
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.cli import parse_overrides
from rlox_grpo.config.toml import read_toml

MODULUS = 16


class LastTokens(nn.Module):
    """Logits ``[N, T, MODULUS]`` from the embeddings of each token and the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODULUS, 32)
        self.hidden = nn.Linear(64, 128)
        self.head = nn.Linear(128, MODULUS)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``int64 [N, T]`` → logits ``[N, T, MODULUS]``."""
        here = self.embedding(input_ids)
        before = nn.functional.pad(here, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.tanh(self.hidden(torch.cat([here, before], dim=-1))))


def counts_on(completions: list[Tensor], prompts: list[Tensor]) -> list[float]:
    """Share of a completion's tokens that are one more than the previous token."""
    rewards = []
    for completion, prompt in zip(completions, prompts, strict=True):
        whole = torch.cat([prompt[-1:], completion])
        rewards.append(float((whole[1:] == (whole[:-1] + 1) % MODULUS).float().mean()))
    return rewards


def main() -> None:
    """Train with the options of ``rlox.toml``; the command line overrides them."""
    start = time.perf_counter()
    settings = read_toml(Path(__file__).with_suffix(".toml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: runs/examples/rlox")
    parser.add_argument("--steps", type=int, default=settings["max_steps"], help="default: %(default)s")
    arguments, rest = parser.parse_known_args()
    out = arguments.out or Path(settings["output_dir"]).parent
    changes = {"max_steps": arguments.steps, "output_dir": out / "run", **parse_overrides(rest)}
    config = GRPOConfig.create(**{**settings, **changes})

    torch.manual_seed(0)
    model = LastTokens()
    firsts = torch.arange(MODULUS)[:, None]
    prompts = (firsts + torch.arange(3)) % MODULUS  # each first number and the next two
    held_out = prompts[::4]
    seen = prompts[[index for index in range(MODULUS) if index % 4]]
    trainer = GRPO(model, counts_on, ref_model=copy.deepcopy(model), config=config)
    trainer.train(prompts=seen, eval_prompts=held_out)
    print(f"{summary(out / 'run')} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

"""An agent of the ``openai`` package, trained over its episode's endpoint, on any number of ranks.

``torchrun --nproc_per_node 2 agent_run.py MODEL OPTIONS_AS_JSON``; without torchrun on one.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openai
import torch
from byte_model import training

from rlox_grpo import GRPO

ROWS = [{"secret": secret} for secret in range(8)]


async def agent(row, chat):
    """Two replies, the second one streamed; the reward is the share of their tokens in the lower half."""
    client = openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=300)
    messages = [{"role": "user", "content": f"{row['secret']}:"}]
    answer = await client.chat.completions.create(model="policy", messages=messages, logprobs=True)
    (choice,) = answer.choices
    messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "again"}]
    parts = [*choice.logprobs.content]
    async for chunk in await client.chat.completions.create(
        model="policy", messages=messages, logprobs=True, stream=True
    ):
        parts += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ()
    return float(np.mean([int(part.token.removeprefix("token_id:")) < 131 for part in parts]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = GRPO(sys.argv[1], environment=agent, **training(**json.loads(sys.argv[2])))
    trainer.train(ROWS)

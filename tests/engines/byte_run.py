"""A run of the byte model on any number of ranks: ``torchrun --nproc_per_node 2 byte_run.py MODEL OPTIONS_AS_JSON``."""

from __future__ import annotations

import json
import sys

import torch
from byte_model import PROMPTS, share_of_low_bytes, training

from rlox_grpo import GRPO

if __name__ == "__main__":
    torch.set_num_threads(1)
    GRPO(sys.argv[1], share_of_low_bytes, **training(**json.loads(sys.argv[2]))).train(PROMPTS)

"""A run of the byte model on any number of ranks: ``torchrun --nproc_per_node 2 byte_run.py MODEL OPTIONS_AS_JSON``.

``BREAK_SYNC=3`` has the last rank's vLLM fail half-way through its sync of version 3, as it does over a wrong shape.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from byte_model import PROMPTS, share_of_low_bytes, training

from rlox_grpo import GRPO


def break_sync(engine, broken):
    load, reload = engine.load_weights, engine._reload

    def reload_with_a_wrong_shape(tensors):
        engine._reload = reload  # the next one is right
        reload([(name, tensor[:1]) if name.endswith("o_proj.weight") else (name, tensor) for name, tensor in tensors])

    def load_weights(weights, version):
        if version == broken:
            engine._reload = reload_with_a_wrong_shape
        load(weights, version)

    engine.load_weights = load_weights


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = GRPO(sys.argv[1], share_of_low_bytes, **training(**json.loads(sys.argv[2])))
    if "BREAK_SYNC" in os.environ and trainer.ranks.rank == trainer.ranks.size - 1:
        break_sync(trainer.engine, int(os.environ["BREAK_SYNC"]))
    trainer.train(PROMPTS)

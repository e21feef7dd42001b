"""A toy run that kills its own process in the middle of a step: ``python killed_run.py FOLDER STEP [best]``.

With ``best`` it keeps the best checkpoint by the evaluations of :func:`toy.near_half`.
"""

import functools
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlox_grpo import GRPO, EvalSet
from toy import KEEP_BEST, PROMPTS, ToyLM, near_half, options, share_of_target

folder, last_step = sys.argv[1], int(sys.argv[2])
calls = 0


@functools.wraps(share_of_target)  # by name and source that function
def reward_then_die(completions, prompts):
    global calls
    calls += 1
    if calls > last_step:
        os.kill(os.getpid(), signal.SIGKILL)
    return share_of_target(completions, prompts)


if sys.argv[3:] == ["best"]:
    trainer = GRPO(ToyLM(), reward_then_die, **options(output_dir=folder, **KEEP_BEST))
    trainer.train(PROMPTS, eval_prompts={"toy": EvalSet(PROMPTS[:3], samples=2, rewards=near_half)})
else:
    GRPO(ToyLM(), reward_then_die, **options(output_dir=folder)).train(PROMPTS)

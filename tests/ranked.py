"""A run of a tiny transformers policy with ragged completions, the same on any number of ranks; also a script.

``torchrun --nproc_per_node 2 tests/ranked.py FOLDER '{"updater": "deepspeed"}'`` trains and writes into FOLDER:
the weights (``model.safetensors``), the checkpoints and completions of a run, and ``metrics.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experts import tiny_experts
from own_parts import even_tokens
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.distributed.shards import find_whole_shape
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.run.checkpoint import save_learning_rate_factor
from rlox_grpo.run.manifest import write_manifest
from rlox_grpo.types import Completion, RolloutGroup

VOCABULARY = 61
PROMPTS = torch.arange(35).reshape(7, 5) % VOCABULARY  # 7: no number of ranks divides it evenly
DIE_AT = int(os.environ.get("DIE_AT", "0"))
"""Step at which the last rank meets what HOW says: kill, raise, nan or term (a wish to stop); 0 never."""
HOW = os.environ.get("HOW", "")

calls = 0


def torchrun(ranks):
    """A script on so many ranks of this machine: the command before its name."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


def tiny_policy(*, tied=False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=list(range(12)),  # one token in five ends a completion: lengths are ragged
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


def other_policy():
    """A teacher of the tiny policy: the same model with other embeddings."""
    model = tiny_policy()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
    return model


def save_policy(folder, *, tied=False, dtype=torch.float32, family=None):
    """Save the tiny policy with a tokenizer whose words are the ids; trained by ``source=folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", clean_up_tokenization_spaces=False).save_pretrained(
        folder
    )
    policy = tiny_policy(tied=tied) if family is None else tiny_experts(family, vocab_size=VOCABULARY)
    policy.to(dtype).save_pretrained(folder)
    return folder


def is_last_rank():
    return os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)


def share_of_even(completions, prompts, **_):
    """Share of even tokens, with a bonus for length, so that rewards differ in every group."""
    global calls
    calls += 1
    if is_last_rank() and calls == DIE_AT:
        if HOW == "raise":
            raise ArithmeticError("the reward broke")
        if HOW in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if HOW == "kill" else signal.SIGTERM)
    rows = [torch.tensor([*map(int, row.split())]) if isinstance(row, str) else row for row in completions]
    return [float((ids % 2 == 0).float().mean()) + 0.01 * len(ids) if len(ids) else 0.0 for ids in rows]


def of_task(name):
    """``share_of_even`` for the rows of one task, and None for those of others."""

    def score(completions, prompts, task):
        scores = share_of_even(completions, prompts)
        return [value if own == name else None for value, own in zip(scores, task, strict=True)]

    score.__name__ = name
    return score


def options(folder, **changes):
    saved = {"checkpoint_steps": 5, "keep_checkpoints": 5, "log_completions": 100, "output_dir": str(folder)}
    return {
        "group_size": 4,
        "prompts_per_step": 5,
        "micro_batch_tokens": 48,
        "learning_rate": 1e-3,
        "max_new_tokens": 12,
        "kl_coef": 0.05,
        "max_steps": 10,
        "log_to": (),
        **({} if folder is None else saved),
        "rank_timeout": 20.0,
        **changes,
    }


class UniformEngine:
    """Completions of any tokens, each as probable as the others: they depend neither on the policy nor its dtype."""

    exact, takes_weights, policy_version, max_length = False, False, 0, None

    def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
        groups = []
        for index, prompt in enumerate(prompts, first_prompt):
            draws = np.random.default_rng([seed % 2**63, index])
            rows = [
                draws.integers(12, VOCABULARY, draws.integers(1, sampling.max_new_tokens)) for _ in range(group_size)
            ]
            log_prob = np.float32(-np.log(VOCABULARY))
            completions = [Completion(ids, np.full(len(ids), log_prob), "length") for ids in rows]
            groups.append(RolloutGroup(prompt, tuple(completions), self.policy_version))
        return groups

    def load_weights(self, weights, version):
        self.policy_version = version

    def close(self):
        pass


def breaking(policy_loss):
    """The policy loss, but NaN at step DIE_AT on the last rank."""

    def loss(inputs):
        term = policy_loss(inputs)
        return replace(term, loss=term.loss * torch.nan) if calls == DIE_AT and is_last_rank() else term

    return loss


def held_bytes(tensors):
    """Bytes that this process holds of them: of its shards alone where they lie in shards."""
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in own)


class Break:
    """A callback that breaks the policy once, after ``step``: from then on it samples token 13 alone, of reward 0."""

    def __init__(self, step):
        self.step, self.trainer = step, None

    def on_step(self, step, metrics):
        if step == self.step:
            self.step = None
            for name, parameter in self.trainer.model.named_parameters():
                value = torch.zeros(find_whole_shape(parameter))
                if name == "lm_head.weight":
                    value[13] = 50.0
                elif name in ("model.norm.weight", "model.embed_tokens.weight"):
                    value.fill_(1.0)
                self.trainer.updater.set_weight(name, parameter, value)


def refuse_unlike_ranks(trainer, rows, folder):
    """Calls in which the ranks differ, which each rank refuses: ``trainer`` has done nothing afterwards.

    Each rank has a folder of its own with a checkpoint, as where hosts share no disk.
    """
    rank, held_out = trainer.ranks.rank, PROMPTS[trainer.ranks.rank :][:3]
    with pytest.raises(ConfigError, match="train differ: n_epochs is"):
        trainer.train(rows, n_epochs=1 + rank)
    with pytest.raises(ConfigError, match="train differ: eval_prompts is"):
        trainer.train(rows, eval_prompts=held_out)
    with pytest.raises(ConfigError, match=r"train differ: eval_prompts\['some'\] is .*None"):
        trainer.train(rows, eval_prompts={"some": held_out} if rank else None)
    with pytest.raises(ConfigError, match="evaluate differ: prompts is"):
        trainer.evaluate(held_out)
    other = GRPO(tiny_policy(), (share_of_even, even_tokens)[rank], **options(None))
    with pytest.raises(ConfigError, match="train differ: the code of (share_of_even|even_tokens) is"):
        other.train(rows)
    with pytest.raises(ConfigError, match=r"ranks have different models: lm_head\.weight is"):
        GRPO(tiny_policy(tied=rank == 1), share_of_even, **options(None))
    # The first 16 rows of a stream are compared before the run.
    rows_of_rank = (PROMPTS[(at + (rank if at >= 16 else 0)) % 7].tolist() for at in range(50))
    with pytest.raises(ConfigError, match="prompts of a step are others on rank 1"):
        GRPO(tiny_policy(), share_of_even, **options(None)).train(rows_of_rank)
    own, there = Path(folder, f"own_{rank}").absolute(), Path.cwd()
    first = options(Path(folder, "first"), max_steps=1, checkpoint_steps=1)
    GRPO(tiny_policy(), share_of_even, **first).train(rows)
    for difference in (write_manifest, lambda path: save_learning_rate_factor(path, 0.5)):
        shutil.copytree(Path(folder, "first", "checkpoints", "step_000001"), own / "checkpoint")
        if rank == 1:
            difference(own / "checkpoint")
        os.chdir(own)
        try:
            with pytest.raises(CheckpointError, match="checkpoint is missing or another checkpoint on rank 1"):
                GRPO(tiny_policy(), share_of_even, **options(None, resume="checkpoint")).train(rows)
        finally:
            os.chdir(there)
            shutil.rmtree(own)


def train(
    folder,
    *,
    held_out=False,
    evaluate_first=False,
    tied=False,
    momentum=None,
    broken_at=None,
    source=None,
    family=None,
    by_steps=False,
    taught=False,
    mixed=False,
    shown=False,
    tasks=False,
    unlike=False,
    uniform=False,
    **changes,
):
    sgd = None if momentum is None else partial(torch.optim.SGD, momentum=momentum)
    broken = [] if broken_at is None else [Break(broken_at)]
    policy = tiny_policy(tied=tied) if source is None else source
    if family is not None:
        policy = tiny_experts(family, vocab_size=VOCABULARY, eos_token_id=list(range(12)))
    reward = even_tokens if by_steps else [of_task("common"), of_task("rare")] if tasks else share_of_even
    teacher = taught if isinstance(taught, str) else other_policy() if taught else None
    rows = PROMPTS
    if taught == "by row":  # the other teacher has larger logits
        teacher = {"first": other_policy(), "second": other_policy()}
        with torch.no_grad():
            teacher["second"].lm_head.weight.mul_(3.0)
        rows = [{"prompt": prompt, "teacher": ("first", "second")[at % 3 % 2]} for at, prompt in enumerate(PROMPTS)]
    if uniform:
        changes |= {"engine": UniformEngine(), "importance_correction": "none"}
    trainer = GRPO(policy, reward, optimizer=sgd, callbacks=broken, teacher=teacher, **options(folder, **changes))
    for callback in broken:
        callback.trainer = trainer
    if HOW == "nan":
        step = trainer._step
        object.__setattr__(step, "policy_loss", breaking(step.policy_loss))
    if evaluate_first:
        trainer.evaluate(PROMPTS[:3])
    if mixed:
        rows = {"some": PROMPTS[:4], "more": TrainSource(PROMPTS[4:], weight=1.5, rewards=[even_tokens, share_of_even])}
    if shown:  # one prompt in three has a demonstration, of another length each
        rows = [
            {"prompt": ids, "demonstration": None if at % 3 else [14, 13][: 1 + at % 2] * (1 + at % 5) + [3]}
            for at, ids in enumerate(PROMPTS)
        ]
    if tasks:
        rows = [{"prompt": ids, "task": "rare" if at == 6 else "common"} for at, ids in enumerate(PROMPTS)]
    if unlike and trainer.ranks.size > 1:
        refuse_unlike_ranks(trainer, rows, folder)
    metrics = trainer.train(rows, eval_prompts=PROMPTS[:3] if held_out else None)
    trainer.save(Path(folder) / "saved")
    if trainer.config.keep_best:
        trainer.save(Path(folder) / "saved_best", best=True)
    if trainer.ranks.is_first:
        (Path(folder) / "metrics.json").write_text(json.dumps(metrics))
        (Path(folder) / "loaded.json").write_text(
            json.dumps(any(kind is not None for kind in (trainer.policy.shards, trainer.policy.stored)))
        )
    if trainer.config.updater == "torch":
        optimizer = trainer.updater._optimizer  # None where the moments lie in host memory
        moments = [value for state in (optimizer.state.values() if optimizer else ()) for value in state.values()]
        held = trainer.ranks.gather([held_bytes(trainer.model.parameters()), held_bytes(moments)])
        (Path(folder) / "held.json").write_text(json.dumps(held))
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder, changes in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        train(folder, **json.loads(changes))

"""Export the policy of a run: a Hugging Face checkpoint with a model card, and its upload to the hub."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

from rlox_grpo._native import __version__
from rlox_grpo.config import records
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.load_checks import ADAPTER_CONFIG
from rlox_grpo.model.policy import Policy
from rlox_grpo.run.checkpoint import export_model, read_state, read_weights
from rlox_grpo.run.files import replace_file
from rlox_grpo.run.history import require_good
from rlox_grpo.update.protocol import Updater, gather_weights

CARD = "README.md"
MARK = "<!-- This card was written by rlox-grpo. A card without this line is never replaced. -->"

WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)
"""Names of the weights of a whole model in a repository."""

_SHOWN = (
    records.PresetConfig,
    records.SamplingConfig,
    records.AdvantageConfig,
    records.LossConfig,
    records.ImportanceConfig,
    records.UpdateConfig,
    records.OptimizerConfig,
    records.LoraConfig,
)
"""Records whose options the model card shows. None of them has folders, servers or prompts."""

_MEASURED = ("reward/mean", "completions/mean_length", "eval/mean_reward", "eval/accuracy", "eval/pass@1")


def make_card(
    config: GRPOConfig,
    *,
    base_model: str,
    is_adapter: bool,
    rewards: Sequence[str],
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Return the model card as Markdown with its metadata. The card contains no path of this machine.

    Args:
        config: options of the run; the card shows those in :data:`_SHOWN` that are not defaults.
        base_model: path or hub id; the card shows only the last part of a path.
        is_adapter: whether the folder has an adapter without its base model.
        rewards: names of the reward functions.
        step, metrics: the last step and its metrics.
    """
    is_path = base_model.startswith((".", "/", "~")) or Path(base_model).exists()
    on_hub = base_model.count("/") == 1 and not is_path  # owner/name
    name = base_model if on_hub else Path(base_model).name
    relation = "adapter" if is_adapter else "finetune"
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        **({"base_model": base_model, "base_model_relation": relation} if on_hub else {}),
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", "rlox-grpo"],
    }
    usual = GRPOConfig()
    shown = [field for record in _SHOWN for field in record.model_fields]
    changed = {
        field: getattr(config, field)
        for field in shown
        if getattr(config, field) is not None and getattr(config, field) != getattr(usual, field)
    }
    measured = {key: metrics[key] for key in _MEASURED if key in metrics and math.isfinite(metrics[key])}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()),  # JSON is YAML
        "---",
        MARK,
        "",
        f"# {name or 'A model'} trained with GRPO",
        "",
        f"{'An adapter for' if is_adapter else 'Trained from'} {f'`{name}`' if name else 'a model of this run'} by "
        "[group relative policy optimization](https://arxiv.org/abs/2402.03300), with rlox-grpo "
        f"{__version__}: {step} steps.",
        "",
        f"Reward functions: {', '.join(f'`{name}`' for name in rewards)}.",
        "",
    ]
    if measured:
        lines += ["| metric of the last step | value |", "| --- | --- |"]
        lines += [f"| `{key}` | {value:.4g} |" for key, value in measured.items()] + [""]
    if changed:
        lines += ["Options that differ from the defaults:", "", "```toml", tomli_w.dumps(changed).strip(), "```", ""]
    return "\n".join(lines)


def _read_foreign_card(folder: Path) -> str | None:
    """Return the card in ``folder`` that this library did not write and must keep; None if there is none.

    A symbolic link is not read: its target may be a file that the user does not publish.
    """
    path = folder / CARD
    if path.is_symlink() or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    return None if MARK in text else text


def export_policy(
    folder: Path,
    policy: Policy,
    updater: Updater,
    ranks: Ranks,
    config: GRPOConfig,
    *,
    merged: bool,
    rewards: Sequence[str],
    step: int,
    metrics: Mapping[str, float],
    checkpoint: Path | None = None,
) -> None:
    """Write the model, its tokenizer and a model card; see :meth:`rlox_grpo.GRPO.save`.

    ``config``, ``rewards``, ``step`` and ``metrics`` are for the model card; see :func:`make_card`. With
    ``checkpoint``, its weights, step and metrics are written instead.
    """
    model: Any = policy.model
    if merged and not hasattr(model, "peft_config"):
        raise ValueError("merged=True: the model has no adapter; call save(path)")
    whole = gather_weights(updater, ranks)
    if ranks.is_first:
        is_local = not updater.is_sharded and not updater.masters and checkpoint is None
        if checkpoint is not None:
            require_good(checkpoint)
            state, whole = read_state(checkpoint), read_weights(checkpoint, whole)
            step, metrics = state["step"], state["last_metrics"]
        adapters = getattr(model, "peft_config", None)
        base = next(iter(adapters.values())).base_model_name_or_path if adapters else getattr(model, "name_or_path", "")
        # Before the model is written: save_pretrained replaces the card in the folder.
        card = _read_foreign_card(folder) or make_card(
            config,
            base_model=str(base or ""),
            is_adapter=adapters is not None and not merged,
            rewards=rewards,
            step=step,
            metrics=metrics,
        )
        export_model(
            folder, model, policy.tokenizer, None if is_local else whole, merged=merged, processor=policy.processor
        )
        if hasattr(model, "save_pretrained"):
            replace_file(folder / CARD, card.encode())


def push_checkpoint(
    save: Callable[[str], None],
    repo_id: str,
    ranks: Ranks,
    *,
    private: bool | None,
    token: str | None,
    revision: str | None,
    message: str,
) -> str:
    """Upload a checkpoint as one commit, and return the URL of the commit.

    ``save`` writes the checkpoint to a folder, on every rank. The other arguments, and the errors, are those of
    :meth:`rlox_grpo.GRPO.push_to_hub`.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}: {error}") from None
    with ranks.failing_together(), tempfile.TemporaryDirectory() as folder:
        save(folder)
        address = ""
        if ranks.is_first:
            api = HfApi(token=token)
            repository = api.create_repo(repo_id, private=private, exist_ok=True)
            is_whole = not (Path(folder) / ADAPTER_CONFIG).exists()
            files = api.list_repo_files(repository.repo_id, revision=revision)
            if is_whole and ADAPTER_CONFIG in files:
                raise ValueError(
                    f"{repo_id} holds an adapter ({ADAPTER_CONFIG}), which transformers and peft would load in place "
                    "of the whole model: choose another repository or branch"
                )
            keeps_card = CARD in files and MARK not in Path(
                api.hf_hub_download(repository.repo_id, CARD, revision=revision)
            ).read_text(encoding="utf-8")
            commit = api.upload_folder(
                repo_id=repository.repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                ignore_patterns=[CARD] if keeps_card else None,
                # from_pretrained prefers some names to others, so an earlier model could be loaded.
                delete_patterns=list(WEIGHTS) if is_whole else None,
            )
            address = str(commit.commit_url)
        return str(ranks.gather(address)[0])

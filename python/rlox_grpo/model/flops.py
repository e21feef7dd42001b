"""Token counts, padding saved, and MFU of the update."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox_grpo.model.forward import is_worth_packing
from rlox_grpo.model.prefix_tree import build_prefix_tree, find_owners
from rlox_grpo.types import Batch, Int64Array

# Peak dense bfloat16 TFLOP/s from NVIDIA's data sheets (half the printed figure where that one assumes sparsity).
# The first pattern that matches the device's name applies.
_PEAK_TFLOPS = (
    (r"\bMIG\b", None),  # a slice of a device
    (r"\bB200\b", 2250.0),
    (r"\bH[12]00 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bG?H[12]00\b", 989.5),
    (r"\bA[18]00\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX A6000\b", 154.8),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)


@dataclass(frozen=True)
class UpdateWork:
    """Counts of one pass over the batches of an optimizer step.

    Attributes:
        row_tokens: prompt and completion tokens of all rows. A token that several rows share counts once for each row.
        forwarded: tokens that enter the decoder, without padding.
        padding: padding positions that enter the decoder. Padding inside packed attention is not counted.
        prompt_tokens: prompt tokens of all rows.
        saved: prompt tokens that are not forwarded, because another row of the batch forwards them.
        completion_tokens: completion tokens of all rows.
        completion_saved: completion tokens that another row forwards, without the last token of each row.
        predicted: tokens for which the output layer runs. A token that several rows share counts once.
        pairs: (query, key) pairs of causal attention, including each token with itself.
    """

    row_tokens: int = 0
    forwarded: int = 0
    padding: int = 0
    prompt_tokens: int = 0
    saved: int = 0
    completion_tokens: int = 0
    completion_saved: int = 0
    predicted: int = 0
    pairs: int = 0


@dataclass(frozen=True)
class ModelSize:
    """Model size for counting FLOPs.

    Attributes:
        body, body_trained: all and trainable parameters, without embeddings and output layer.
        head, head_trained: all and trainable parameters of the output layer, tied or not; 0 if it is unknown.
        attention_width: layers × heads × head size; 0 if it is unknown or if attention is windowed.
    """

    body: int
    body_trained: int
    head: int = 0
    head_trained: int = 0
    attention_width: int = 0


def count_update_work(batches: Iterable[Batch], *, shares_prompts: bool) -> UpdateWork:
    """Count the tokens and attention pairs of one forward pass over ``batches``.

    Args:
        batches: micro-batches of one optimizer step.
        shares_prompts: whether batches are packed where packing saves enough tokens
            (:attr:`rlox_grpo.model.forward.Forward.shares_prompts`). A packed batch forwards the common prefix of rows
            once, leaves out the last token of each completion, and has no padding.
    """
    return add_work(astuple(_count_batch_work(batch, shares_prompts)) for batch in batches)


def _count_batch_work(batch: Batch, shares_prompts: bool) -> UpdateWork:
    tree = build_prefix_tree(batch)
    prompts: Int64Array = tree.prompt_lengths[tree.group_indices]  # of each row
    prompt_tokens, completion_tokens = int(prompts.sum()), int(tree.lengths.sum())
    row_tokens = prompt_tokens + completion_tokens
    predicted = batch.predicted_mask.cpu().numpy()
    if not (shares_prompts and is_worth_packing(tree, batch)):
        return UpdateWork(
            row_tokens=row_tokens,
            forwarded=row_tokens,
            padding=batch.input_ids.numel() - row_tokens,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            predicted=int(predicted.sum()),
            pairs=_count_causal_pairs(prompts + tree.lengths),
        )
    # For each forwarded completion token: its row, and its index in the completion.
    row, step = tree.forwarded.nonzero()
    return UpdateWork(
        row_tokens=row_tokens,
        forwarded=tree.num_tokens,
        prompt_tokens=prompt_tokens,
        saved=prompt_tokens - int(tree.prompt_lengths.sum()),
        completion_tokens=completion_tokens,
        completion_saved=int(np.maximum(tree.lengths - 1, 0).sum()) - len(row),
        predicted=int(find_owners(tree.owner, predicted).sum()),
        # A completion token attends to its prompt, the tokens before it, and itself: prompt + step + 1 pairs.
        pairs=_count_causal_pairs(tree.prompt_lengths) + int((prompts[row] + step + 1).sum()),
    )


def add_work(works: Iterable[Iterable[int]]) -> UpdateWork:
    """Return the sum of the counts of several ranks, each as ``astuple`` of an :class:`UpdateWork` gives them."""
    return UpdateWork(*map(sum, zip(*works, strict=True)))


def profile_update(
    work: UpdateWork,
    *,
    num_updates: int,
    seconds: float,
    num_ranks: int = 1,
    size: ModelSize | None = None,
    peak_flops: float | None = None,
) -> dict[str, float]:
    """Return the ``perf/*`` metrics of the update. A metric without a value in this step is left out, never NaN.

    Args:
        work: counts of one pass over the micro-batches of all ranks.
        num_updates: passes over them.
        seconds: duration of the update, ``time/update_s``.
        num_ranks: ranks that share the work, each with a device.
        size: size of the model; None leaves ``perf/mfu`` out.
        peak_flops: peak of the device in FLOP/s; None leaves ``perf/mfu`` out.

    Returns:
        - ``perf/padding_share``: share of padding in the forwarded positions.
        - ``perf/prompt_tokens_saved_share``, ``perf/completion_tokens_saved_share``: share of prompt and completion
          tokens that are not forwarded again.
        - ``perf/update_tokens_per_s``: tokens of all rows, where a prompt is counted with each completion, so that
          packed and padded batches can be compared.
        - ``perf/mfu``: FLOPs of the forwarded tokens over the device's peak. Recomputed activations do not count.
    """
    if not num_updates or not work.forwarded:
        return {}
    metrics = {
        "perf/padding_share": work.padding / (work.forwarded + work.padding),
        "perf/prompt_tokens_saved_share": work.saved / work.prompt_tokens,
        "perf/completion_tokens_saved_share": work.completion_saved / max(work.completion_tokens, 1),
    }
    if seconds > 0:
        metrics["perf/update_tokens_per_s"] = num_updates * work.row_tokens / seconds
        if size is not None and peak_flops is not None:
            metrics["perf/mfu"] = num_updates * count_training_flops(size, work) / (seconds * peak_flops * num_ranks)
    return metrics


def count_training_flops(size: ModelSize, work: UpdateWork) -> float:
    """Return the floating-point operations of a forward and backward pass for ``work``, without recomputation.

    For each token, a parameter costs 2 in the forward pass, 2 for the gradient of its input and 2 for its own gradient:
    6 if it is trained (arXiv:2001.08361), 4 if it is frozen. A (query, key) pair costs 12 for each unit of attention
    width: 2 forward and 4 backward, for scores and for values (arXiv:2204.02311, appendix B; here causal pairs only).
    """
    # 2 for the forward pass and 2 for the gradient of the input make 4; a trained parameter has 2 more.
    body = (4 * size.body + 2 * size.body_trained) * work.forwarded
    head = (4 * size.head + 2 * size.head_trained) * work.predicted
    return float(body + head + 12 * size.attention_width * work.pairs)


def measure_model(model: nn.Module) -> ModelSize | None:
    """Return parameters and attention width of ``model``; None for a mixture of experts."""
    adapted: Any = model
    config: Any = getattr(model, "config", None)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    head = adapted.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_weight = getattr(head, "weight", None)
    # An input embedding is looked up and multiplies nothing. A tied weight counts once, as the output layer.
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    body = [p for p in model.parameters() if id(p) not in looked_up and p is not head_weight]
    return ModelSize(
        body=sum(p.numel() for p in body),
        body_trained=sum(p.numel() for p in body if p.requires_grad),
        head=0 if head_weight is None else head_weight.numel(),
        head_trained=head_weight.numel() if head_weight is not None and head_weight.requires_grad else 0,
        attention_width=_find_attention_width(config),
    )


def look_up_peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device by its CUDA name; None if the table does not list it."""
    matching = (peak for pattern, peak in _PEAK_TFLOPS if re.search(pattern, device_name))
    peak = next(matching, None)
    return None if peak is None else peak * 1e12


def find_peak_flops(device: torch.device) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a torch device; None if it is not a CUDA device."""
    if device.type != "cuda":
        return None
    return look_up_peak_flops(torch.cuda.get_device_name(device))


def _count_causal_pairs(lengths: Int64Array) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def _find_attention_width(config: Any) -> int:
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    # With a sliding window, the causal count of pairs would be too large.
    if not layers or not heads or getattr(text, "sliding_window", None):
        return 0
    return int(layers * heads * (getattr(text, "head_dim", None) or text.hidden_size // heads))

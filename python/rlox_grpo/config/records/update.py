"""Options of the update: batches, optimizer, sharding over ranks and LoRA."""

from __future__ import annotations

from typing import Literal

from rlox_grpo.config.records.option import LONGEST_TIMEOUT, SET, Record, option

_DEEPSPEED = {"updater": ("deepspeed",)}

LORA_LEARNING_RATE = 1e-5


class UpdateConfig(Record, title="Update"):
    """Optimizer steps and forward passes of a training step."""

    updates_per_batch: int = option(1, "Passes over each batch of completions (μ).", ge=1)
    mini_batches: int = option(
        1, "Parts of a batch, split by prompts; each part is one optimizer step in each pass.", ge=1
    )
    micro_batch_tokens: int | None = option(
        None,
        "Maximum number of tokens in one forward pass, including padding. None: 16,384; on a CPU fewer, down to 1,024: "
        "as many as need an estimated 2 GiB of activations, or 4 GiB if a whole group needs more than 2.",
        ge=1,
        resumable=True,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Precision of the forward and backward passes; weights in training and optimizer state stay float32. auto: "
        "bfloat16 on a GPU that computes in bfloat16, and on a CPU if a trial of the model's sizes is faster and the "
        "weights are dithered; otherwise float32. A resumed run keeps its precision.",
        source="TRL",
    )
    fp32_lm_head: bool | Literal["auto"] = option(
        "auto",
        "With bfloat16 arithmetic, keep the products of the output layer in float32, in the update, the reference, the "
        "teacher and the engine, instead of rounding logits to bfloat16. auto: unless the output layer has an adapter "
        "or is not a linear one. Without it, start vLLM servers with `rlox-grpo serve --no-fp32-lm-head`.",
        source="ScaleRL (arXiv:2510.13786), after MiniMax-M1 (arXiv:2506.13585)",
    )
    dither_weights: bool | Literal["auto"] = option(
        "auto",
        "Begin with float32 weights drawn from the numbers that round to the checkpoint's bfloat16 weights, so that "
        "products in bfloat16 see updates smaller than the spacing of bfloat16. At the start, the function of the "
        "model is unchanged. auto: with bfloat16 arithmetic, weights that are stored in bfloat16, unless the model has "
        "an adapter. True: other weights too, such as those of a GGUF file.",
    )
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto",
        "Recompute activations in the backward pass, to save memory. auto: only on a GPU whose memory is too small "
        "without it, by the estimate of `rlox-grpo memory`.",
        resumable=True,
    )
    freeze_vision: bool = option(
        False,
        "Freeze the vision tower and the projection of a vision-language model. With lora_rank both are always "
        "frozen, unless lora_target_modules names their layers.",
        only_with={"lora_rank": (0,)},
    )
    torch_compile: bool = option(
        False, "Compile the forward and backward passes with torch.compile (transformers models only)."
    )


class OptimizerConfig(Record, title="Optimizer"):
    """AdamW, its learning-rate schedule and gradient clipping."""

    learning_rate: float = option(
        1e-6,
        "Peak learning rate. With lora_rank the default is 1e-5; a preset of a published system keeps its own rate.",
        gt=0,
        source="TRL; for LoRA ten times this rate, as in LoRA Without Regret (Schulman et al. 2025)",
    )
    optim: Literal["adamw", "adamw_8bit"] = option(
        "adamw",
        "AdamW with moments of 4 bytes, or with moments of 1 byte in blocks of 256 (bitsandbytes, the extra "
        "'adamw-8bit').",
        only_with={"updater": ("torch",), "shard_parameters": (False,)},
        hint="TRL's adamw_torch is 'adamw', adamw_bnb_8bit is 'adamw_8bit'",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Decay of the learning rate after the warm-up."
    )
    warmup_steps: int = option(0, "Steps of linear warm-up.", ge=0)
    min_lr_ratio: float = option(
        0.0,
        "Learning rate at the end of the decay, as a share of the peak.",
        ge=0,
        le=1,
        only_with={"lr_schedule": ("linear", "cosine")},
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW, on matrices only.", ge=0)
    decay_vectors: bool = option(
        False, "Apply the weight decay to norms and biases too.", only_with={"weight_decay": SET}
    )
    adam_beta1: float = option(0.9, "Decay rate of AdamW's first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay rate of AdamW's second moment.", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, "Number that is added to the square root of AdamW's second moment.", gt=0)
    max_grad_norm: float = option(1.0, "Clip the norm of the gradient at this value; 0 does not clip.", ge=0)


class UpdaterConfig(Record, title="Ranks and sharding"):
    """The updater, and sharding over ranks."""

    updater: Literal["torch", "deepspeed"] = option(
        "torch", "Library of the optimizer step: torch, with FSDP2 for sharding, or DeepSpeed ZeRO."
    )
    shard_parameters: bool = option(
        False,
        "Shard parameters, gradients and optimizer state over ranks (FSDP2).",
        only_with={"updater": ("torch",)},
        resumable=True,
    )
    gather_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Data type in which FSDP2 gathers the parameters of a transformer block. Shards, optimizer state and gradient "
        "sums are always float32. bfloat16 halves the communication, and also rounds norms and biases.",
        only_with={"shard_parameters": (True,), "dtype": ("bfloat16",)},
    )
    zero_stage: int = option(
        2,
        "What DeepSpeed shards over ranks. 0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters.",
        ge=0,
        le=3,
        only_with=_DEEPSPEED,
        resumable=True,
    )
    offload_optimizer: bool = option(
        False,
        "Keep optimizer state and float32 weights in host memory; with dtype='bfloat16' the device holds bfloat16 "
        "weights. With DeepSpeed, zero_stage must be 1 to 3.",
        only_with=(_DEEPSPEED, {"updater": ("torch",), "dtype": ("bfloat16",)}),
        resumable=True,
    )
    offload_params: bool = option(
        False,
        "Keep DeepSpeed's parameters in host memory; zero_stage must be 3.",
        only_with=_DEEPSPEED,
        resumable=True,
    )
    rank_timeout: float = option(
        30.0, "Heartbeat timeout between ranks, in seconds.", gt=0, le=LONGEST_TIMEOUT, resumable=True
    )

    @property
    def shards_weights(self) -> bool:
        """Whether a rank holds only parts of the parameters."""
        return self.shard_parameters or (self.updater == "deepspeed" and self.zero_stage == 3)


class LoraConfig(Record, title="LoRA"):
    """A trainable adapter on frozen weights."""

    lora_rank: int = option(0, "Rank of the LoRA adapter to train instead of the weights; 0: no adapter.", ge=0)
    lora_alpha: float | None = option(
        None, "Scale of the adapter; None: twice the rank.", gt=0, only_with={"lora_rank": SET}
    )
    lora_target_modules: str | tuple[str, ...] = option(
        "all-linear", "Modules that get an adapter.", only_with={"lora_rank": SET}
    )
    load_in_4bit: bool = option(
        False,
        "Load the model's frozen linear layers in 4 bits, NF4 with quantized scales (QLoRA; bitsandbytes, the extra "
        "'qlora'). The model must be a path, a hub id or the folder of an adapter.",
        only_with={
            "engine": ("hf",),
            "updater": ("torch",),
            "shard_parameters": (False,),
            "offload_optimizer": (False,),
            "torch_compile": (False,),
            "reference": ("auto", "adapter_off", "none"),
        },
        source="arXiv:2305.14314",
    )

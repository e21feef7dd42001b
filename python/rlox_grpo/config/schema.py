"""Every choice of a run in one frozen record: read from TOML, from keywords, or from a preset and what overrides it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlox_grpo.config.checks import contradictions
from rlox_grpo.config.choices import KLEstimator, KLSchedule, LossAggregation, PolicyLoss, SinkName
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.errors import ConfigError, nearest
from rlox_grpo.prompts.templates import TEMPLATES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


CLEARABLE = ("dual_clip", "delta", "kl_target", "prompt_template")
"""Fields that presets set and a file or a command line may clear, by the word "none"."""


class GRPOConfig(BaseModel):
    """The settings of a run. Fields that a preset names take its value unless they are given.

    Sources of the defaults: DeepSeekMath (arXiv:2402.03300, eq. 3 and 4) for the algorithm; TRL for ``std_epsilon``
    and the learning rate. docs/algorithm.md gives each formula with its symbol.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field("grpo", description="Named published variant that sets the fields below it names.")
    published: bool = Field(False, description="Bring back the defects of the preset's source; docs/presets.md.")
    prompt_template: str | None = Field(
        None, description="How rows without a prompt column are asked; rlox_grpo.prompts.templates has each."
    )

    # Sampling
    group_size: int = Field(8, ge=1, description="Completions for each prompt (G).")
    prompts_per_step: int = Field(16, ge=1, description="Prompts in a step (B); a step has B·G rows.")
    max_new_tokens: int = Field(512, ge=1, description="Longest completion, its end token included.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs are taken at it too.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus: keep the smallest set with this probability.")
    top_k: int = Field(0, ge=0, description="Keep the k likeliest tokens; 0 keeps all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Keep tokens at least this likely against the likeliest.")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion.")
    max_rollout_rows: int | None = Field(None, ge=1, description="Rows that an engine decodes at once.")

    # Engine
    engine: Literal["hf", "vllm", "vllm_server"] = Field("hf", description="Where completions come from.")
    engine_max_length: int | None = Field(
        None, ge=2, description="Longest prompt with its completion in vLLM; None is the model's own limit."
    )
    engine_sleep: bool = Field(True, description="On a GPU, vLLM gives its memory to the trainer during updates.")
    gpu_memory_utilization: float = Field(0.3, gt=0, le=1, description="Share of the GPU's memory for vLLM.")
    server_urls: tuple[str, ...] = Field((), description="http://host:port of each server of engine='vllm_server'.")
    server_timeout: float = Field(600.0, gt=0, description="Seconds that a rollout or a sync has, retries included.")
    server_sync_dir: str | None = Field(
        None, description="Folder that trainer and servers share for new weights; needed where they are on other hosts."
    )
    server_nccl_address: str | None = Field(
        None, description="This host's address; new weights then go from GPU to GPU by NCCL. Untested."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share one vLLM model, under torchrun.")

    # Train/inference mismatch
    importance_correction: Literal["auto", "none", "token", "sequence", "sequence_mean"] = Field(
        "auto",
        description="Weigh the policy term by the trainer's probability over the sampler's: by token, by whole "
        "sequence, or by its geometric mean; auto is token where the engine is not exact, and none where it is.",
    )
    importance_mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Whether such a ratio outside of its bounds is moved to the bound, or becomes 0."
    )
    importance_cap: float = Field(2.0, gt=0, description="Upper bound of the ratio.")
    importance_floor: float = Field(0.0, ge=0, description="Lower bound of the ratio.")
    bypass_old_log_probs: bool = Field(
        False, description="Take the sampler's log-probs for the old policy's: one forward less, and no correction."
    )

    # Rewards and advantages
    reward_weights: tuple[float, ...] | None = Field(None, description="A weight for each reward function.")
    reward_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds that a reward function of yours has for a completion: it then runs in worker processes, "
        "one completion a call. None calls it here with the whole batch, and waits.",
    )
    reward_workers: int | None = Field(None, ge=1, description="Those processes, for each function; None: the cores.")
    on_reward_error: Literal["stop", "none"] = Field(
        "stop", description="Whether a reward function of yours that fails stops the run, or scores None."
    )
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        "sum_then_normalize",
        description="Whether advantages come of the weighted sum of the rewards, or each reward is normalised in its "
        "group first (GDPO).",
    )
    reward_scaling: Literal["group", "batch", "whiten", "none"] = Field(
        "group",
        description="Divide by the standard deviation of the group's rewards, of the batch's, of the batch's less "
        "their baselines (REINFORCE++), or not at all.",
    )
    ddof: int = Field(1, ge=0, description="Delta degrees of freedom of the standard deviation.")
    std_epsilon: float = Field(1e-4, ge=0, description="Added to the standard deviation.")
    baseline: Literal["mean", "leave_one_out", "batch"] = Field(
        "mean", description="What is subtracted from a reward: its group's mean, that of the others, or the batch's."
    )
    zero_variance: Literal["drop", "keep", "refill"] = Field(
        "drop",
        description="Groups whose rewards are all equal leave the update and its denominators, stay, or are replaced "
        "by groups of other prompts (dynamic sampling).",
    )
    max_refills: int = Field(3, ge=1, description="Times a step that zero_variance='refill' samples more.")
    curriculum: Literal["none", "pass_rate"] = Field(
        "none", description="pass_rate draws prompts by what their measured pass rate says they can still teach."
    )
    curriculum_floor: float = Field(
        0.1, gt=0, le=1, description="Least chance with which the curriculum takes a prompt when its turn comes."
    )
    max_group_size: int | None = Field(
        None, ge=1, description="Sample prompts that are hard or easy up to this often; always group_size when None."
    )

    # Loss
    clip_low: float = Field(0.2, ge=0, le=1, description="ε below: the ratio is clipped at 1 − clip_low.")
    clip_high: float = Field(0.2, ge=0, description="ε above: the ratio is clipped at 1 + clip_high.")
    loss_aggregation: LossAggregation = Field("sequence_mean", description="How token losses become one number.")
    kl_coef: float = Field(0.0, ge=0, description="Weight β of the KL penalty against the reference policy.")
    kl_estimator: KLEstimator = Field("k3", description="How that KL is measured per token.")
    policy_loss: PolicyLoss = Field("clip", description="What a token's loss is; see rlox_grpo.loss.policy.")
    dual_clip: float | None = Field(None, gt=1, description="clip: most loss of a token with A < 0, in units of −A.")
    delta: float | None = Field(
        None, gt=0, description="Highest ratio of the unclipped branch, as in TRL; dppo's weight."
    )
    sapo_temperatures: tuple[float, float] = Field((1.0, 1.05), description="sapo: τ for A > 0 and for the others.")
    vespo_shape: tuple[float, float, float, float] = Field(
        (2.0, 3.0, 3.0, 2.0), description="vespo: k and λ for A ≥ 0, k and λ for A < 0."
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Whether the penalty is a term of the loss, or is taken off a completion's reward."
    )
    kl_bias_correction: bool = Field(False, description="Multiply the KL estimate by the ratio (DeepSeek-V3.2).")
    kl_schedule: KLSchedule = Field("constant", description="How kl_coef moves; see rlox_grpo.loss.kl_weight.")
    kl_coef_end: float = Field(0.0, ge=0, description="linear, cosine: where kl_coef ends.")
    kl_target: float | None = Field(None, gt=0, description="adaptive: the KL in nats a token that kl_coef aims at.")
    kl_horizon: float = Field(10_000.0, gt=0, description="adaptive: completions over which kl_coef follows the error.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus, per token; below 0 it is a penalty.")
    top_entropy_share: float = Field(
        1.0, gt=0, le=1, description="Share of the tokens, the most uncertain, whose policy loss counts."
    )
    train_end_token: bool = Field(True, description="Train on the token that ends a completion.")
    mask_truncated: bool = Field(False, description="Leave truncated completions out of the loss.")
    reference: Literal["auto", "none", "frozen", "periodic", "adapter_off", "server"] = Field(
        "auto", description="Reference policy; auto takes none when nothing needs it."
    )
    reference_offload: bool = Field(False, description="A reference's copy rests in host memory between uses.")
    reference_refresh_steps: int | None = Field(
        None, ge=1, description="Steps after which a periodic reference takes over the policy's weights."
    )
    reference_mix: float = Field(
        1.0, gt=0, le=1, description="The policy's share in that; 1 replaces the reference's weights, less mixes."
    )
    reference_url: str | None = Field(None, description="http(s)://host:port of `rlox-grpo serve-reference`.")
    reference_token_file: str | None = Field(
        None, description="File with the reference server's token; None: RLOX_GRPO_REFERENCE_TOKEN holds it."
    )
    reference_timeout: float = Field(
        120.0, gt=0, description="Seconds for an answer of the reference server, retries included."
    )

    # Update
    updater: Literal["torch", "deepspeed"] = Field("torch", description="What applies the gradient.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="What DeepSpeed shards over ranks: 1 moments, 2 gradients too, 3 parameters too; 0 nothing."
    )
    offload_optimizer: bool = Field(False, description="DeepSpeed keeps moments and master weights in host memory.")
    offload_params: bool = Field(False, description="DeepSpeed keeps sharded parameters in host memory; zero_stage 3.")
    shard_parameters: bool = Field(
        False, description="updater='torch': parameters, gradients and moments in shards over ranks (FSDP2)."
    )
    rank_timeout: float = Field(
        30.0, gt=0, description="Seconds without a sign of life after which another rank counts as dead."
    )
    updates_per_batch: int = Field(1, ge=1, description="Optimizer steps on each batch of completions (μ).")
    mini_batches: int = Field(
        1, ge=1, description="Parts of a batch, by prompts; each is an optimizer step, updates_per_batch times over."
    )
    micro_batch_tokens: int = Field(16_384, ge=1, description="Padded tokens that one forward may hold.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where the decay ends, as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay, on matrices only.")
    decay_vectors: bool = Field(False, description="Decay norms and biases too.")
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0, description="Clip the gradient's norm at this; 0 does not clip.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Arithmetic of forward and backward; weights and optimizer stay float32."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    torch_compile: bool = Field(
        False, description="Run the update's forward and backward through torch.compile (transformers models)."
    )
    lora_rank: int = Field(0, ge=0, description="Train a LoRA adapter of this rank instead of the weights; 0 is off.")
    lora_alpha: float | None = Field(None, gt=0, description="LoRA scale; twice the rank when it is not given.")
    lora_target_modules: str | tuple[str, ...] = Field("all-linear", description="Modules that get an adapter.")

    async_steps: int = Field(
        0,
        ge=0,
        description="Steps that generation runs ahead of the update; 0 samples each batch from current weights.",
    )

    # Run
    max_steps: int | None = Field(None, ge=1, description="Steps to train; overrides n_epochs.")
    seed: int = Field(0, ge=0, description="Seeds prompts' order, sampling and initial adapters.")
    output_dir: str | None = Field(None, description="The run's folder; None writes nothing.")
    resume: str = Field("auto", description="auto (continue what output_dir holds), never, or a checkpoint's path.")
    resume_changes: tuple[str, ...] = Field(
        (),
        description="Options that a resumed run may change, such as learning_rate; 'rewards' permits edited rewards.",
    )
    checkpoint_steps: int = Field(50, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="How many of the newest checkpoints stay.")
    eval_steps: int = Field(0, ge=0, description="Steps between evaluations of eval_prompts; 0 is never.")
    eval_samples: int = Field(4, ge=1, description="Completions for each prompt in an evaluation.")
    eval_greedy: bool = Field(False, description="Also evaluate with the likeliest token each time.")
    log_completions: int = Field(32, ge=0, description="Completions written to the run's folder each step.")
    guards: bool = Field(True, description="Warn, once for each, when metrics say that the run is going wrong.")
    log_to: tuple[SinkName, ...] = Field(("console",), description="Metric sinks beside the run's metrics.jsonl.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_and_apply_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for name in given:
            if name not in cls.model_fields:
                raise ConfigError(f"unknown option {name!r}{nearest(str(name), list(cls.model_fields))}")
        preset = given.get("preset", "grpo")
        if preset not in PRESETS:
            raise ConfigError(f"unknown preset {preset!r}{nearest(str(preset), list(PRESETS))}")
        asked = given.get("published", False)
        if not isinstance(asked, bool):  # nothing else may become True after this
            raise ConfigError(f"published: expected true or false, got {asked!r}")
        published = PRESETS[preset].published_values if asked else {}
        if asked and not published:
            raise ConfigError(f"published=True: preset {preset!r} has no defect that it brings back")
        cleared = {name: None for name in CLEARABLE if given.get(name) == "none"}
        return {**PRESETS[preset].values, **published, **given, **cleared}

    @field_validator("output_dir", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _fields_that_depend_on_each_other(self) -> GRPOConfig:
        if self.prompt_template is not None and self.prompt_template not in TEMPLATES:
            known = nearest(self.prompt_template, list(TEMPLATES))
            raise ConfigError(f"unknown prompt_template {self.prompt_template!r}{known}")
        for contradiction in contradictions(self):
            raise ConfigError(contradiction)
        return self

    @property
    def shards_weights(self) -> bool:
        """Whether a rank holds parts of the parameters only."""
        return self.shard_parameters or (self.updater == "deepspeed" and self.zero_stage == 3)

    @classmethod
    def create(cls, **options: Any) -> GRPOConfig:
        """The configuration with these fields.

        Raises:
            ConfigError: An unknown name (with the nearest known one) or a value out of its range, every one named.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(describe(error)) from None

    def to_toml(self, origin: Mapping[str, Any] | None = None) -> str:
        """Every field as resolved, after ``origin``'s keys; what is None is left out, as TOML has no null.

        Where that would bring back a preset's value it is written as "none".
        """
        preset = PRESETS[self.preset].values
        cleared = {name: "none" for name in CLEARABLE if getattr(self, name) is None and preset.get(name) is not None}
        return tomli_w.dumps({**(origin or {}), **self.model_dump(exclude_none=True), **cleared})


def read_toml(path: str | Path) -> dict[str, Any]:
    """The parsed document. Raises ConfigError naming the file, and the line of a syntax error."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The document that ``text`` spells. Raises ValueError where it is not TOML."""
    document: dict[str, Any] = tomllib.loads(text)
    return document


def describe(error: ValidationError) -> str:
    """Pydantic's findings, one a line: the field, what is wrong, the value."""
    lines = []
    for finding in error.errors():
        name = ".".join(str(part) for part in finding["loc"])
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            lines.append(str(cause))
        else:
            lines.append(f"{name}: {finding['msg'][0].lower()}{finding['msg'][1:]}, got {finding['input']!r}")
    return "\n".join(lines)

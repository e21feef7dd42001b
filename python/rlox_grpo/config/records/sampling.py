"""Options of presets, sampling and generation engines."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from rlox_grpo.config.records.option import IMPORT_PATH, LONGEST_TIMEOUT, Door, Record, option

ENGINES = ("hf", "vllm", "vllm_server")
"""The built-in engines: modules or packages of ``rlox_grpo/rollout/engines``."""

INEXACT_ENGINES = ("vllm", "vllm_server", IMPORT_PATH)
"""Engines whose log-probs may not be exactly the trainer's."""
_EITHER_VLLM = {"engine": ("vllm", "vllm_server")}
_vllm_option = partial(option, only_with={"engine": ("vllm",)}, resumable=True)
_server_option = partial(option, only_with={"engine": ("vllm_server",)}, resumable=True)


class PresetConfig(Record, title="Preset"):
    """The preset, which gives other options their values."""

    preset: str = option("grpo", "Published variant of GRPO that sets other options; `rlox-grpo presets` lists them.")
    published: bool = option(
        False, "Reproduce the defects of the preset's source; docs/reference/presets.md names them."
    )


class SamplingConfig(Record, title="Sampling"):
    """Number of completions, sampling distribution and choice of prompts."""

    group_size: int = option(8, "Completions for each prompt (G).", ge=1, only_training=True)
    prompts_per_step: int = option(
        16, "Prompts in a step (B); a step samples B·G completions.", ge=1, only_training=True
    )
    max_new_tokens: int = option(512, "Maximum length of a completion in tokens, including the end token.", ge=1)
    temperature: float = option(
        1.0,
        "Sampling temperature; the update computes log-probs at the same temperature.",
        gt=0,
        hint="for greedy decoding in evaluations set eval_greedy=True or call evaluate(greedy=True)",
    )
    top_p: float = option(1.0, "Nucleus sampling: keep the smallest set of tokens with this probability.", gt=0, le=1)
    top_k: int = option(0, "Keep the k most likely tokens; 0 keeps all.", ge=0)
    min_p: float = option(
        0.0, "Keep tokens whose probability is at least this share of the most likely token's.", ge=0, lt=1
    )
    sampling_mask: Literal["auto", "require", "none"] = option(
        "auto",
        "With top_p, top_k or min_p, log-probs of the update are normalised over the ids that could be drawn. auto: "
        "normalise over these ids if the engine returns them, otherwise warn and normalise over all ids; require: "
        "raise an error if the engine does not return them; none: normalise over all ids, which trains another "
        "distribution than the one that was sampled from.",
        source="DeepSeek-V3.2, arXiv:2512.02556, section 3.1",
        only_training=True,
    )
    stop: tuple[str, ...] = option((), "Strings that end a completion.")
    generation_kwargs: dict[str, bool | int | float | str | list[int] | list[str]] = option(
        {},
        "Further parameters of the engine by vLLM's names, such as {stop_token_ids = [2]}; docs/guides/vllm.md lists "
        "them.",
    )
    async_steps: int = option(
        0,
        "Maximum number of steps that generation runs ahead of the update. 0: sample with the current weights.",
        ge=0,
        only_training=True,
    )
    curriculum: Literal["none", "pass_rate"] = option(
        "none",
        "none: draw prompts in random order; pass_rate: skip prompts that are always or never solved.",
        only_training=True,
    )
    curriculum_floor: float = option(
        0.1,
        "Minimum probability with which the curriculum takes a prompt.",
        gt=0,
        le=1,
        only_with={"curriculum": ("pass_rate",)},
        only_training=True,
    )
    max_group_size: int | None = option(
        None,
        "Maximum number of completions for prompts that are rarely or mostly solved, in multiples of group_size; None: "
        "group_size for every prompt.",
        ge=1,
        only_training=True,
    )


class EngineConfig(Record, title="Generation engine"):
    """The generation engine."""

    engine: Annotated[Any, Door(ENGINES, "an engine")] = option(
        "hf",
        "hf: the built-in engine; vllm: vLLM in this process; vllm_server: vLLM servers over HTTP. Your own: an object "
        "with the methods of GenerationEngine, or module:make_engine; docs/guides/own_parts.md shows how to write one.",
    )
    max_rollout_rows: int | None = option(
        None,
        "Maximum number of sequences that the engine decodes at once; None: the engine's own limit.",
        ge=1,
        only_with={"engine": ("hf", "vllm")},
        resumable=True,
    )
    cuda_graphs: bool = option(
        True,
        "Replay decoding steps of the built-in engine on a GPU as CUDA graphs, if a test of a few steps gives equal "
        "logits.",
        only_with={"engine": ("hf",)},
        resumable=True,
    )
    engine_max_length: int | None = option(
        None,
        "Maximum length of a prompt and its completion in vLLM, in tokens; None: the model's own limit.",
        ge=2,
        only_with=_EITHER_VLLM,
    )
    engine_sleep: bool = _vllm_option(True, "Let vLLM free its memory on a GPU during updates.")
    gpu_memory_utilization: float = _vllm_option(0.3, "Share of the GPU's memory for vLLM.", gt=0, le=1)
    tensor_parallel_size: int = _vllm_option(1, "Ranks that share one vLLM model, under torchrun.", ge=1)
    check_weights: bool = option(
        True,
        "After each weight sync, compare the log-probs of 16 fixed tokens in vLLM with the trainer's.",
        only_with=_EITHER_VLLM,
        resumable=True,
    )
    check_weights_tolerance: float | None = option(
        None,
        "Largest mean difference that check_weights accepts, in nats. None: 0.01 in float32, 0.25 in bfloat16 and in "
        "lower precision.",
        gt=0,
        only_with={"check_weights": (True,), **_EITHER_VLLM},
        resumable=True,
    )
    server_urls: tuple[str, ...] = _server_option((), "URL of each vLLM server: http://host:port.")
    server_timeout: float = _server_option(
        600.0,
        "Timeout of a rollout or a weight sync on the servers, in seconds, including retries.",
        gt=0,
        le=LONGEST_TIMEOUT,
    )
    server_sync_dir: str | None = _server_option(
        None,
        "Folder shared with the servers for new weights; needed when they run on other hosts. `ray:`: servers that Ray "
        "starts read a file of rank 0 through Ray's object store.",
    )
    server_nccl_address: str | None = _server_option(
        None, "Address of this host; new weights then go from GPU to GPU by NCCL. Untested."
    )

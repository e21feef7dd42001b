"""The engine ``vllm``: vLLM in the trainer's process. On a GPU it frees its memory during the update."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlox_grpo.distributed.host_group import HostGroup
from rlox_grpo.errors import EngineError
from rlox_grpo.model.adapted_layers import get_base
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.calls import make_groups
from rlox_grpo.rollout.engines.canary import CANARY_GAP, Canary, CanaryCheck
from rlox_grpo.rollout.engines.vllm.blank_start import register_loader
from rlox_grpo.rollout.engines.vllm.experts import make_converter, repack_experts, use_checkpoint_names
from rlox_grpo.rollout.engines.vllm.pictures import (
    check_prompt_ids,
    make_picture_settings,
    make_vllm_prompt,
    refuse_model,
)
from rlox_grpo.rollout.engines.vllm.requests import (
    SCORING,
    admit_mask,
    derive_prompt_seeds,
    find_limits,
    list_ids_without_text,
    make_parameters,
    make_request_fields,
    read_output,
    read_prompt_log_probs,
)
from rlox_grpo.rollout.engines.vllm.startup import (
    FP32_HEAD,
    check_vllm_version,
    choose_runner,
    has_newer_runner,
    keep_groups,
    keep_random_states,
    release_pools,
    set_environment,
    warn_about_draws_by_row,
)
from rlox_grpo.rollout.engines.vllm.turns import EngineTurns, make_turn_parameters
from rlox_grpo.rollout.engines.weight_sync import (
    add_tied_layers,
    build_manifest,
    check_weights,
    find_tied_layers,
    make_repeatable,
    untie_output_layer,
)
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

logger = logging.getLogger(__name__)

DEFAULT_MAX_ROWS = 256

_CANARY = "the prompt that checks the weights"

# Errors that vLLM's weight loaders raise.
_RELOAD_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class VLLMEngine:
    """Samples with vLLM from a copy of the policy, which is transferred in memory.

    vLLM starts at the first ``load_weights``. Prompts and completions are token ids: the tokenizer is used only for
    stop strings, a checkpoint's generation settings are ignored, and completions end at the policy's end tokens.

    Random draws are keyed by (seed, index of the prompt, index of the completion in its group), so they do not depend
    on the order of the batch. Logits do depend on the batch in their last bits, so a token may still change.

    Log-probs are those of the sampled distribution: after temperature and filters, renormalised; 0.0 at temperature 0.

    Attributes:
        exact, takes_weights, policy_version, max_length: see :class:`rlox_grpo.rollout.engines.GenerationEngine`.
        end_ids: ids that end a completion.
        returns_experts: see :func:`rlox_grpo.rollout.engines.returns_experts`.
        returns_sampling_mask: see :func:`rlox_grpo.rollout.engines.returns_mask`.
        sync_seconds: duration of the last ``load_weights``, including a start of vLLM.
    """

    exact = False
    takes_weights = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        eos_token_ids: Sequence[int] = (),
        vocab_limit: int | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        max_rows: int | None = None,
        gpu_memory_utilization: float = 0.3,
        sleep: bool = True,
        ranks: HostGroup | None = None,
        sharing_ranks: HostGroup | None = None,
        router_layers: Sequence[int] = (),
        return_masks: bool = False,
        reader: PictureReader | None = None,
        fp32_lm_head: bool = False,
    ) -> None:
        """Check that vLLM can serve ``model``; ``load_weights`` starts it.

        Args:
            model: a causal or vision-language model of transformers, with or without LoRA adapters. Only its
                configuration is read here.
            tokenizer: decodes completions, and is needed for stop strings; may be None.
            eos_token_ids: ids that end a completion.
            vocab_limit: ids from here on are never sampled.
            dtype: the dtype in which vLLM computes, ``"float32"`` or ``"bfloat16"``.
            max_length: maximum number of tokens of a prompt with its completion; by default the limit of the model.
            max_rows: number of completions decoded at a time, 256 by default.
            gpu_memory_utilization: share of the GPU's memory for vLLM, including its weights.
            sleep: whether to free vLLM's memory on a GPU between two calls of ``generate``.
            ranks: all ranks of the run; their engines start and restart together.
            sharing_ranks: the consecutive ranks that share one model by tensor parallelism. These ranks call
                ``generate`` together, with the same arguments.
            router_layers: the layers whose experts completions have, if ``Sampling.return_experts`` asks for them. vLLM
                returns experts only on a GPU.
            return_masks: whether completions have a :class:`~rlox_grpo.types.SamplingMask`, if
                ``Sampling.return_sampling_mask`` asks for it. vLLM returns masks only on a GPU, with its newer model
                runner.
            reader: reads the pictures of prompts; ids of pictures and videos are never sampled then.
            fp32_lm_head: keep the output layer's products in float32.

        Raises:
            ImportError: vLLM is missing or its version is not supported; the message names the extra.
            ValueError: not a transformers model.
        """
        check_vllm_version()
        self._limits = find_limits("vllm", model, max_length, has_tokenizer=tokenizer is not None)
        self.max_length = self._limits.max_length
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._tokenizer = tokenizer
        self._ranks, self._sharing = ranks or HostGroup(), sharing_ranks or HostGroup()
        self.end_ids = tuple(eos_token_ids)
        self._vocab_limit = vocab_limit
        self._reader = reader
        self._without_text = list_ids_without_text(vocab_limit, self._limits.vocab_size, reader)
        self._expected = build_manifest(model.config)
        self._config = copy.deepcopy(model.config) if torch.cuda.is_available() else untie_output_layer(model.config)
        self._tied_layers = {} if torch.cuda.is_available() else find_tied_layers(model.config)
        self._experts = make_converter(self._config)
        self._llm: Any = None
        self._sleeps = sleep and torch.cuda.is_available()
        self._asleep: set[str] = set()
        self._joined_groups = False
        """Whether the process was in process groups other than vLLM's when vLLM started."""
        self._settings: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": self.max_length,
            "max_num_seqs": max_rows or DEFAULT_MAX_ROWS,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": self._sharing.size,
            "distributed_executor_backend": "external_launcher" if world_size > 1 else "uni",
            "enforce_eager": not torch.cuda.is_available(),
            "enable_sleep_mode": self._sleeps,
            # vLLM 0.32 resets the random generator of a seeded request after each part of its prompt, which is not
            # possible on the CPU.
            "enable_chunked_prefill": torch.cuda.is_available(),
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "load_format": "dummy",  # the first sync brings the weights
            "skip_tokenizer_init": tokenizer is None,
            "seed": 0,
        }
        if fp32_lm_head:
            self._settings["hf_overrides"] = FP32_HEAD
        if hasattr(self._config, "vision_config"):
            refuse_model(self._config)
            self._settings |= make_picture_settings(reader)
            # A model made from its config does not have the name, by which vLLM chooses its own class.
            self._config.architectures = self._config.architectures or [type(get_base(model)).__name__]
        self._router_layers = list(router_layers)
        self.returns_experts = bool(router_layers) and torch.cuda.is_available()
        if self.returns_experts:
            self._settings["enable_return_routed_experts"] = True
        self.returns_sampling_mask = return_masks and has_newer_runner(len(self._without_text))
        if self.returns_sampling_mask:
            self._settings["return_sampling_mask"] = True
        self._canary: Canary | None = None
        self._check = CanaryCheck()
        self.policy_version = -1
        self.sync_seconds = 0.0

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt. Random draws do not depend on the order of the prompts.

        Raises:
            ValueError: see :class:`~rlox_grpo.rollout.engines.calls.Limits`.
            EngineError: no weights were loaded, vLLM returned an invalid completion, or ranks that share one model got
                different prompts or sampled different tokens.
        """
        if self._llm is None:
            raise EngineError("engine='vllm' has no weights yet: load_weights comes before generate")
        self._limits.check_prompts(prompts, group_size, sampling, seed)
        asked = [prompt.token_ids.tolist() for prompt in prompts]
        shown = [[picture.digest for picture in prompt.pictures] for prompt in prompts]
        self._refuse_differences("were given different prompts", [asked, shown, group_size, repr(sampling), seed])
        parameters = [
            make_parameters(
                self._admit(make_request_fields(sampling, group_size, prompt_seed, self.end_ids)), self._without_text
            )
            for prompt_seed in derive_prompt_seeds(prompts, seed)
        ]
        self._wake({"weights", "kv_cache"})
        requests = [
            make_vllm_prompt(prompt.token_ids, prompt.pictures, self._reader, prompt.name) for prompt in prompts
        ]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        self._sleep()
        for prompt, output in zip(prompts, outputs, strict=True):
            if prompt.pictures:
                check_prompt_ids(output.prompt_token_ids, prompt.token_ids, prompt.name)
        layers = self._router_layers if sampling.return_experts else None
        sampled = [
            read_output(output, sampling, self._vocab_limit, len(token_ids), layers)
            for request, token_ids in zip(outputs, asked, strict=True)
            for output in request.outputs
        ]
        self._refuse_differences("sampled different tokens", [completion.token_ids.tolist() for completion in sampled])
        return make_groups(prompts, sampled, self._tokenizer, self.policy_version)

    @contextlib.contextmanager
    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> Iterator[EngineTurns]:
        """Sample replies turn by turn, ``max_num_seqs`` of them at once.

        Raises:
            ValueError: a sampling value out of range, or stop strings without a tokenizer.
            EngineError: no weights were loaded, or ranks share one model.
        """
        if self._llm is None:
            raise EngineError("engine='vllm' has no weights yet: load_weights comes before open_turns")
        if self._sharing.size > 1:
            raise EngineError("ranks that share one vLLM model cannot run episodes: set tensor_parallel_size=1")
        self._limits.check_sampling(sampling, seed)
        self._wake({"weights", "kv_cache"})
        session = EngineTurns(
            self._llm.llm_engine,
            lambda request: make_turn_parameters(
                sampling, request, seed, self.end_ids, self._without_text, admit=self._admit
            ),
            sampling,
            self._limits,
            vocab_limit=self._vocab_limit,
            reader=self._reader,
        )
        try:
            yield session
        finally:
            session.abort()
            self._sleep()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the policy's weights. Later completions have the policy version ``version``.

        A reload that fails midway leaves vLLM unusable. vLLM is then restarted with these weights on every rank,
        because its start is a collective.

        Raises:
            WeightMismatchError: names, shapes or types are not those of the model; the old weights stay in use.
            EngineError: vLLM cannot be restarted, or its log-probs differ from those of :meth:`expect_log_probs`.
        """
        start = time.perf_counter()
        weights = make_repeatable(weights)
        check_weights(weights, self._expected)
        if self._llm is None:
            self._start()
        failure = ""
        try:
            self._reload(weights)
        except _RELOAD_FAILURES as error:
            failure = f"{type(error).__name__}: {error}"
        failures = [f"rank {rank}: {message}" for rank, message in enumerate(self._ranks.gather(failure)) if message]
        if failures:
            logger.warning("the sync of version %d failed (%s): vLLM is started again", version, "; ".join(failures))
            self._restart(weights, version)
        self._check_canary(version)
        self.policy_version = version
        self.sync_seconds = time.perf_counter() - start

    def expect_log_probs(self, canary: Canary | None) -> None:
        """See :class:`~rlox_grpo.rollout.engines.CheckedEngine`."""
        self._canary = canary

    def take_metrics(self) -> dict[str, float]:
        """Return ``mismatch/canary_gap_max`` of the last ``load_weights``, once."""
        gap, self._check.gap = self._check.gap, None
        return {} if gap is None else {CANARY_GAP: gap}

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        if self._llm is None:
            return
        atexit.unregister(self.close)
        try:
            self._wake({"weights", "kv_cache"})  # vLLM would free memory twice that it freed before it slept
        except RuntimeError as error:
            logger.warning("vLLM ends asleep, because the GPU has no memory to wake it: %s", error)
        llm, self._llm, self.policy_version = self._llm, None, -1
        self._asleep = set()
        with keep_groups() if self._joined_groups else contextlib.nullcontext():
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if self._sleeps:
            release_pools()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _admit(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return sampling parameters that vLLM accepts with its settings."""
        return admit_mask(fields, self._limits.vocab_size or 0) if self.returns_sampling_mask else fields

    def _refuse_differences(self, what: str, value: list[Any]) -> None:
        """Raise EngineError if the ranks that share this model have different ``value``, a JSON value.

        Each rank runs vLLM's scheduler, and all ranks meet in a collective in every layer. With different prompts the
        collectives would mix rows of different prompts, or hang.
        """
        if self._sharing.size == 1:
            return
        digest = blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
        digests = self._sharing.gather(digest)
        if any(other != digest for other in digests):
            raise EngineError(
                f"tensor_parallel_size={self._sharing.size}: the ranks that share one vLLM model {what} (digests "
                f"{', '.join(digests)}), so their completions cannot be trusted"
            )

    def _start(self) -> None:
        set_environment(str(self._settings["dtype"]))
        choose_runner(len(self._without_text))
        logger.info("vLLM is starting in this process, which takes from ten seconds to minutes")
        from vllm import LLM

        if self._reader is not None:
            self._settings["load_format"] = register_loader()
        self._joined_groups = dist.is_initialized()
        with tempfile.TemporaryDirectory(prefix="rlox-grpo-") as folder, keep_random_states():
            self._config.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
            if self._reader is not None:
                self._reader.processor.save_pretrained(folder)
            settings = {name: value for name, value in self._settings.items() if value is not None}
            self._llm = LLM(model=folder, **settings)
        warn_about_draws_by_row(self._llm.llm_engine.vllm_config)
        atexit.register(self.close)  # else vLLM ends after the process groups that it is in, and prints a traceback

    def _restart(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.close()
        try:
            self._start()
            self._reload(weights)
        except _RELOAD_FAILURES as error:
            self.close()
            raise EngineError(f"vLLM does not take version {version} of the weights, started anew: {error}") from error

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._wake({"weights"})
        stream = use_checkpoint_names(add_tied_layers(weights, self._tied_layers), self._experts)
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        finally:
            for _ in stream:  # of shards: the other ranks gather all of them
                pass
        if self._experts is not None:
            self._llm.apply_model(repack_experts)
        # The blocks of the cache have keys and values of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")
        if self._reader is not None:
            # The features of pictures are those of the old weights. Cleared after the prefix cache, without which no
            # picture is encoded again.
            self._llm.llm_engine.reset_encoder_cache()

    def _check_canary(self, version: int) -> None:
        if self._canary is None:
            return
        self._wake({"weights", "kv_cache"})  # generate comes next
        from vllm import SamplingParams

        parameters = SamplingParams(**self._admit(dict(SCORING)), detokenize=False)
        token_ids = np.asarray(self._canary.token_ids, np.int64)
        request = make_vllm_prompt(token_ids, self._canary.pictures, self._reader, _CANARY)
        (output,) = self._llm.generate([request], [parameters], use_tqdm=False)
        if self._canary.pictures:
            check_prompt_ids(output.prompt_token_ids, token_ids, _CANARY)
        answer = read_prompt_log_probs(output.prompt_logprobs, self._canary.token_ids)
        answer = answer[-len(self._canary.log_probs) :] if self._canary.pictures else answer
        dtype = str(self._settings["dtype"])
        self._check.compare(self._canary, answer, version, source="vLLM in this process", dtype=dtype)

    def _wake(self, tags: set[str]) -> None:
        if asleep := tags & self._asleep:  # waking a part that is awake is an error
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # vLLM allocates from the driver, which does not see torch's cache as free
            self._llm.wake_up(tags=sorted(asleep))
            self._asleep -= asleep

    def _sleep(self) -> None:
        # At level 1 vLLM has a copy of the weights in host memory, so that an evaluation needs no new sync.
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

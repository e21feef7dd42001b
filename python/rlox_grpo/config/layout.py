"""The ``[layout]`` table of a run file: what runs on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import model_validator

from rlox_grpo.config.records.option import Record, option
from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class Layout(Record, title="Layout on a Ray cluster"):
    """How many processes a run has on a Ray cluster, and what each of them gets."""

    trainers: int = option(1, "Training ranks, a Ray actor each. Each takes one GPU if the cluster has any.", ge=1)
    cpus_per_trainer: int = option(1, "CPUs that Ray reserves for each trainer; also its OMP_NUM_THREADS.", ge=1)
    engines: int = option(0, "Generation engines apart from the trainers. Only 0 works today.", ge=0)
    tensor_parallel_size: int = option(1, "GPUs of each such engine. Only 1 works today.", ge=1)
    colocate: bool = option(True, "Each trainer generates in its own process. Only true works today.")
    reference: str = option("trainer", "Where the reference policy is. Only 'trainer' works today.")

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        if self.engines or not self.colocate:
            raise ConfigError(
                f"[layout] engines={self.engines}, colocate={str(self.colocate).lower()}: Ray does not place engines "
                "apart from the trainers yet. Leave both out: each trainer then has its engine in its own process "
                "(engine='hf' or 'vllm'). Or start vLLM servers yourself and set engine='vllm_server'"
            )
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"[layout] tensor_parallel_size={self.tensor_parallel_size} is for engines apart from the trainers, "
                "which do not work yet. To share one vLLM model among trainers, set the option tensor_parallel_size "
                "above the [layout] table"
            )
        if self.reference != "trainer":
            raise ConfigError(
                f"[layout] reference={self.reference!r}: expected 'trainer', where the option `reference` chooses the "
                "reference policy. For one in another process use reference='server'"
            )
        return self

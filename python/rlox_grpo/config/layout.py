"""The ``[layout]`` table of a run file: what runs on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from rlox_grpo.config.records.option import SET, Record, find_ignored, option
from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


_ENGINES = {"engines": SET}

UNPLACED = "http://placed-by-ray:0"
"""Stands for the URL of a server that Ray has not started yet."""


class Layout(Record, title="Layout on a Ray cluster"):
    """How many processes a run has on a Ray cluster, and what each of them gets."""

    trainers: int = option(1, "Training ranks, a Ray actor each. Each takes one GPU if the cluster has any.", ge=1)
    cpus_per_trainer: int = option(1, "CPUs that Ray reserves for each trainer; also its OMP_NUM_THREADS.", ge=1)
    engines: int = option(0, "vLLM engines apart from the trainers, a Ray actor each. 0: trainers generate.", ge=0)
    cpus_per_engine: int = option(1, "CPUs that Ray reserves for each engine.", ge=1, only_with=_ENGINES)
    tensor_parallel_size: int = option(1, "GPUs of each engine, if the cluster has any.", ge=1, only_with=_ENGINES)
    colocate: bool | None = option(
        None, "Whether each trainer generates in its own process; None: where engines is 0. Only a check."
    )
    reference: Literal["trainer", "actor"] = option(
        "trainer", "actor: the frozen reference policy is a Ray actor of its own, which takes a GPU if there is any."
    )

    @model_validator(mode="after")
    def _refuse_incompatible(self) -> Self:
        if self.colocate is not None and self.colocate == bool(self.engines):
            raise ConfigError(
                f"[layout] engines={self.engines}, colocate={str(self.colocate).lower()}: with engines of their own "
                "the trainers do not generate, and without any they do. Leave colocate out, or change engines"
            )
        if ignored := list(find_ignored(self, type(self).model_fields, {}, {})):
            raise ConfigError("\n".join(f"[layout] {error}" for error in ignored))
        return self


def place_options(layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that follow from its layout; the URLs are known once Ray has placed the servers.

    Args:
        layout: table of the run file.
        options: of the run file and the command line.

    Raises:
        ConfigError: an option that says something else.
    """
    placed: dict[str, Any] = {}
    if layout.engines:
        placed |= {"engine": "vllm_server", "server_urls": [UNPLACED]}
    if layout.reference == "actor":
        placed |= {"reference": "server", "reference_url": UNPLACED}
    for name, table in (("engine", f"engines={layout.engines}"), ("reference", "reference='actor'")):
        if name in placed and options.get(name, placed[name]) != placed[name]:
            raise ConfigError(
                f"[layout] {table} means {name}={placed[name]!r}, and the run has {name}={options[name]!r}: leave "
                f"{name} out"
            )
    return placed

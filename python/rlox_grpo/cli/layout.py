"""The processes of a run on a Ray cluster: their numbers, their commands, and their addresses for the ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from rlox_grpo.config.run_file import UNPLACED, Layout, Origin
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ray_cluster.cluster import Room
from rlox_grpo.distributed.ray_cluster.placement import Sizes
from rlox_grpo.distributed.ray_cluster.remote_file import SCHEME
from rlox_grpo.distributed.ray_cluster.servers import HOST, PORT, Servers
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.gguf import refuse_gguf
from rlox_grpo.reference import TOKEN_VARIABLE as REFERENCE_TOKEN
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE as ENGINE_TOKEN

_MODULE = ("-m", "rlox_grpo")


def read_layout(origin: Origin, config: GRPOConfig) -> tuple[Sizes, Servers]:
    """Return the numbers of processes, and the commands of the engines and the reference.

    Raises:
        ConfigError: ``server_urls`` or ``reference_url`` is set although Ray starts these servers.
        ValueError: the engines would get a GGUF file.
    """
    layout = origin.layout or Layout()
    has_reference = layout.reference == "actor"
    if layout.engines and config.server_urls != (UNPLACED,):
        raise ConfigError(f"[layout] engines={layout.engines}: Ray starts the engines; leave server_urls out")
    if has_reference and config.reference_url != UNPLACED:
        raise ConfigError("[layout] reference='actor': Ray starts the reference; leave reference_url out")
    if layout.engines:
        refuse_gguf(origin.model, f"a vLLM engine ([layout] engines={layout.engines})")
    engine = ["serve", origin.model, "--host", HOST, "--port", PORT, "--dtype", config.dtype]
    if config.engine_max_length is not None:
        engine += ["--max-length", str(config.engine_max_length)]
    if config.fp32_lm_head is False:
        engine += ["--no-fp32-lm-head"]
    if layout.tensor_parallel_size > 1:
        engine += ["--tensor-parallel-size", str(layout.tensor_parallel_size)]
    reference = ["serve-reference", origin.model, "--host", HOST, "--port", PORT]
    sizes = Sizes(
        trainers=layout.trainers,
        cpus_per_trainer=layout.cpus_per_trainer,
        engines=layout.engines,
        cpus_per_engine=layout.cpus_per_engine,
        gpus_per_engine=layout.tensor_parallel_size,
        references=int(has_reference),
    )

    def find(urls: Mapping[str, Sequence[str]], room: Room) -> list[str]:
        words: list[str] = []
        if engines := urls.get("engines"):
            words += ["--server_urls", str([*engines]), *_route_weights(config, room)]
        for url in urls.get("reference", ()):
            words += ["--reference_url", url]
        return words

    return sizes, Servers(
        {"engines": [*_MODULE, *engine], "reference": [*_MODULE, *reference]},
        {name: os.environ.get(name) or secrets.token_urlsafe(32) for name in (ENGINE_TOKEN, REFERENCE_TOKEN)},
        find,
        lambda room: layout.engines > 0 and SCHEME in (config.server_sync_dir, *_route_weights(config, room)),
    )


def _route_weights(config: GRPOConfig, room: Room) -> list[str]:
    """Return the options for sending new weights to the engines: NCCL between GPUs, else Ray's object store."""
    if config.server_sync_dir is not None or config.server_nccl_address is not None:
        return []
    if any("GPU" in resources for resources in room.resources):
        return ["--server_nccl_address", room.placements[0].node.address]
    return ["--server_sync_dir", SCHEME]

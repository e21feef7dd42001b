"""Check ``generation_kwargs``: parameters of a generation engine that are not options of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlox_grpo.config.records import Options

_FILTERS: Mapping[str, str] = {"top_p": "number", "top_k": "whole", "min_p": "number", "stop": "texts"}
"""Options that may also be given here: vLLM and transformers have the same names."""

_VLLM: Mapping[str, str] = {
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "repetition_penalty": "number",
    "min_tokens": "whole",
    "allowed_token_ids": "ids",
}
"""vLLM applies these before it computes log-probs, so its log-probs are those of the sampled distribution."""

_OPTIONS: Mapping[str, str] = {
    "temperature": "temperature, which the update reads too",
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n": "group_size",
    "num_return_sequences": "group_size",
    "seed": "seed",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids here",
}
"""Parameters of vLLM and transformers → the option that sets them."""

_KINDS: Mapping[str, str] = {
    "number": "a number",
    "whole": "a whole number of at least 0",
    "ids": "a list of token ids",
    "texts": "a text or a list of texts",
}


def list_honoured(engine: str) -> dict[str, str]:
    """Return the parameters that an engine reads, and their types: the fields of ``Sampling`` and its own."""
    return {**_FILTERS, "stop_token_ids": "ids", **(_VLLM if engine in ("vllm", "vllm_server") else {})}


def check_generation_kwargs(options: Options) -> Iterator[str]:
    """Yield an error for each parameter that the engine would ignore or refuse, or that is set as an option too."""
    honoured = list_honoured(options.engine)
    for name, value in options.generation_kwargs.items():
        if name in _OPTIONS:
            yield f"generation_kwargs has {name!r}: set {_OPTIONS[name]}"
        elif name not in honoured:
            yield (
                f"generation_kwargs has {name!r}, which engine={options.engine!r} does not honour: it knows "
                f"{', '.join(honoured)}"
            )
        elif not _has_kind(value, honoured[name]):
            yield f"generation_kwargs[{name!r}] is {value!r}: expected {_KINDS[honoured[name]]}"
        elif name in _FILTERS and getattr(options, name) != Options.model_fields[name].default:
            yield f"{name} is set twice, as an option and in generation_kwargs: leave out one of them"


def split_generation_kwargs(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Split checked parameters into fields of :class:`rlox_grpo.types.Sampling` and parameters of the engine."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    shared = {name: value for name, value in values.items() if name not in _VLLM}
    return shared, tuple(sorted((name, value) for name, value in values.items() if name in _VLLM))


def _has_kind(value: Any, kind: str) -> bool:
    if kind == "texts":
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
    if kind == "ids":
        return isinstance(value, list) and bool(value) and all(_has_kind(token, "whole") for token in value)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) and value >= 0 if kind == "whole" else isinstance(value, (int, float))

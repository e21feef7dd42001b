"""What several test modules share."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Any

import pytest

from thorough import THOROUGH

if "REQUIRE_PACKAGES" in os.environ and sys.version_info >= (3, 11):
    # `make test` has every package of the lock file: one that is missing is an error there, and skips no test.
    pytest.importorskip = lambda name, **_: importlib.import_module(name)

if "PYTEST_XDIST_WORKER" in os.environ:
    # `pytest -n 2` has one worker for each core: more threads would only wait for each other. Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules and tests stay until the end: to look through a million objects for garbage again and again finds none of it.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, among what the tests make: not among what was imported and collected before."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out the tests marked ``thorough``, unless they are asked for."""
    left_out = [] if THOROUGH else [item for item in items if item.get_closest_marker("thorough")]
    for item in left_out:
        items.remove(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: Any) -> None:
    """Hide a GPU from tests that do not ask for it by ``-m gpu``: they expect float32, and tensors on the CPU.

    Before torch is imported, and for the processes that tests start. The simulated device is none of the driver's, and
    the GPUs of the Ray clusters that tests start are numbers alone, which Ray refuses beside an empty list.
    """
    if config.option.markexpr not in ("gpu", "cluster") and "RLOX_GRPO_CUDA_SIM" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_the_disk():
    """``os.fsync`` returns at once: it guards against a loss of power, which no test makes, and waits for 5 ms.

    A training run of some steps in a folder calls it 20 times. Processes that a test kills lose nothing by it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # an error on a descriptor that is closed, as fsync
        yield


@pytest.fixture
def one_thread():
    """Tiny matrices: handing them to more threads costs ten times what it saves."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- tiny models and a tokenizer, made from scratch (engines) ---

TINY_VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build_tiny_model(architecture: str, **overrides: Any) -> Any:
    """A random transformers causal LM of two layers, always the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    grouped = {"num_key_value_heads": 2}
    windowed = {**grouped, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    extras: dict[str, dict[str, Any]] = {
        "qwen2": grouped,
        "qwen3": {**grouped, "head_dim": 8},
        "llama": grouped,
        "mistral": {**grouped, "sliding_window": 8},
        "gemma2": {**windowed, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
        "gemma3_text": windowed,
        "phi3": grouped,
        "gpt2": {},
        "gpt_neox": {},
        "mamba": {"state_size": 4},
    }
    torch.manual_seed(0)
    sizes = {**_SIZES, **extras[architecture], **overrides}
    if architecture in ("gpt2", "mamba"):  # these have no such size
        del sizes["intermediate_size"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).eval()


def build_byte_tokenizer() -> Any:
    """Byte-level, no merges: <pad> 0, <eos> 1, <bos> 2, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


@pytest.fixture(scope="session")
def make_tiny_model():
    """``make_tiny_model("qwen2", **overrides)``: see :func:`build_tiny_model`."""
    return build_tiny_model


@pytest.fixture(scope="session")
def byte_tokenizer():
    """See :func:`build_byte_tokenizer`."""
    return build_byte_tokenizer()


# --- end of tiny models and a tokenizer ---

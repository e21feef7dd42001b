"""Models built without weights and filled from files, beside those that from_pretrained loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model import blank
from rlox_grpo.model.blank import UnreadableError, copy_blank, give_storage, make_blank, run_blank
from rlox_grpo.model.forward import can_pack, split_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "eos_token_id": [3, 5]},
    "gemma2": {"head_dim": 8},  # its embedding's scale is a buffer that no file has
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 3, "bos_token_id": 3},
}


def make_model(kind="qwen2", **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61} if kind == "gpt2" else SIZES
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **KINDS.get(kind, {}), **changes}))


def fill(folder):
    model, stored = make_blank(str(folder))
    assert all(parameter.is_meta for parameter in model.parameters())
    give_storage(model, torch.device("cpu"))
    stored.fill(model)
    return model


def assert_same(model, other):
    for tensors in (torch.nn.Module.named_parameters, torch.nn.Module.named_buffers):
        mine, theirs = dict(tensors(model)), dict(tensors(other))
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            assert tensor.dtype == theirs[name].dtype
            assert torch.equal(tensor, theirs[name]), name
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_filled_model_is_that_of_from_pretrained(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(blank, "_READ_BYTES", 1000)  # several reads for each matrix
    make_model(kind).to(dtype).save_pretrained(tmp_path)
    model, loaded = fill(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(model, loaded)
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert model.name_or_path == loaded.name_or_path
    tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_a_checkpoint_in_several_files(tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(fill(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


def test_names_without_the_decoders_prefix(tmp_path):
    whole = make_model()
    whole.model.save_pretrained(tmp_path)
    whole.config.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    assert_same(fill(tmp_path), whole.eval())


def _lack_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _change_a_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(33)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _be_broken(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def _name_a_file_that_is_not_there(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.st"}}))


def _be_quantized(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_lack_a_tensor, "its files have no tensor model.norm.weight"),
        (_change_a_shape, r"model.norm.weight of shape \(33,\) and the model \(32,\)"),
        (_be_broken, "model.safetensors cannot be read"),
        (_name_a_file_that_is_not_there, "names gone.st, which is not there"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no safetensors files"),
        (_be_quantized, "the checkpoint is quantized"),
    ],
)
def test_what_cannot_be_read_a_tensor_at_a_time_is_said(change, said, tmp_path):
    make_model().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(UnreadableError, match=said):
        make_blank(str(tmp_path))


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 converts no weights")
def test_weights_that_transformers_converts_are_left_to_it(tmp_path):
    make_model("mixtral").save_pretrained(tmp_path)
    with pytest.raises(UnreadableError, match="converts the weights of MixtralForCausalLM"):
        make_blank(str(tmp_path))


def test_a_copy_without_weights_shares_what_the_model_shares():
    model = make_model("qwen2")
    copy = copy_blank(model)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in copy.parameters())
    assert torch.equal(copy.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_files_that_differ_have_other_digests(tmp_path):
    digests = []
    for scale in (1.0, 1.001):
        folder = tmp_path / str(scale)
        model = make_model()
        model.lm_head.weight.data.mul_(scale)
        model.save_pretrained(folder)
        digests.append(make_blank(str(folder))[1].digest())
    assert digests[0].keys() == digests[1].keys() == {"model.safetensors"}
    assert digests[0] != digests[1]


def test_one_rank_alone_loads_as_before(tmp_path, caplog):
    """Nothing is sharded there, so the model is loaded whole, without a word."""
    from rlox_grpo import GRPOConfig
    from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
    from rlox_grpo.model.load import load_policy

    tokenizer = build_countdown_tokenizer(20)
    make_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        policy = load_policy(Path(tmp_path), tokenizer, GRPOConfig(shard_parameters=True), ranks=Ranks())
    assert policy.shards is None
    assert "loaded whole" not in caplog.text


def try_forward(model):
    split = split_model(model)
    return split is not None, split is not None and can_pack(split)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_weights_is_tried_on_random_ones(kind):
    model = make_model(kind).eval()
    bare = copy_blank(model)
    parameters = list(bare.parameters())
    assert run_blank(bare, lambda: try_forward(bare), None) == try_forward(model)
    assert [id(parameter) for parameter in bare.parameters()] == [id(parameter) for parameter in parameters]
    assert all(parameter.is_meta for parameter in parameters)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bare.modules())


def test_random_weights_show_what_a_model_does_to_its_logits():
    bare = copy_blank(make_model("llama").eval())
    plain = type(bare).forward

    def doubled(self, *args, **options):
        output = plain(self, *args, **options)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    bare.forward = doubled.__get__(bare)
    assert run_blank(bare, lambda: try_forward(bare), None) == (False, False)


def test_modules_hold_their_weights_only_while_they_run():
    bare = copy_blank(make_model("llama").eval())
    held = []

    def look(module, *_):
        held.append(sum(parameter.numel() for parameter in bare.parameters() if not parameter.is_meta))

    for module in bare.modules():
        if not list(module.children()):
            module.register_forward_hook(look)
    run_blank(bare, lambda: bare(torch.arange(4)[None]), None)
    head = bare.lm_head.weight.numel()
    assert max(held) <= 2 * head  # the output layer, and the embeddings of its size
    assert held[-1] == head


def test_a_model_that_cannot_be_tried_gives_the_other_answer(caplog):
    class Borrowing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, values):
            return torch.nn.functional.linear(self.own(values), self.other.weight)

    bare = copy_blank(Borrowing())
    with caplog.at_level(logging.INFO):
        assert run_blank(bare, lambda: float(bare(torch.ones(1, 2)).sum()), "otherwise") == "otherwise"
    assert "Borrowing cannot be tried without its weights" in caplog.text
    assert all(parameter.is_meta for parameter in bare.parameters())


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 40), (61 * 32 - 5, 61 * 32), (64, 96), (9, 9)])
def test_a_part_of_a_weight_is_read_flat(start, stop, tmp_path):
    model = make_model("llama")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored = make_blank(str(tmp_path))[1]
    found = stored.read_range("model.embed_tokens.weight", start, stop)
    assert torch.equal(found, model.model.embed_tokens.weight.detach().float().flatten()[start:stop])
    assert torch.equal(stored.read_range("model.norm.weight", 3, 9), model.model.norm.weight.detach().float()[3:9])

"""What ``save`` writes loads the same in transformers' Auto classes and here."""

import copy
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo import GRPO
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.run import LARGEST, format_prompt, problems, solutions
from rlox_grpo.demo.warm_start import make_model, teach
from rlox_grpo.run.checkpoint import export_model
from rlox_grpo.run.history import require_good
from versions import REBUILDS_TOKENIZERS

SETTINGS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}
TEXTS = ["20 cats & 3.50 dogs", "Naïve café 答案是 99。\n\tx^2", "<eos>", " leading", "a" * 50, "🙂 e\u0301"]


def score_length(completions):
    return [float(len(completion)) for completion in completions]


def demo_corpus():
    """Every prompt of the demo's held-out problems, with a worked solution."""
    rows = problems(0)[1]
    return [
        f"{format_prompt(row['nums'], row['target'])} {solutions(tuple(row['nums']), row['target'], LARGEST)[0][0]}"
        for row in rows
    ]


def saved(model, tokenizer, folder, texts):
    """The folder of a run's ``save`` and the newest checkpoint of the same run."""
    trainer = GRPO(model, score_length, tokenizer=tokenizer, output_dir=folder / "run", **SETTINGS)
    trainer.train(texts[:2])
    trainer.save(folder / "saved")
    return trainer, [folder / "saved", folder / "run" / "checkpoints" / "step_000001"]


def assert_loads_the_same(trainer, folder, texts):
    tokenizer = trainer.policy.tokenizer
    auto, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    here = GRPO(folder, score_length, log_to=())
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert auto(text)["input_ids"] == ids, text
        assert here.policy.tokenizer(text)["input_ids"] == ids, text
        assert auto.decode(ids) == tokenizer.decode(ids)
    assert auto.eos_token_id == tokenizer.eos_token_id == here.policy.tokenizer.eos_token_id
    ids = torch.tensor([tokenizer(texts[0])["input_ids"]])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(here.model.eval()(ids).logits, expected)
    assert here.policy.eos_token_ids == trainer.policy.eos_token_ids
    assert GenerationConfig.from_pretrained(folder).eos_token_id in trainer.policy.eos_token_ids


def test_the_demos_model(tmp_path, caplog):
    """Beside the type qwen2 AutoTokenizer makes two tokens of "20"."""
    corpus = demo_corpus()
    trainer, folders = saved(
        make_model(build_countdown_tokenizer(LARGEST)), build_countdown_tokenizer(LARGEST), tmp_path, corpus
    )
    for folder in folders:
        assert_loads_the_same(trainer, folder, corpus)
    assert "with other ids" not in caplog.text


def test_the_demos_model_learns_what_qwen2_does():
    """To the bit, in the warm start; the one bias that Qwen2 lacks stays zero."""
    tokenizer = build_countdown_tokenizer(LARGEST)
    torch.manual_seed(0)
    model = make_model(tokenizer)
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
    )
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**{name: getattr(model.config, name) for name in names}))
    missing, unexpected = qwen2.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all(name.endswith("self_attn.o_proj.bias") for name in unexpected)

    def draw(rng, count):
        return [("3 4 7 :", "3 + 4 = 7")] * count

    for learner in (model, qwen2):
        teach(learner, tokenizer, draw, seed=0, steps=3, rows=2, learning_rate=3e-3)
    learned = model.state_dict()
    for name, tensor in qwen2.state_dict().items():
        assert torch.equal(tensor, learned[name]), name
    assert all(not learned[name].any() for name in unexpected)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_byte_tokenizer_and_a_model_without_an_end_token_of_its_own(make_tiny_model, byte_tokenizer, tmp_path, kind):
    model = make_tiny_model(kind, vocab_size=len(byte_tokenizer))
    trainer, folders = saved(copy.deepcopy(model), byte_tokenizer, tmp_path, TEXTS)
    for folder in folders:
        assert_loads_the_same(trainer, folder, TEXTS)
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1


@pytest.mark.skipif(not REBUILDS_TOKENIZERS, reason="transformers 4 has no such classes")
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "llama"])
def test_trained_tokenizers_of_three_kinds(make_tiny_model, tmp_path, caplog, kind):
    import trained_tokenizers

    tokenizer = trained_tokenizers.KINDS[kind]()
    model = make_tiny_model(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    trainer, folders = saved(model, tokenizer, tmp_path, trained_tokenizers.TEXTS)
    for folder in folders:
        assert_loads_the_same(trainer, folder, trained_tokenizers.TEXTS)
    assert "with other ids" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": [1, 2], "max_new_tokens": 77}, ()),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}, ("temperature", "top_p")),
    ],
    ids=["sampling", "contradicting"],
)
def test_generation_settings_are_saved(make_tiny_model, byte_tokenizer, tmp_path, caplog, settings, left_out):
    """Also those that transformers loads and refuses to write, as Llama 2's were."""
    model = make_tiny_model("llama", vocab_size=len(byte_tokenizer))
    model.generation_config = GenerationConfig(**settings)
    trainer, folders = saved(model, byte_tokenizer, tmp_path, TEXTS)
    for folder in folders:
        found = AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert {name: getattr(found, name) for name in settings if name not in left_out} == {
            name: value for name, value in settings.items() if name not in left_out
        }
        assert all(getattr(found, name) in (None, getattr(GenerationConfig(), name)) for name in left_out)
    # transformers 4 sets top_k and three others by itself, which greedy decoding does not use either.
    said = re.search(r"left out temperature, top_p,.* without use in greedy decoding", caplog.text)
    assert (said is not None) == bool(left_out)
    assert trainer.model.generation_config.temperature == settings["temperature"]


@pytest.mark.skipif(not REBUILDS_TOKENIZERS, reason="transformers 4 reads the saved tokenizer")
def test_a_type_whose_tokenizer_is_rebuilt_is_warned_of(make_tiny_model, tmp_path, caplog):
    tokenizer = build_countdown_tokenizer(LARGEST)
    trainer = GRPO(make_tiny_model("qwen2", vocab_size=len(tokenizer)), score_length, tokenizer=tokenizer, log_to=())
    trainer.save(tmp_path)
    assert "AutoTokenizer builds a Qwen2Tokenizer of this tokenizer, with other ids" in caplog.text


@pytest.mark.parametrize("first", ["in one file", "in several files"])
def test_a_folder_with_an_earlier_model_of_another_number_of_files(make_tiny_model, tmp_path, monkeypatch, first):
    """Every reader loads the later model: from_pretrained prefers one file, and vLLM reads the index."""
    split = transformers.modeling_utils.split_torch_state_dict_into_shards
    earlier, later = make_tiny_model("llama"), make_tiny_model("llama")
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.add_(1.0)
    for model, is_split in ((earlier, first == "in several files"), (later, first == "in one file")):
        size = 20_000 if is_split else 10**9
        monkeypatch.setattr(
            transformers.modeling_utils,
            "split_torch_state_dict_into_shards",
            lambda state, *, size=size, **options: split(state, **{**options, "max_shard_size": size}),
        )
        export_model(tmp_path, model, None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in later.state_dict().items())
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (first == "in one file")
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files


def test_a_checkpoint_is_not_overwritten(make_tiny_model, byte_tokenizer, tmp_path):
    """Its manifest would no longer be that of its files, and the run would go back to an earlier checkpoint."""
    trainer, (_, checkpoint) = saved(make_tiny_model("llama", vocab_size=259), byte_tokenizer, tmp_path, TEXTS)
    with pytest.raises(ValueError, match="step_000001' is a checkpoint of a run"):
        trainer.save(checkpoint)
    require_good(checkpoint)


@pytest.mark.parametrize("is_plain", [False, True])
def test_gathered_weights_are_saved_with_the_buffers(make_tiny_model, tmp_path, is_plain):
    """DeepSeek V3 has the routers' biases in buffers, without which its experts would be chosen in another way."""
    model = make_tiny_model("llama")
    model.register_buffer("router_bias", torch.arange(4.0))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    export_model(tmp_path, torch.nn.Sequential(model) if is_plain else model, None, whole)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["0.router_bias" if is_plain else "router_bias"], torch.arange(4.0))

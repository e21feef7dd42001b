"""Models that cannot be trained as given: each is an error or a warning that can be mended from its words alone."""

import copy
import importlib.metadata
import json
import sys

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2VLConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from rlox_grpo import GRPO
from rlox_grpo.errors import ConfigError
from toy import ToyLM, options, share_of_target

SETTINGS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}


def score_length(completions):
    return [float(len(completion)) for completion in completions]


def rank_completions(completions):
    return [float(index) for index in range(len(completions))]


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return copy.deepcopy(byte_tokenizer)


@pytest.fixture(scope="module")
def model(make_tiny_model, tokenizer):
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1)


BERT = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def decoder(cls=Qwen2Model):
    return cls(
        Qwen2Config(
            vocab_size=40,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=8,
        )
    )


def wide_head():
    model = decoder(Qwen2ForCausalLM)
    model.lm_head = nn.Linear(8, 50, bias=False)
    return model


MODEL_ROWS = [
    # label, model, error, message
    (
        "encoder",
        lambda: BertModel(BertConfig(**BERT)),
        ValueError,
        "model is a BertModel, an encoder: .*choose a causal model",
    ),
    (
        "masked language model",
        lambda: BertForMaskedLM(BertConfig(**BERT)),
        ValueError,
        "model is a BertForMaskedLM, an encoder",
    ),
    (
        "encoder and decoder",
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=40, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
        ),
        ValueError,
        "T5ForConditionalGeneration, an encoder-decoder model",
    ),
    ("no head", decoder, ValueError, "model is a Qwen2Model, which has no language-model head"),
    (
        "more logits than embeddings",
        wide_head,
        ValueError,
        "output layer has 50 ids and its embedding 40 rows: .*resize_token_embeddings",
    ),
    ("missing folder", lambda: "./chatt", ValueError, r"model='\./chatt': no such folder"),
    ("missing absolute folder", lambda: "/no/such", ValueError, "model='/no/such': no such folder"),
    (
        "a file",
        lambda: __file__,
        ValueError,
        "model='.*' cannot be loaded: .*; it is a file: pass the folder that holds",
    ),
    ("None", lambda: None, TypeError, "model is NoneType: expected a path, a hub id or a torch.nn.Module"),
    ("weights alone", lambda: decoder().state_dict(), TypeError, "model is OrderedDict: expected a path"),
    ("a class", lambda: Qwen2Model, TypeError, "model is the class Qwen2Model: expected a path"),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [row[1:] for row in MODEL_ROWS], ids=[row[0] for row in MODEL_ROWS]
)
def test_models(make, error, message):
    with pytest.raises(error, match=message):
        GRPO(make(), score_length, log_to=())


@pytest.mark.parametrize("argument", ["ref_model", "teacher"])
@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (lambda: BertModel(BertConfig(**BERT)), " is a BertModel, an encoder: .*choose a causal model"),
        (decoder, " is a Qwen2Model, which has no language-model head"),
        (lambda: decoder(Qwen2ForCausalLM), " has another vocabulary: 40 ids, and the policy samples 259"),
    ],
    ids=["encoder", "no head", "fewer ids"],
)
def test_a_frozen_model_object_is_checked_before_anything_is_sampled(model, tokenizer, argument, frozen, message):
    settings = {**SETTINGS, "kl_coef": 0.1} if argument == "ref_model" else SETTINGS
    with pytest.raises(ValueError, match=argument + message):
        GRPO(copy.deepcopy(model), score_length, tokenizer=tokenizer, **settings, **{argument: frozen()})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model", r"the model's logits are not finite at prompts\[\d\], completion token 0"),
        ("ref_model", r"the log-probs of the reference .* are not finite in rows \[0, 1"),
        ("teacher", r"the teacher's log-probs are not finite in rows \[0, 1"),
    ],
)
def test_weights_that_are_nan_are_named(model, tokenizer, argument, message):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(float("nan"))
    models = {"model": copy.deepcopy(model), argument: broken}
    settings = {**SETTINGS, "kl_coef": 0.1} if argument == "ref_model" else SETTINGS
    trainer = GRPO(reward_fn=rank_completions, tokenizer=tokenizer, **settings, **models)
    with pytest.raises(FloatingPointError, match=message):
        trainer.train(["a", "b"])


def test_a_hub_id_without_network(monkeypatch):
    from transformers import AutoModelForCausalLM

    def fail(source, **_):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(
        ValueError,
        match="model='owner/name' cannot be loaded: We couldn't connect .* to load the files. Check your connection; "
        "there is no such folder either: without network access, pass a folder",
    ):
        GRPO("owner/name", score_length, log_to=())
    with pytest.raises(
        ValueError, match="model='owner/name-GGUF' cannot be loaded: .*; a GGUF file of the hub is fetch"
    ):
        GRPO("owner/name-GGUF", score_length, log_to=())


def test_a_hub_that_does_not_answer_is_one_line_and_one_error(monkeypatch, caplog):
    """huggingface_hub's own retries of a closed port, without the pauses between them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )
    pauses = []
    monkeypatch.setattr(_http.time, "sleep", pauses.append)
    with pytest.raises(ValueError, match="model='owner/name' cannot be loaded: .*there is no such folder either"):
        GRPO("owner/name", score_length, log_to=())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("huggingface_hub")]
    assert len(lines) == bool(pauses)  # huggingface_hub 0.x does not try again
    assert all("thrown while requesting HEAD http://127.0.0.1:9/owner/name" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "absent", "message"),
    [
        ({"lora_rank": 2}, "peft", "lora_rank needs peft: pip install peft"),
        ({"updater": "deepspeed"}, "deepspeed", "updater='deepspeed' needs deepspeed: pip install deepspeed"),
        ({"engine": "vllm"}, "vllm", r"engine='vllm' needs vLLM \(tested with .*\): pip install vllm "),
    ],
)
def test_a_missing_extra_is_named(model, tokenizer, monkeypatch, given, absent, message):
    find = importlib.metadata.version

    def version(name):
        if name.startswith(absent):
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ImportError, match=message):
        GRPO(copy.deepcopy(model), score_length, tokenizer=tokenizer, **SETTINGS, **given).train(["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_object_of_16_bits_trains_in_float32(model, tokenizer, dtype, caplog):
    """At 1e-6 an update of a bfloat16 weight is mostly rounded away: measured 2,242 of 99,904 weights moved."""
    trainer = GRPO(
        copy.deepcopy(model).to(dtype), lambda c: [float(i) for i in range(len(c))], tokenizer=tokenizer, **SETTINGS
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert "converted to float32, as 16 bits drop small updates" in caplog.text
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train(["a", "b"])
    moved = sum(int((before[name] != now).sum()) for name, now in trainer.model.named_parameters())
    assert moved > 0.5 * sum(parameter.numel() for parameter in trainer.model.parameters())


def test_frozen_16_bit_weights_under_an_adapter_stay(model, tokenizer):
    trainer = GRPO(copy.deepcopy(model).bfloat16(), score_length, tokenizer=tokenizer, lora_rank=2, **SETTINGS)
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in trainer.model.parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}


def test_no_end_token_is_warned_of(make_tiny_model, tokenizer, caplog):
    plain, without = make_tiny_model("qwen2", vocab_size=len(tokenizer)), copy.deepcopy(tokenizer)
    without.eos_token = None
    GRPO(copy.deepcopy(plain), score_length, tokenizer=without, **SETTINGS)
    assert "every completion runs to max_new_tokens=4; set one of them, or pass stop=" in caplog.text
    caplog.clear()
    GRPO(copy.deepcopy(plain), score_length, tokenizer=without, stop=("\n",), **SETTINGS)
    GRPO(copy.deepcopy(plain), score_length, tokenizer=tokenizer, **SETTINGS)
    GRPO(ToyLM(), share_of_target, **options())  # tokens in, tokens out
    assert "no end token" not in caplog.text


def test_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path):
    for step in (1, 12):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    with pytest.raises(ValueError, match="it is the folder of a run: pass '.*checkpoints.step_000012'"):
        GRPO(tmp_path, score_length, log_to=())


@pytest.mark.parametrize("targets", ["q_proj", ["query"]])
def test_lora_without_a_layer_names_those_that_there_are(model, tokenizer, targets):
    with pytest.raises(ConfigError, match=r"lora_target_modules=.* names no layer .*\(q_proj, k_proj, .*'all-linear'"):
        GRPO(
            copy.deepcopy(model),
            score_length,
            tokenizer=tokenizer,
            lora_rank=2,
            lora_target_modules=targets,
            **SETTINGS,
        )


def test_a_folder_without_a_tokenizer(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer beside it: pass tokenizer="):
        GRPO(tmp_path, score_length, log_to=())


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def halve(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


REMOTE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
FOLDER_ROWS = [
    ("truncated weights", lambda folder: halve(folder, "model.safetensors"), "weights is truncated or damaged: fetch"),
    (
        "a pointer of git-lfs",
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "weights is truncated or damaged: fetch",
    ),
    ("other shapes", lambda folder: change_config(folder, intermediate_size=64), "have other shapes than its config"),
    (
        "a config that contradicts itself",
        lambda folder: change_config(folder, num_hidden_layers=3),
        "cannot be loaded: .*num_hidden_layers|which would be random",
    ),
    (
        "code of its own",
        lambda folder: change_config(folder, **REMOTE),
        r"load it by from_pretrained\(…, trust_remote_code=True\) and pass the model",
    ),
    (
        "a truncated tokenizer",
        lambda folder: halve(folder, "tokenizer.json"),
        "has a tokenizer that cannot be loaded: .*; fetch its files again, or pass tokenizer=",
    ),
    (
        "a tokenizer of another form",
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "has a tokenizer that cannot be loaded: .*; fetch its files again, or pass tokenizer=",
    ),
    (
        "a slow tokenizer whose config is truncated",
        lambda folder: ((folder / "tokenizer.json").unlink(), halve(folder, "tokenizer_config.json")),
        "has a tokenizer that cannot be loaded: .*; fetch its files again, or pass tokenizer=",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [row[1:] for row in FOLDER_ROWS], ids=[row[0] for row in FOLDER_ROWS])
def test_a_damaged_folder_is_one_error_that_names_it(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        GRPO(folder, score_length, log_to=())
    assert f"model={str(folder)!r}" in str(caught.value)


def test_weights_that_the_files_lack_are_not_drawn_at_random(model, folder, tokenizer):
    """Saved by AutoModel, a model has no output layer, and a run would train a random one."""
    model.model.save_pretrained(folder)
    with pytest.raises(ValueError, match="no weights for lm_head.weight, which would be random: .* a whole Qwen2For"):
        GRPO(folder, score_length, log_to=())
    loaded = Qwen2ForCausalLM.from_pretrained(folder)
    GRPO(loaded, score_length, tokenizer=tokenizer, log_to=())  # the user has seen what transformers reports


@pytest.mark.parametrize("damage", ["truncated", "no output layer"])
def test_a_reference_server_refuses_such_a_folder(model, folder, monkeypatch, damage):
    from rlox_grpo.reference.server import serve

    monkeypatch.setenv("RLOX_GRPO_REFERENCE_TOKEN", "secret words")
    if damage == "truncated":
        halve(folder, "model.safetensors")
    else:
        model.model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"model='.*' cannot be loaded: .*(truncated or damaged|would be random)"):
        serve(str(folder), host="127.0.0.1", port=0, dtype="float32", token_file=None, token_budget=64)


def test_tied_weights_are_not_missing(make_tiny_model, tokenizer, tmp_path):
    make_tiny_model("qwen2", vocab_size=len(tokenizer), tie_word_embeddings=True).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trainer = GRPO(tmp_path, score_length, log_to=())
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


def test_a_home_folder_is_written_out():
    with pytest.raises(ValueError, match="model='~/models/mine': no such folder .*write the whole path in place of ~"):
        GRPO("~/models/mine", score_length, log_to=())


def test_a_learning_rate_that_overflows_names_the_sample(model, tokenizer):
    with pytest.raises(
        FloatingPointError,
        match=r"at prompts\[\d\], completion token \d: .*; lower learning_rate or max_grad_norm",
    ):
        GRPO(
            copy.deepcopy(model),
            lambda completions: [float(index % 2) for index in range(len(completions))],
            tokenizer=tokenizer,
            **{**SETTINGS, "max_steps": 3, "learning_rate": 1e30},
        ).train(["a", "b"])


def test_a_processor_that_does_not_fit():
    class Processor:
        image_processor = object()

    with pytest.raises(TypeError, match="processor is a Processor, which has no tokenizer: .* vision-language model"):
        GRPO(ToyLM(), share_of_target, tokenizer=Processor())
    Processor.tokenizer = object()
    with pytest.raises(ValueError, match="processor is a Processor, and model is a ToyLM: pictures need a vision-lang"):
        GRPO(ToyLM(), share_of_target, tokenizer=Processor())
    with pytest.raises(TypeError, match="tokenizer is a Processor, and processor is set too"):
        GRPO(ToyLM(), share_of_target, tokenizer=Processor(), processor=Processor())
    with pytest.raises(TypeError, match="processor='folder' is a path: pass .*AutoProcessor.from_pretrained"):
        GRPO(ToyLM(), share_of_target, processor="folder")


def test_a_vision_language_model_is_refused_or_trained_on_text_with_a_warning(tmp_path, make_tiny_model, caplog):
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded: .* no file named model.safetensors") as caught:
        GRPO(tmp_path, share_of_target)
    assert len(str(caught.value)) < 600  # without the list of all causal models
    model = make_tiny_model("qwen2")
    model.config.vision_config = {}
    GRPO(model, share_of_target, log_to=())
    assert "reads pictures or audio: it is trained on text alone" in caplog.text

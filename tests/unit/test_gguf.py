"""GGUF files: a tiny quantized Llama, written by gguf's own writer, is loaded, trained, saved and reloaded."""

import json
import struct
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.cli import main
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.gguf import find_gguf, load_gguf, make_ordinary, read_header
from rlox_grpo.model.load import load_policy

SPECIAL = ["<unk>", "<s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "cd"]
START, END, END_OF_TEXT = 1, 4, 5  # not 2, the end token of transformers' LlamaConfig
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
HEADS, KEY_HEADS, HEAD_SIZE, LAYERS, WIDTH, INNER = 4, 2, 16, 2, 64, 96
Q8, Q4, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F32"))
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OPTIONS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 6, "learning_rate": 1e-3, "log_to": ()}
PROMPTS = [[{"role": "user", "content": text}] for text in ("ab", "cd", "ef", "gh")]
IDS = torch.tensor([[START, 40, 41, 42, 43, 44]])


def count_letters(completions):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def in_pairs(weight, heads):
    """Rows of a query or key matrix in llama.cpp's order: the two halves of each rotation beside each other."""
    return weight.reshape(heads, 2, HEAD_SIZE // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def in_halves(weight, heads):
    """The inverse of :func:`in_pairs`."""
    return weight.reshape(heads, HEAD_SIZE // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def make_source():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # larger than its start, so that attention is not uniform
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model.state_dict()


def list_tensors():
    """Name in the file → (weights of the source in the file's order, type in the file)."""
    source = {name: weight.numpy() for name, weight in make_source().items()}
    tensors = {}
    for short, name in NAMES.items():
        top = short in ("token_embd", "output", "output_norm")
        for layer in [None] if top else range(LAYERS):
            key = f"{short}.weight" if top else f"blk.{layer}.{short}.weight"
            weight = source[f"{name}.weight" if top else f"model.layers.{layer}.{name}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = in_pairs(weight, HEADS if short == "attn_q" else KEY_HEADS)
            tensors[key] = weight, F32 if weight.ndim == 1 else Q4 if short.startswith("ffn") else Q8
    return tensors


def write_gguf(path, tensors=None, architecture="llama", **changes):
    """Write the tiny model; ``changes`` replace metadata of its architecture, as ``block_count=3``."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    metadata = {
        "context_length": 128,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "rope.dimension_count": HEAD_SIZE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "vocab_size": len(TOKENS),
    }
    for key, value in {**metadata, **changes}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(END_OF_TEXT)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, (weight, kind) in (list_tensors() if tensors is None else tensors).items():
        data = weight if kind == F32 else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


def load_raw(file):
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_weights_are_what_gguf_dequantizes(file):
    state = load_policy(file, None, GRPOConfig()).model.state_dict()
    assert {weight.dtype for weight in state.values()} == {torch.float32}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    source = make_source()
    for key, tensor in stored.items():
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        *layer, short = key.removesuffix(".weight").removeprefix("blk.").split(".")
        name = (f"model.layers.{layer[0]}." if layer else "") + f"{NAMES[short]}.weight"
        if short in ("attn_q", "attn_k"):
            expected = in_halves(expected, HEADS if short == "attn_q" else KEY_HEADS)
        assert np.array_equal(state.pop(name).numpy(), expected), key
        # Half a step of Q4_1: a block's range, at most 0.8, in 15 steps. In another order of rows it would be 0.3.
        assert np.abs(expected - source[name].numpy()).max() < 0.03, key
    assert not state


def test_logits_are_those_of_transformers_own_loading(file):
    assert torch.equal(logits(load_policy(file, None, GRPOConfig()).model), logits(load_raw(file)))


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_run_from_gguf_saves_an_ordinary_folder(file, tmp_path, what):
    model = file if what == "file" else file.parent
    trainer = GRPO(model, count_letters, max_steps=2, output_dir=tmp_path / "run", **OPTIONS)
    before = logits(trainer.model)
    trainer.train(PROMPTS)
    trainer.save(tmp_path / "out")
    assert not torch.equal(logits(trainer.model), before)
    for folder in (tmp_path / "out", next((tmp_path / "run" / "checkpoints").iterdir())):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(trainer.model))
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        check_tokens(folder)


@pytest.mark.parametrize("name", ["ref_model", "teacher"])
def test_a_gguf_file_scores_as_the_model_in_it(file, name):
    """The policy is the file's model with a sharper output layer, and every weight after two steps is compared."""

    def train(scorer):
        policy = load_policy(file, None, GRPOConfig())
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(2)
        options = {**OPTIONS, "max_steps": 2, "kl_coef": 0.1 if name == "ref_model" else 0.0, name: scorer}
        trainer = GRPO(policy.model, count_letters, tokenizer=policy.tokenizer, **options)
        metrics = trainer.train(PROMPTS)
        assert metrics["policy/kl" if name == "ref_model" else "teacher/kl"] > 1e-3
        return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    assert torch.equal(train(str(file)), train(load_raw(file)))


def check_tokens(folder):
    """Assert that a folder has the file's tokenizer, chat template and end tokens."""
    tokenizer, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.bos_token_id, generation.pad_token_id) == ([END, END_OF_TEXT], START, 2)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [END, END_OF_TEXT]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", TEMPLATE)
    text = tokenizer.apply_chat_template(PROMPTS[0], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == TOKENS.index("<|im_start|>")
    assert TOKENS.index("ab") in ids
    assert END in ids
    assert tokenizer.decode(ids) == text


def test_only_the_files_end_tokens_end_a_completion(file):
    assert load_policy(file, None, GRPOConfig()).eos_token_ids == (END, END_OF_TEXT)


def test_texts_begin_with_the_start_token_where_the_file_says_so(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    key = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)  # a key, and the type of its value: bool
    data = path.read_bytes()
    assert load_policy(path, None, GRPOConfig()).tokenizer("x").input_ids[0] != START
    path.write_bytes(data.replace(key + b"\0", key + b"\1"))
    policy = load_policy(path, None, GRPOConfig())
    assert policy.tokenizer("x").input_ids[0] == START
    policy.tokenizer.save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("x").input_ids[0] == START


def test_a_model_object_from_gguf_can_be_saved(file, tmp_path):
    model = load_raw(file)
    trainer = GRPO(model, count_letters, max_steps=1, output_dir=tmp_path / "run", **OPTIONS)
    trainer.train(PROMPTS)  # by the file's tokenizer
    trainer.save(tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    check_tokens(tmp_path / "out")


def test_end_tokens_that_the_user_has_set_stay(file):
    model = load_raw(file)
    model.generation_config.eos_token_id = 7
    assert load_policy(model, None, GRPOConfig()).eos_token_ids == (END, 7)


def test_weights_in_blocks_are_refused(file):
    model = load_raw(file)
    model.quantization_method, model.hf_quantizer = "gguf", SimpleNamespace(packed_modules={"lm_head": None})
    with pytest.raises(ValueError, match=r"keeps its weights in blocks, which cannot be trained: pass the path"):
        make_ordinary(model)


def test_lora_over_a_gguf_file(file, tmp_path):
    trainer = GRPO(str(file), count_letters, max_steps=1, lora_rank=2, **OPTIONS)
    trainer.train(PROMPTS)
    trainer.save(tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter", None, GRPOConfig()).model  # its base model is the file
    assert torch.equal(logits(again), logits(trainer.model))
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    # W + BA in one product and in two: float32, sums of 64
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(again), rtol=1e-4, atol=1e-4
    )


def test_an_adapter_object_over_gguf_can_be_saved(file, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load_raw(file), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = GRPO(model, count_letters, tokenizer=load_policy(file, None, GRPOConfig()).tokenizer, **OPTIONS)
    trainer.save(tmp_path / "out", merged=True)
    assert not hasattr(model.get_base_model(), "hf_quantizer")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).shape == logits(model).shape


def test_four_bits_are_refused_with_the_way_to_them(file, tmp_path):
    message = r"load_in_4bit=True .* is a GGUF file.*rlox-grpo convert FILE.gguf OUT"
    with pytest.raises(ConfigError, match=message):
        GRPO(file, count_letters, lora_rank=2, load_in_4bit=True, **OPTIONS)
    GRPO(file, count_letters, lora_rank=2, **OPTIONS).save(tmp_path)
    with pytest.raises(ValueError, match=rf"is an adapter over .*: {message}"):
        GRPO(tmp_path, count_letters, load_in_4bit=True, **OPTIONS)


def test_convert_writes_what_a_run_reads(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(file), str(out)]) == 0
    assert f"{out}: {file} as a Hugging Face folder" in capsys.readouterr().out
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(load_raw(file)))
    check_tokens(out)
    main(["memory", str(file), "--gpu-memory", "8"])
    of_file = capsys.readouterr().out
    main(["memory", str(out), "--gpu-memory", "8"])
    assert capsys.readouterr().out.splitlines()[1:] == of_file.splitlines()[1:]
    assert main(["convert", str(out), str(tmp_path / "again")]) == 2
    assert "is no GGUF file, and no folder with one" in capsys.readouterr().err


def test_convert_that_fails_leaves_no_folder(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(file), "~/out"]) == 2
    assert "would be a folder named ~ here" in capsys.readouterr().err
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-64])
    assert main(["convert", "cut.gguf", "out"]) == 2
    assert "truncated" in capsys.readouterr().err
    monkeypatch.setattr("rlox_grpo.model.gguf.load_gguf", lambda *_: raise_damage())
    assert main(["convert", str(file), "out"]) == 2
    assert "damaged weights" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def raise_damage():
    raise ValueError("damaged weights")


def test_run_files_and_evaluations_take_a_gguf_file(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in PROMPTS)
    (tmp_path / "rows.jsonl").write_text(rows)
    lines = [f"model = '{file}'", "train_data = 'rows.jsonl'", "max_steps = 1", "group_size = 2", "max_new_tokens = 4"]
    (tmp_path / "run.toml").write_text("\n".join([*lines, "prompts_per_step = 2", "[[rewards]]", "name = 'exact'"]))
    assert main(["train", "run.toml"]) == 0
    words = ["--data", "rows.jsonl", "--reward", "exact", "--greedy", "--max_new_tokens", "4"]
    assert main(["eval", str(file), *words]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_reference_server_serves_a_gguf_file(file, monkeypatch):
    from rlox_grpo.reference import server

    monkeypatch.setenv("RLOX_GRPO_REFERENCE_TOKEN", "secret words")
    served = []
    monkeypatch.setattr(server, "make_server", lambda submit, about, *_, **__: served.append(about) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.serve(str(file), host="127.0.0.1", port=0, dtype="float32", token_file=None, token_budget=64)
    assert served[0]["vocabulary"] == len(TOKENS)


@pytest.mark.parametrize("command", ["serve", "layout"])
def test_vllm_gets_no_gguf_file(file, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("RLOX_GRPO_SERVER_TOKEN", "secret words")
    (tmp_path / "run.toml").write_text(
        f"model = '{file}'\ntrain_data = 'rows.jsonl'\n[[rewards]]\nname = 'exact'\n[layout]\nengines = 1"
    )
    words = ["serve", str(file)] if command == "serve" else ["train", str(tmp_path / "run.toml"), "--ray", "local"]
    assert main(words) == 2
    assert "does not read: write an ordinary folder by `rlox-grpo convert FILE.gguf OUT`" in capsys.readouterr().err


def test_a_folder_with_other_weights_is_an_ordinary_one(file, tmp_path):
    trainer = GRPO(file, count_letters, **OPTIONS)
    trainer.save(tmp_path)
    (tmp_path / "also.gguf").write_bytes(file.read_bytes())
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "also.gguf") == tmp_path / "also.gguf"


def test_which_file_is_meant(file, tmp_path):
    with pytest.raises(ValueError, match=r"none.gguf': no such file .*hf download"):
        GRPO(tmp_path / "none.gguf", count_letters, **OPTIONS)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"holds several GGUF files \(a.gguf, b.gguf\): pass the path of one"):
        GRPO(tmp_path, count_letters, **OPTIONS)
    (tmp_path / "a.gguf").rename(tmp_path / "a-00001-of-00002.gguf")
    for source in (tmp_path, tmp_path / "a-00001-of-00002.gguf"):
        with pytest.raises(ValueError, match=r"one of several files of a model: merge them by .*--merge"):
            GRPO(source, count_letters, **OPTIONS)


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_without_the_extra_the_error_names_it(file, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ImportError, match=rf'GGUF file, and {missing} is not installed: pip install "rlox-grpo\[gguf\]"'
    ):
        GRPO(file, count_letters, **OPTIONS)


def test_a_file_without_all_weights_is_refused(tmp_path):
    tensors = list_tensors()
    tensors.pop("blk.1.ffn_up.weight")
    path = write_gguf(tmp_path / "x.gguf", tensors)
    with pytest.raises(ValueError, match=r"states a model of \d+ weights and has \d+: it is damaged or incomplete"):
        load_gguf(path, torch.float32)
    tensors["blk.1.extra.weight"] = list_tensors()["blk.1.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"no weights for model.layers.1.mlp.up_proj.weight, which would be random"):
        load_gguf(write_gguf(path, tensors), torch.float32)


def test_weights_of_other_shapes_are_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", feed_forward_length=INNER - 32)
    with pytest.raises(ValueError, match=r"states the shape \(64, 64\) of .*_proj.weight and has \(96, 64\)|mismatch"):
        load_gguf(path, torch.float32)


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded: .*wavtokenizer.*not supported.*transformers reads"):
        load_gguf(write_gguf(tmp_path / "x.gguf", architecture="wavtokenizer-dec"), torch.float32)


def test_positions_that_transformers_does_not_scale_are_warned_of(tmp_path, caplog):
    tensors = list_tensors() | {"rope_freqs.weight": (np.ones(HEAD_SIZE // 2, dtype=np.float32), F32)}
    load_gguf(write_gguf(tmp_path / "x.gguf", tensors), torch.float32)
    assert "transformers does not read rope_freqs.weight" in caplog.text


def entry(key, kind, value):
    """An entry of the metadata: a key, the type of its value, and its bytes."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def hostile(entries=(), tensors=b"", counts=None):
    tensors_stated, entries_stated = counts or (0, len(entries))
    return b"GGUF" + struct.pack("<IQQ", 3, tensors_stated, entries_stated) + b"".join(entries) + tensors


def tensor(name, shape, kind=0, offset=0):
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
    return head + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is not a GGUF file"),
        (b"PK\3\4" + bytes(100), "it is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
        (b"GGUF" + struct.pack("<I", 3), "truncated or damaged"),
        (hostile(counts=(2**63, 0)), "states 9223372036854775808 tensors"),
        (hostile(counts=(0, 2**40)), "1099511627776 entries"),
        (hostile([entry(b"a", 9, struct.pack("<IQ", 4, 2**60))]), "an array of 1152921504606846976 items"),
        (hostile([entry(b"a", 9, struct.pack("<IQ", 9, 3))]), "an array of 3 items of type 9"),
        (hostile([entry(b"a", 8, struct.pack("<Q", 2**50))]), "a text of 1125899906842624 bytes"),
        (hostile([entry(b"a", 9, struct.pack("<IQ", 8, 1000))]), "truncated or damaged"),
        (hostile([entry(b"a", 77, b"")]), "a value of type 77"),
        (hostile([entry(b"llama.block_count", 4, struct.pack("<I", 9))]), "block_count=9 and has 0 tensors"),
        (hostile([entry(b"llama.expert_count", 4, struct.pack("<I", 2**31))]), "expert_count=2147483648"),
        (hostile([entry(b"general.alignment", 4, bytes(4))]), "general.alignment=0"),
        (hostile(tensors=tensor(b"x", (1,) * 9), counts=(1, 0)), "has 9 dimensions"),
        (hostile(tensors=tensor(b"x", (4,), kind=999), counts=(1, 0)), "is of type 999"),
        (hostile(tensors=tensor(b"x", (33,), kind=8), counts=(1, 0)), "rows of 33 weights in blocks of 32"),
        (hostile(tensors=tensor(b"x", (2**40, 2**20)), counts=(1, 0)), "it is truncated, fetch it again"),
        (hostile(tensors=tensor(b"x", (8,), offset=2**62), counts=(1, 0)), "it is truncated, fetch it again"),
        # Two tensors on the same 64 bytes.
        (hostile(tensors=tensor(b"x", (16,)) + tensor(b"y", (16,)) + bytes(128), counts=(2, 0)), "it is truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_hostile_file_is_refused_by_its_header(tmp_path, data, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"x.gguf' cannot be loaded: .*{message}"):
        read_header(path)


def test_a_truncated_download_is_refused(file, tmp_path):
    for share in (0.1, 0.5, 0.999):
        path = tmp_path / "x.gguf"
        path.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
        with pytest.raises(ValueError, match="cannot be loaded: .*it is truncated"):
            GRPO(path, count_letters, **OPTIONS)


def test_a_huge_model_is_refused_before_it_is_allocated(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", feed_forward_length=2**31 - 1)
    with pytest.raises(ValueError, match=r"states a model of \d{12,} weights and has \d+: it is damaged"):
        load_gguf(path, torch.float32)

"""Uploading to a hub that runs here, and the model card that ``save`` writes."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.repocard_data import ModelCardData
from transformers import AutoModelForCausalLM

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.rewards import ExactAnswer
from rlox_grpo.run.export import MARK, make_card
from toy import ToyLM

SETTINGS = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub for one commit of small files."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = self.server.asked
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked["create"] = json.loads(body)
            return self._answer({"url": f"{self.server.address}/me/my-model", "id": "1"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.startswith("/api/models/me/my-model/preupload/"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if self.path.startswith("/api/models/me/my-model/commit/"):
            lines = [json.loads(line) for line in body.splitlines()]
            asked["revision"] = self.path.rpartition("/")[2]
            asked["message"] = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            asked["files"] = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            asked["deleted"] = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
            return self._answer(
                {"commitUrl": f"{self.server.address}/me/my-model/commit/abc", "commitOid": "abc", "success": True}
            )
        return self._answer({"error": f"unknown {self.path}"}, 404)

    def do_GET(self):
        if self.path.startswith("/api/models/me/my-model/revision/"):
            return self._answer({"id": "me/my-model", "xetEnabled": False})
        if self.path.startswith("/api/models/me/my-model/tree/main"):
            files = [{"type": "file", "path": name, "size": 1, "oid": "1"} for name in self.server.held]
            return self._answer(files)
        if self.path.startswith("/me/my-model/resolve/"):
            return self._answer(self.server.held[self.path.rpartition("/")[2]])
        self._answer({"error": f"unknown {self.path}"}, 404)

    def do_HEAD(self):
        content = self.server.held.get(self.path.rpartition("/")[2])
        has_file = content is not None
        self.send_response(200 if has_file else 404)
        headers = {"ETag": '"1"', "X-Repo-Commit": "abc"} if has_file else {"X-Error-Code": "EntryNotFound"}
        for name, value in {**headers, "Content-Length": str(len(json.dumps(content)))}.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address, server.asked, server.held = f"http://127.0.0.1:{server.server_port}", {}, {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for module in (huggingface_hub.constants, huggingface_hub.hf_api):
        if hasattr(module, "ENDPOINT"):
            monkeypatch.setattr(module, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def trainer(make_tiny_model, byte_tokenizer):
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    changes = {"learning_rate": 1e-4, "reward_weights": [1.0, 0.1], **SETTINGS}
    trainer = GRPO(model, [ExactAnswer(), count], tokenizer=byte_tokenizer, **changes)
    trainer.train([{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 3 =", "answer": "6"}])
    return trainer


def count(completions):
    return [float(len(completion)) for completion in completions]


def test_the_upload_is_what_save_writes(hub, trainer, tmp_path):
    address = trainer.push_to_hub("me/my-model", private=True, token="hf_good", commit_message="the first")
    trainer.save(tmp_path)
    assert address == f"{hub.address}/me/my-model/commit/abc"
    created = hub.asked["create"]
    assert (created["organization"], created["name"]) == ("me", "my-model")
    assert created.get("private") is True or created.get("visibility") == "private"
    assert (hub.asked["revision"], hub.asked["message"]) == ("main", "the first")
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert hub.asked["files"] == written
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= written.keys()


def test_a_whole_model_is_not_uploaded_beside_an_adapter(hub, trainer):
    """from_pretrained would load the adapter, which an earlier upload left there, and not the model."""
    hub.held["adapter_config.json"] = ""
    with pytest.raises(ValueError, match=r"me/my-model holds an adapter \(adapter_config.json\)"):
        trainer.push_to_hub("me/my-model", token="hf_good")
    assert "files" not in hub.asked


def test_weights_of_an_earlier_model_are_deleted(hub, trainer):
    stale = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}
    hub.held |= dict.fromkeys([*stale, "model.safetensors", "my.safetensors", "old/pytorch_model.bin"], "")
    trainer.push_to_hub("me/my-model", token="hf_good")
    assert hub.asked["deleted"] == stale
    assert "model.safetensors" in hub.asked["files"]


@pytest.mark.parametrize(("card", "is_ours"), [("my own words", False), (f"{MARK} of an earlier run", True)])
def test_a_card_of_ones_own_stays_on_the_hub(hub, trainer, card, is_ours, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub.held["README.md"] = card
    trainer.push_to_hub("me/my-model", token="hf_good")
    assert ("README.md" in hub.asked["files"]) is is_ours
    assert "config.json" in hub.asked["files"]


def test_a_refusal_is_the_hubs_own_words(hub, trainer):
    with pytest.raises(HfHubHTTPError, match="Invalid username or password"):
        trainer.push_to_hub("me/my-model", token="hf_bad")
    assert "files" not in hub.asked


@pytest.mark.parametrize("name", ["", "a/b/c", "me/..", "me/with space"])
def test_a_name_that_no_repository_has_is_refused_before_any_work(name, trainer):
    with pytest.raises(ValueError, match=f"repo_id is {name!r}"):
        trainer.push_to_hub(name)


def test_a_plain_module_has_no_place_on_the_hub():
    with pytest.raises(ValueError, match="the model is a ToyLM: only transformers models go to the hub"):
        GRPO(ToyLM(), count, log_to=()).push_to_hub("me/my-model")


def test_the_card_beside_a_saved_model(trainer, tmp_path):
    trainer.save(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    data = huggingface_hub.ModelCard.load(tmp_path / "README.md").data
    assert isinstance(data, ModelCardData)
    assert (data.library_name, data.tags) == ("transformers", ["grpo", "reinforcement-learning", "rlox-grpo"])
    assert "Reward functions: `exact_answer`, `count`." in text
    assert "1 steps" in text
    assert "learning_rate = 0.0001" in text
    assert "| `reward/mean` |" in text
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_card_of_ones_own_stays_and_ours_is_renewed(trainer, tmp_path):
    card = tmp_path / "README.md"
    card.write_text("my own words", encoding="utf-8")
    trainer.save(tmp_path)
    assert card.read_text(encoding="utf-8") == "my own words"
    card.write_text(f"{MARK}\nof an earlier run", encoding="utf-8")
    trainer.save(tmp_path)
    assert "of an earlier run" not in card.read_text(encoding="utf-8")


def test_a_link_in_place_of_a_card_is_neither_read_nor_written(trainer, tmp_path):
    secret, card = tmp_path / "secret", tmp_path / "saved" / "README.md"
    secret.write_text("the secret")
    card.parent.mkdir()
    card.symlink_to(secret)
    trainer.save(card.parent)
    assert secret.read_text() == "the secret"
    assert not card.is_symlink()
    assert MARK in card.read_text()


@pytest.mark.filterwarnings("ignore:Could not find a config file in owner/base")
def test_an_adapters_card(make_tiny_model, byte_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # peft asks the hub for the base model's configuration
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=1)
    model.name_or_path = model.config._name_or_path = "owner/base"
    trainer = GRPO(model, count, tokenizer=byte_tokenizer, lora_rank=2, **SETTINGS)
    trainer.save(tmp_path / "adapter")
    data = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md").data
    assert (data.library_name, data.base_model, data["base_model_relation"]) == ("peft", "owner/base", "adapter")
    trainer.save(tmp_path / "merged", merged=True)
    data = huggingface_hub.ModelCard.load(tmp_path / "merged" / "README.md").data
    assert (data.library_name, data["base_model_relation"]) == ("transformers", "finetune")


def test_a_card_names_nothing_of_this_machine(tmp_path):
    config = GRPOConfig.create(
        output_dir=str(tmp_path / "secret"), system_prompt="secret words", engine="vllm_server",
        server_urls=["http://secret:8000"], reference="server", reference_url="http://secret:9000", kl_coef=0.1,
    )  # fmt: skip
    (tmp_path / "secret").mkdir()
    text = make_card(
        config, base_model=str(tmp_path / "secret" / "base"), is_adapter=False, rewards=["r"], step=3, metrics={}
    )
    assert "secret" not in text
    assert "kl_coef = 0.1" in text
    assert "`base`" in text

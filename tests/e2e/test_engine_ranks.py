"""Several ranks with vLLM in their processes, on a stand-in for vLLM (``tests/stub_vllm.py``)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import ranked
import stub_vllm
import warm
from rlox_grpo.distributed.host_group import HostGroup
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError, EngineError
from rlox_grpo.rollout.engines.vllm import engine as vllm_engine
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.types import Prompt, Sampling

# As in test_ranks.py: sums of float32 gradients in another order, through AdamW steps of 1e-3.
SAME_WEIGHTS = 5e-5
RUNS = {
    "sharing": {"tensor_parallel_size": 2},  # 7 prompts over the two ranks of one engine
    "ahead": {"async_steps": 1},  # the engines' threads compare syncs while the main threads exchange completions
    "sharing ahead": {"tensor_parallel_size": 2, "async_steps": 1},
    "sharded ahead": {"shard_parameters": True, "async_steps": 1},
}
ALONE = {"tensor_parallel_size": 1, "shard_parameters": False}
SHORT = {"max_steps": 3, "prompts_per_step": 7, "group_size": 2}


def completions(folder):
    files = sorted((Path(folder) / "completions").glob("step_*.jsonl"))
    return [[(row["prompt"], row["completion"]) for row in read_jsonl(file)] for file in files]


def difference(left, right):
    one, other = (load_file(Path(folder) / "saved" / "model.safetensors") for folder in (left, right))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm.make_module())
    monkeypatch.setattr(vllm_engine, "check_vllm_version", lambda: None)


@pytest.mark.slow
def test_ranks_with_engines_take_the_step_of_one_process(stub, tmp_path):
    runs = [word for name in RUNS for word in (str(tmp_path / name), json.dumps({**SHORT, **RUNS[name]}))]
    done = warm.run(2, Path(stub_vllm.__file__), *runs, SLOW_RELOAD_S="0.3")
    assert done.returncode == 0, done.stderr
    for name, changes in RUNS.items():
        alone = tmp_path / f"{name}_alone"
        ranked.train(alone, engine="vllm", **{**SHORT, **changes, **ALONE})
        assert len(completions(alone)) == 3
        assert completions(tmp_path / name) == completions(alone)
        assert difference(alone, tmp_path / name) < SAME_WEIGHTS
    assert max(row["mismatch/gap_max"] for row in read_jsonl(tmp_path / "sharing" / "metrics.jsonl")) < 1e-3


GROUPS = """
import json
import sys
from rlox_grpo.distributed.ranks import join_ranks

ranks = join_ranks(engine_size=2)
sharing = ranks.new_host_group(ranks.engine_size)
told = {"rank": ranks.rank, "place": sharing.rank, "asked": str(ranks.engine_share(7))}
found = sharing.gather(told), ranks.new_host_group().gather(ranks.rank), ranks.gather(ranks.rank)
assert ranks.new_host_group(1).gather("alone") == ["alone"]
open(f"{sys.argv[1]}/{ranks.rank}.json", "w").write(json.dumps(found))
"""


def test_ranks_that_share_an_engine_have_a_group_of_their_own(tmp_path):
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    done = warm.run(4, script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        sharing, everyone, main = json.loads((tmp_path / f"{rank}.json").read_text())
        first = rank - rank % 2
        asked = str(slice(0, 3)) if rank < 2 else str(slice(3, 7))
        assert [(told["rank"], told["place"], told["asked"]) for told in sharing] == [
            (first, 0, asked),
            (first + 1, 1, asked),
        ]
        assert everyone == main == [0, 1, 2, 3]


def test_the_prompts_of_an_engine_are_the_shares_of_its_ranks():
    for size, engine_size in ((1, 1), (2, 2), (4, 2), (6, 3), (8, 2)):
        for count in range(20):
            ranks = [Ranks(rank, size, engine_size=engine_size) for rank in range(size)]
            for rank in ranks:
                peers = [other for other in ranks if other.rank // engine_size == rank.rank // engine_size]
                joined = [place for other in peers for place in range(count)[other.share(count)]]
                assert [*range(count)[rank.engine_share(count)]] == joined


class Sharing:
    """Two ranks that share an engine; the other one's values are these."""

    size = 2

    def __init__(self, *others):
        self.others = list(others)

    def gather(self, value):
        other = self.others.pop(0)
        return [value, value if other == "same" else other]


@pytest.mark.parametrize(
    ("others", "told"),
    [(["0" * 16], "were given different prompts"), (["same", "0" * 16], "sampled different tokens")],
)
def test_ranks_of_one_engine_that_differ_are_refused(stub, monkeypatch, others, told):
    monkeypatch.setattr(stub_vllm.LLM, "_logits", lambda self, rows: self.model(rows).logits[:, -1])
    model = ranked.tiny_policy()
    engine = VLLMEngine(model, ranks=HostGroup(), sharing_ranks=Sharing(*others))
    engine.load_weights(collect_weights(model), version=0)
    with pytest.raises(EngineError, match=f"tensor_parallel_size=2: the ranks that share one vLLM model {told}"):
        engine.generate([Prompt(np.array([1, 2]), 0)], 2, Sampling(4), seed=0)
    engine.close()


def test_a_tensor_parallel_size_that_does_not_divide_the_ranks_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the 1 processes of this run"):
        ranked.GRPO(ranked.tiny_policy(), ranked.share_of_even, engine="vllm", tensor_parallel_size=2)

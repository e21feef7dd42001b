"""Generation beside the update: order, staleness, what a checkpoint keeps."""

import json
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from counted_bytes import CountedBytes
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.async_generation import (
    BackgroundEngine,
    BatchQueue,
    PendingBatch,
    join_states,
    measure_staleness,
)
from rlox_grpo.rollout.engines import MeasuredEngine
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.weight_sync import WeightStream
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling

PROMPTS = [Prompt(np.array([index + 1]), index) for index in range(6)]


class Engine:
    """Samples the value of its one weight; notes what happens in which thread."""

    exact, takes_weights, policy_version, max_length = True, True, 0, None

    def __init__(self, fails=False):
        self.weight, self.calls, self.threads, self.fails = 0.0, [], set(), fails

    def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
        time.sleep(0.02)  # so that the update gets ahead of it
        self.calls.append(("generate", seed, self.policy_version))
        self.threads.add(threading.current_thread().name)
        completion = Completion(np.array([int(self.weight)]), np.zeros(1, np.float32), "stop")
        return [RolloutGroup(prompt, (completion,) * group_size, self.policy_version) for prompt in prompts]

    def load_weights(self, weights, version):
        if self.fails:
            raise OSError("no room")
        self.calls.append(("load", version))
        self.weight, self.policy_version = float(dict(weights)["w"]), version

    def close(self):
        self.calls.append(("close",))


def test_the_metrics_of_the_engine_are_passed_on_where_it_has_any():
    inner = Engine()
    engine = BackgroundEngine(inner)
    assert isinstance(engine, MeasuredEngine)
    assert engine.take_metrics() == {}
    inner.take_metrics = lambda: {"engines/0/restarts": 1.0}
    assert engine.take_metrics() == {"engines/0/restarts": 1.0}
    engine.close()


def test_calls_run_in_order_in_one_thread_of_their_own():
    inner = Engine()
    engine, weight = BackgroundEngine(inner), torch.zeros(())
    jobs = []
    for version in range(1, 4):
        jobs.append(engine.submit(lambda e, v=version: e.generate(PROMPTS[:1], 1, Sampling(4), v)))
        weight.fill_(version)
        engine.load_weights([("w", weight)], version)
        engine.keep_weights()
    weight.fill_(99.0)  # the next update has begun: what was handed over does not change with it
    last = engine.generate(PROMPTS[:1], 1, Sampling(4), 4)
    assert [int(job.result()[0].completions[0].token_ids[0]) for job in jobs] == [0, 1, 2]
    assert int(last[0].completions[0].token_ids[0]) == 3
    assert inner.calls == [
        ("generate", 1, 0), ("load", 1), ("generate", 2, 1), ("load", 2), ("generate", 3, 2), ("load", 3),
        ("generate", 4, 3),
    ]  # fmt: skip
    assert len(inner.threads) == 1
    assert threading.current_thread().name not in inner.threads
    assert engine.policy_version == 3
    assert engine.exact is False
    engine.close()
    assert inner.calls[-1] == ("close",)


def test_nothing_is_sampled_from_weights_that_failed_to_load():
    engine = BackgroundEngine(Engine(fails=True))
    engine.load_weights([("w", torch.ones(()))], 1)
    with pytest.raises(RuntimeError, match="could not take new weights") as found:
        engine.generate(PROMPTS, 2, Sampling(4), 0)
    assert isinstance(found.value.__cause__, OSError)


class Reader:
    """Keeps copies of the weights that it reads, slowly; ``busy`` is a batch that it waits for."""

    exact, takes_weights, policy_version, max_length = True, True, 0, None

    def __init__(self):
        self.read, self.busy = {}, threading.Event()

    def load_weights(self, weights, version):
        for name, tensor in weights:
            time.sleep(0.01)
            self.read[name] = tensor.detach().clone()
        self.policy_version = version

    def close(self):
        pass


def adapted(model, rank=1):
    model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_loads_the_weights_of_when_they_were_handed_over(make_tiny_model, lora, busy):
    model = adapted(make_tiny_model("qwen2")) if lora else make_tiny_model("qwen2")
    expected = {name: tensor.clone() for name, tensor in WeightStream(model)}
    inner = Reader()
    engine = BackgroundEngine(inner)
    if busy:
        engine.submit(lambda _: inner.busy.wait())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with CountedBytes() as counted:  # of this thread: what the engine merges in its own is not in it
        engine.load_weights(WeightStream(model), 1)
        engine.keep_weights()
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    assert counted.peak == (size if busy else 0)
    with torch.no_grad():
        for parameter in trained:
            parameter.fill_(9.0)
    inner.busy.set()
    engine.submit(lambda _: None).result()
    assert inner.read.keys() == expected.keys()
    assert all(torch.equal(inner.read[name], tensor) for name, tensor in expected.items())
    engine.close()


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_rank_whose_engine_does_not_read_the_weights_keeps_none(make_tiny_model, reads, is_sharded):
    """As with shared servers, to which rank 0 hands the weights; it takes part in the gather all the same."""
    model = make_tiny_model("qwen2")
    gathered = []

    def gather():
        for name, parameter in model.named_parameters():
            gathered.append(name)
            yield name, parameter.detach().clone()

    inner = Reader()
    inner.reads_weights = reads
    engine = BackgroundEngine(inner)
    engine.submit(lambda _: inner.busy.wait())
    with CountedBytes() as counted:
        engine.load_weights(WeightStream(model, gather if is_sharded else None), 1)
        kept = counted.live
        engine.keep_weights()
    assert len(gathered) == (len(list(model.parameters())) if is_sharded else 0)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert kept == (whole if reads and is_sharded else 0)
    assert counted.live >= whole if reads else counted.live == 0
    inner.busy.set()
    engine.submit(lambda _: None).result()
    assert bool(inner.read) is reads
    engine.close()


def test_the_built_in_engine_takes_one_merged_weight_at_a_time(make_tiny_model):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    model, own = adapted(make_tiny_model("qwen2", **sizes)), make_tiny_model("qwen2", **sizes)
    engine = HFEngine(own, eos_token_ids=[], takes_weights=True)
    with CountedBytes() as counted:
        engine.load_weights(WeightStream(model), 1)
    largest = max(parameter.numel() * parameter.element_size() for parameter in own.parameters())
    assert counted.peak <= 4 * largest  # merged, B A, scaled
    assert 4 * largest < sum(parameter.numel() * parameter.element_size() for parameter in own.parameters()) / 2
    merged = dict(WeightStream(model))
    assert all(torch.equal(merged[name], tensor) for name, tensor in own.state_dict().items() if name in merged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[1:], r"weights that did not come: model\.embed_tokens\.weight$"),
        (lambda weights: [*weights, weights[0]], "model.embed_tokens.weight is there twice"),
        (lambda weights: [("model.more", weights[0][1])], "model.more is no weight of the engine"),
        (lambda weights: [(weights[0][0], weights[0][1][:3])], r"has shape \(3, 32\), and \(97, 32\) in the engine"),
    ],
)
def test_the_built_in_engine_refuses_weights_of_another_model(change, message, make_tiny_model):
    engine = HFEngine(make_tiny_model("qwen2"), eos_token_ids=[], takes_weights=True)
    read = 0

    def stream(weights):
        nonlocal read
        for weight in weights:
            read += 1
            yield weight

    weights = list(WeightStream(make_tiny_model("qwen2")))
    with pytest.raises(ValueError, match=message):
        engine.load_weights(stream(change(weights)), 1)
    assert engine.policy_version == 0
    read = 0
    engine.load_weights(stream(weights), 1)
    assert (engine.policy_version, read) == (1, len(weights))


def groups(tokens, version=0, start=0):
    log_probs = np.linspace(-1 / 3, -1e-30, len(tokens)).astype(np.float32)
    return [
        RolloutGroup(
            prompt,
            (
                Completion(np.array(tokens), log_probs, "stop", "é\ud800"),
                Completion(np.array([2**40]), np.zeros(1, np.float32), "length", None),
            ),
            version,
        )
        for prompt in PROMPTS[start : start + 2]
    ]


def test_batches_go_through_a_checkpoint_exactly():
    ahead, again = BatchQueue(), BatchQueue()
    ahead.append(PendingBatch.done(PROMPTS[:2], groups([1, 2, 3], version=4)))
    ahead.append(PendingBatch.done(PROMPTS[2:4], groups([9], version=5, start=2)))
    state = json.loads(json.dumps(ahead.state()))
    again.restore(state, PROMPTS, lambda prompts, place: pytest.fail("nothing was lost"))
    assert len(again) == 2
    for expected in (groups([1, 2, 3], version=4), groups([9], version=5, start=2)):
        found = again[0].groups.result()
        again.popleft()
        for left, right in zip(found, expected, strict=True):
            assert (left.prompt.index, left.policy_version) == (right.prompt.index, right.policy_version)
            for one, other in zip(left.completions, right.completions, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.log_probs.dtype == np.float32
                assert one.log_probs.tobytes() == other.log_probs.tobytes()
                assert (one.finish_reason, one.text) == (other.finish_reason, other.text)


def test_ranks_that_sample_together_wait_for_batches_that_have_not_begun():
    """Another rank may have begun such a batch, and waits for this one in the engine."""
    ahead, waiting = BatchQueue(), Future()
    ahead.append(PendingBatch(PROMPTS[:2], waiting))
    threading.Timer(0.1, lambda: waiting.set_result([])).start()
    ahead.clear(cancels=False)
    assert (waiting.result(), len(ahead)) == ([], 0)


def test_a_batch_that_failed_is_sampled_again_by_a_resumed_run():
    ahead, again = BatchQueue(), BatchQueue()
    engine = BackgroundEngine(Engine(fails=True))
    engine.load_weights([("w", torch.ones(()))], 1)
    ahead.append(PendingBatch(PROMPTS[2:4], engine.submit(lambda e: e.generate(PROMPTS[2:4], 2, Sampling(4), 0))))
    with pytest.raises(RuntimeError, match="could not take new weights"):
        ahead[0].groups.result()
    state = json.loads(json.dumps(ahead.state()))
    asked = []

    def sample(prompts, place):
        asked.append(([prompt.index for prompt in prompts], place))
        return PendingBatch.done(prompts, groups([7], start=2))

    again.restore(state, PROMPTS, sample)
    assert asked == [([2, 3], 0)]
    assert again[0].groups.result()[0].completions[0].token_ids.tolist() == [7]


def test_the_states_of_ranks_join_and_each_takes_its_share_back():
    states = []
    for rank in range(2):
        ahead = BatchQueue()
        ahead.append(PendingBatch.done(PROMPTS[:2], groups([rank])[rank : rank + 1]))
        states.append(json.loads(json.dumps(ahead.state())))
    (joined,) = join_states(states)
    assert joined["prompts"] == [0, 1]
    for rank in range(2):
        again = BatchQueue()
        again.restore([joined], PROMPTS, lambda prompts, place: pytest.fail("nothing was lost"), Ranks(rank, 2).share)
        (group,) = again[0].groups.result()
        assert group.prompt.index == rank
        assert group.completions[0].token_ids.tolist() == [rank]
    states[1][0]["groups"] = None  # a rank whose sampling failed: the batch is sampled anew, on every rank
    assert join_states(states) == [{"prompts": [0, 1], "groups": None}]


def test_staleness():
    found = measure_staleness([*groups([1], version=4), *groups([1], version=7)], version=7)
    assert found == {"rollout/staleness_mean": 1.5, "rollout/staleness_max": 3.0}


def test_staleness_is_of_completions_and_not_of_groups():
    (group,) = groups([1, 2], version=3)[:1]
    turns, last = group.completions
    # Turns of the versions 3 and 6 in one episode, and of version 7 alone in the other: 4 and 0 steps behind 7.
    episodes = (replace(turns, turns=(0, 1), versions=(3, 6)), replace(last, turns=(0,), versions=(7,)))
    others = replace(group, completions=group.completions * 3, policy_version=7)
    found = measure_staleness([replace(group, completions=episodes), others], version=7)
    assert found == {"rollout/staleness_mean": 4 / 8, "rollout/staleness_max": 4.0}

"""Training, generation and reference on two hosts: namespaces of this machine with addresses and a cable of their own.

What is the same on both is the disk, as on a cluster with shared storage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from byte_model import SIZES
from safetensors.torch import load_file

import ranked
from hosts import joined_hosts, or_skip
from rlox_grpo.reference.client import TOKEN_VARIABLE as REFERENCE_TOKEN
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE as SERVER_TOKEN

pytestmark = [pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
# Float32 sums in another order through AdamW steps of 1e-3; ten of them measured 1e-6 to 4e-6.
SAME_WEIGHTS = 5e-5
STEPS = 4
RANK_TIMEOUT = 5.0
GRACE = 10.0  # that a rank which hangs in a collective has to raise by itself
RUNS = {
    "torch": {},
    "shards": {"shard_parameters": True},
    "asked": {"reference": "server", "reference_url": "http://host0:8450"},
    "zero2": {"updater": "deepspeed", "zero_stage": 2},
    "zero3": {"updater": "deepspeed", "zero_stage": 3},
}
ENDLESS = {"max_steps": 100_000, "rank_timeout": RANK_TIMEOUT, "checkpoint_steps": 0}


def environment(folder):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
        SERVER_TOKEN: "the generation server's",
        REFERENCE_TOKEN: "the reference server's",
    }


@pytest.fixture(scope="module")
def hosts():
    yield from or_skip(joined_hosts(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def start(folder):
    """``start(host, *command)``: a process there, with its output in a file of the folder; killed at the end."""
    started = []

    def start(host, *command, **options):
        log = folder / f"{len(started)}_{host.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                host.command(sys.executable, *command),
                env=environment(folder),
                stdout=options.pop("stdout", file),
                stderr=file,
                text=True,
                **options,
            )
        process.log = log
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def wait_for(condition, seconds, *processes):
    """Until ``condition`` holds; an AssertionError with the ends of the logs after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(process.log.read_text()[-3000:] for process in processes)
        time.sleep(0.1)


def by_torchrun(hosts, start, *command):
    """``command`` by torchrun with one rank on each host."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "host0:29500"]
    return [start(host, *launcher, *meeting, *command) for host in hosts]


def by_deepspeed(hosts, start, folder, *command):
    """``command`` by DeepSpeed's launcher, started on each host as there is no ssh."""
    (folder / "hosts.txt").write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    launcher = [Path(sys.executable).parent / "deepspeed", "--hostfile", folder / "hosts.txt", "--no_local_rank"]
    meeting = ["--no_ssh", "--master_addr", hosts[0].name, "--node_rank"]
    return [start(host, *launcher, *meeting, place, *command) for place, host in enumerate(hosts)]


def assert_success(processes, seconds):
    wait_for(lambda: all(process.poll() is not None for process in processes), seconds, *processes)
    assert [process.returncode for process in processes] == [0, 0], processes[0].log.read_text()[-3000:]


@pytest.fixture(scope="module")
def generation(hosts, start, folder, make_tiny_model, byte_tokenizer):
    """``rlox-grpo serve`` on host0, open to the other host; it starts while other tests run."""
    make_tiny_model("qwen2", **SIZES).save_pretrained(folder / "model")
    byte_tokenizer.save_pretrained(folder / "model")
    listening = ["--host", "0.0.0.0", "--port", "8000", "--max-length", "256"]
    command = [
        "-m",
        "rlox_grpo",
        "serve",
        folder / "model",
        *listening,
        "--max-num-seqs",
        "16",
    ]
    return start(hosts[0], *command)


@pytest.fixture(scope="module")
def references(hosts, start, folder):
    """``rlox-grpo serve-reference`` on host0: one open to the other host, one as it is by default."""
    ranked.tiny_policy().save_pretrained(folder / "reference")
    command = ["-m", "rlox_grpo", "serve-reference", folder / "reference"]
    opened = start(hosts[0], *command, "--host", hosts[0].address, "--port", "8450")
    default = start(hosts[0], *command, "--port", "8451")
    for process, address in ((opened, f"{hosts[0].address}:8450"), (default, "127.0.0.1:8451")):
        wait_for(lambda process=process, address=address: address in process.log.read_text(), 300, process)


@pytest.fixture(scope="module")
def trained(hosts, start, folder, generation, references):
    """The folder of each of ``RUNS``, all trained in one launch over both hosts."""
    before = [host.sent_bytes() for host in hosts]
    words = [
        word for name, changes in RUNS.items() for word in (folder / name, json.dumps({"max_steps": STEPS, **changes}))
    ]
    assert_success(by_torchrun(hosts, start, HERE.parent / "ranked.py", *words), 500)
    return [host.sent_bytes() - sent for host, sent in zip(hosts, before, strict=True)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in this process."""
    folder = tmp_path_factory.mktemp("alone")
    ranked.train(folder, max_steps=STEPS)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_hosts_take_the_step_of_one_process(name, trained, folder, alone):
    one, two = (load_file(place / "saved" / "model.safetensors") for place in (alone, folder / name))
    assert one.keys() == two.keys()
    largest = max(float((one[key] - two[key]).abs().max()) for key in one)
    print(f"{name}: {largest:.1e}")
    assert largest < SAME_WEIGHTS


def test_the_ranks_met_over_the_cable(trained):
    parameters = sum(parameter.numel() for parameter in ranked.tiny_policy().parameters())
    # At least each rank's share of the gradients of every step and run: half of them, 4 bytes each.
    assert min(trained) > STEPS * len(RUNS) * 2 * parameters, trained


def test_by_default_a_reference_is_not_reached_from_the_other_host(hosts, references, folder):
    script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"
    for host, address, port, said in (
        (hosts[1], hosts[0].address, 8450, ""),
        (hosts[1], hosts[0].address, 8451, "ConnectionRefusedError"),
        (hosts[0], "127.0.0.1", 8451, ""),
    ):
        command = host.command(sys.executable, "-c", script, address, port)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (said in done.stderr) if said else (done.returncode == 0), (port, done.stderr)


def test_zero_3_on_both_hosts_learns_through_a_server_on_one(hosts, start, folder, generation):
    wait_for(
        lambda: "Application startup complete" in generation.log.read_text() or generation.poll() is not None,
        580,
        generation,
    )
    assert generation.poll() is None, generation.log.read_text()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{index}:"}) + "\n" for index in range(8)))
    run = {
        "model": str(folder / "model"),
        "train_data": str(folder / "rows.jsonl"),
        "rewards": [{"name": "byte_model:share_of_low_bytes"}],
        "updater": "deepspeed",
        "zero_stage": 3,
        "engine": "vllm_server",
        "server_urls": ["http://host0:8000"],
        "server_sync_dir": str(folder),
        "engine_max_length": 256,
        "group_size": 8,
        "prompts_per_step": 8,
        "learning_rate": 3e-3,
        "max_new_tokens": 12,
        "max_steps": 8,
        "log_to": [],
        "output_dir": str(folder / "served"),
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    training = ["--module", "rlox_grpo", "train", folder / "run.toml"]
    assert_success(by_deepspeed(hosts, start, folder, *training), 500)
    steps = [json.loads(line) for line in (folder / "served" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    # Weights of another step than the trainer's would show here.
    assert max(step["mismatch/gap_max"] for step in steps) < 1e-3


def test_servers_of_the_other_host_ask_for_their_token_and_a_broken_network_ends_every_wait(
    hosts, start, folder, generation, references
):
    urls = [f"http://{hosts[0].address}:{port}" for port in (8450, 8000)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    client = start(hosts[1], HERE / "from_afar.py", *urls, folder / "model", folder, **pipes)
    ranks = by_torchrun(hosts, start, HERE.parent / "ranked.py", folder / "cut", json.dumps(ENDLESS))
    line = client.stdout.readline()
    assert line, client.log.read_text()
    found = json.loads(line)
    assert found["reference_gap"] < 1e-4
    assert found["completion"] == found["expected"]
    assert found["without a token"] == 401
    assert "HTTP 401: the token is not its own" in found["with another token"][0]
    wait_for(lambda: (folder / "cut" / "metrics.jsonl").exists(), 300, *ranks)
    hosts[0].set_cable("down")
    cut = time.monotonic()
    client.stdin.write("\n")
    client.stdin.flush()
    for url, (said, seconds) in zip(urls, json.loads(client.stdout.readline()), strict=True):
        assert url in said
        assert seconds < 2 * found["timeout"]
    ends = ["rank 1 (host1, process ", "the store of the ranks at host0:"]
    for host, process, said in zip(hosts, ranks, ends, strict=True):
        left = lambda host=host: [line for line in host.processes().values() if " -u " in line]  # noqa: E731
        wait_for(lambda left=left: not left(), 60, process)
        print(f"{host.name}: its rank ended {time.monotonic() - cut:.0f} s after the cut")
        assert time.monotonic() - cut < RANK_TIMEOUT + GRACE + 10
        assert said in process.log.read_text()

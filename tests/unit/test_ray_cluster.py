"""What the launcher on a Ray cluster does without one: placement, variables, the layout table, one rank's process."""

import signal
import sys
import threading
import time
from dataclasses import replace
from types import ModuleType

import pytest

from rlox_grpo import cli
from rlox_grpo.cli.layout import read_layout
from rlox_grpo.config.run_file import Layout, read_run_file
from rlox_grpo.distributed import ranks
from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE
from rlox_grpo.distributed.ray_cluster import launch
from rlox_grpo.distributed.ray_cluster.cluster import Room
from rlox_grpo.distributed.ray_cluster.placement import (
    Need,
    Node,
    Placement,
    Sizes,
    describe,
    make_rank_variables,
    plan_placements,
    require_room,
)
from rlox_grpo.distributed.ray_cluster.processes import Ending, RankProcess
from rlox_grpo.errors import ConfigError, RankError

NODES = [
    Node("aa" * 16, "10.0.0.1", 8.0, 2.0),
    Node("bb" * 16, "10.0.0.2", 3.0, 4.0),
    Node("cc" * 16, "10.0.0.3", 4, 0),
]


def test_what_the_cluster_cannot_hold_is_refused_with_the_numbers():
    require_room(NODES, [Need("trainers", 5, 1.0, 1.0)])
    with pytest.raises(ConfigError) as found:
        require_room(NODES, [Need("trainers", 6, 1.0, 1.0)])
    assert str(found.value) == (
        "[layout] trainers=6: each needs 1 CPU and 1 GPU; the cluster holds 5 of them (10.0.0.1 with 8 CPUs and 2 GPUs "
        "holds 2, 10.0.0.2 with 3 CPUs and 4 GPUs holds 3, 10.0.0.3 with 4 CPUs and 0 GPUs holds 0); add nodes, or set "
        "trainers to what fits"
    )
    require_room(NODES, [Need("trainers", 7, 2.0, 0.0)])
    with pytest.raises(ConfigError, match="holds 7 of them"):
        require_room(NODES, [Need("trainers", 8, 2.0, 0.0)])


def test_engines_and_the_reference_need_room_beside_the_ranks():
    sizes = Sizes(trainers=3, engines=1, gpus_per_engine=2, references=1)
    needs = sizes.list_needs(NODES)
    assert needs == [
        Need("trainers", 3, 1, 1.0),
        Need("engines", 1, 1, 2.0),
        Need("reference", 1, 1.0, 1.0),
    ]
    with pytest.raises(ConfigError) as found:
        require_room([NODES[0], Node("dd" * 16, "10.0.0.4", 3.0, 3.0)], needs)
    assert str(found.value) == (
        "[layout] trainers=3, engines=1, reference=1: together they need 5 CPUs and 6 GPUs; "
        "the cluster has 11 CPUs and 5 GPUs: add nodes, or set less"
    )
    require_room(NODES, needs)
    with pytest.raises(ConfigError, match=r"engines=1: each needs 1 CPU and 8 GPUs; the cluster holds 0 of them"):
        require_room(NODES, Sizes(engines=1, gpus_per_engine=8).list_needs(NODES))
    assert {need.gpus for need in sizes.list_needs(NODES[2:])} == {0.0}


def test_engines_are_placed_after_the_ranks():
    first, second, _ = NODES
    needs = Sizes(trainers=2, engines=2, references=1).list_needs(NODES)
    nodes = {0: first.id, 1: second.id, 2: second.id, 3: first.id, 4: second.id}
    places = plan_placements(nodes, NODES, needs)
    assert places == [
        Placement("trainers", 0, 0, first),
        Placement("trainers", 1, 1, second),
        Placement("engines", 0, 2, second),
        Placement("engines", 1, 3, first),
        Placement("reference", 0, 4, second),
    ]
    assert [place.name for place in places] == ["rank 0", "rank 1", "engine 0", "engine 1", "the reference"]
    assert [place.log for place in places[1:4:2] + places[4:]] == ["rank_1.log", "engine_1.log", "reference.log"]
    assert describe(places, needs) == (
        "2 trainers, 2 engines, 1 reference on 2 of the cluster's nodes:\n"
        "  10.0.0.1 (node aaaaaaaa): rank 0; engine 1; 2 CPUs and 2 GPUs of 8 CPUs and 2 GPUs\n"
        "  10.0.0.2 (node bbbbbbbb): rank 1; engine 0; reference; 3 CPUs and 3 GPUs of 3 CPUs and 4 GPUs"
    )


def test_the_ranks_of_a_node_follow_each_other():
    first, second, _ = NODES
    needs = [Need("trainers", 4, 1.0, 1.0)]
    places = plan_placements({0: second.id, 1: first.id, 2: second.id, 3: first.id}, NODES, needs)
    assert [(place.index, place.bundle, place.node) for place in places] == [
        (0, 0, second),
        (1, 2, second),
        (2, 1, first),
        (3, 3, first),
    ]
    assert describe(places, needs) == (
        "4 trainers on 2 of the cluster's nodes:\n"
        "  10.0.0.2 (node bbbbbbbb): ranks 0, 1; 2 CPUs and 2 GPUs of 3 CPUs and 4 GPUs\n"
        "  10.0.0.1 (node aaaaaaaa): ranks 2, 3; 2 CPUs and 2 GPUs of 8 CPUs and 2 GPUs"
    )
    variables = [make_rank_variables(place, places, ("10.0.0.2", 4711), "ray-1") for place in places]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert variables[3].items() >= {**expected, "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "4711"}.items()
    assert [(own["LOCAL_RANK"], own["GROUP_RANK"]) for own in variables] == [
        ("0", "0"),
        ("1", "0"),
        ("0", "1"),
        ("1", "1"),
    ]
    assert {(own["LOCAL_WORLD_SIZE"], own["GROUP_WORLD_SIZE"]) for own in variables} == {("2", "2")}


def test_a_rank_runs_with_its_variables_and_appends_to_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", "kept")
    log = tmp_path / "logs" / "rank_0.log"
    log.parent.mkdir()
    log.write_text("an earlier start\n")
    process = RankProcess()
    program = "import os, sys; print(os.environ['KEPT'], os.environ['RANK'], os.getcwd()); print('end'); sys.exit(3)"
    ending = process.run(["-c", program], {"RANK": "0"}, str(log), str(tmp_path))
    assert ending.status == 3
    assert ending.last_lines == f"an earlier start\nkept 0 {tmp_path}\nend"
    assert process.read_output() == f"kept 0 {tmp_path}\nend\n"
    assert process.read_output() == ""
    assert log.read_text().startswith("an earlier start\n")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_is_asked_to_stop_or_killed(at_once, tmp_path):
    process, endings = RankProcess(), []
    process.stop()  # before its start: nothing to do
    program = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    log = str(tmp_path / "rank_0.log")
    thread = threading.Thread(target=lambda: endings.append(process.run(["-c", program], {}, log, str(tmp_path))))
    thread.start()
    while "ready" not in process.read_output():
        time.sleep(0.01)
    process.stop(at_once=at_once)
    thread.join(30)
    assert endings[0].status == (-signal.SIGKILL if at_once else 130)


def failure(endings, lost=None):
    places = [Placement("trainers", rank, rank, NODES[0]) for rank in range(3)]
    watched = launch._Ranks(None, places, [], endings=endings, lost=lost or {})
    with pytest.raises((RankError, KeyboardInterrupt)) as found:
        watched.raise_failure("the logs of all ranks: runs/first/logs")
    return found.value


SILENT = "rank 2 (there, process 12) has given no sign of life for 5 s"


@pytest.mark.parametrize("said", [SILENT, f"rank 0 stops: {SILENT}; its main thread hangs in ranks.py:91 gather"])
def test_the_rank_that_died_is_named_first_and_its_victims_after_it(said):
    victim = Ending(2, 11, f"rlox-grpo: {said}")
    culprit = Ending(2, 12, "rlox-grpo: reward function f raised ArithmeticError: one")
    told = str(failure({0: victim, 1: Ending(0, 10, ""), 2: culprit})).splitlines()
    assert told[0] == "rank 2 on 10.0.0.1 (process 12) ended with status 2"
    assert told[1] == "    rlox-grpo: reward function f raised ArithmeticError: one"
    assert told[2].startswith("then rank 0 on 10.0.0.1 (process 11)")
    assert told[-1] == "the logs of all ranks: runs/first/logs"
    killed = str(failure({0: culprit, 1: Ending(-9, 13, "step 3")}))
    assert killed.startswith("rank 1 on 10.0.0.1 (process 13) was killed by signal 9")
    lost = str(failure({0: Ending(130, 11, "stopped"), 1: culprit}, {2: "was lost with its actor: the node is dead"}))
    assert lost.startswith("rank 2 on 10.0.0.1 was lost with its actor: the node is dead")


def test_ranks_that_were_all_asked_to_stop_are_no_failure():
    stopped = {rank: Ending(130, 10 + rank, f"stopped by SIGTERM, rank {rank}") for rank in range(3)}
    found = failure(stopped)
    assert isinstance(found, KeyboardInterrupt)
    assert str(found) == "stopped by SIGTERM, rank 0"


def test_a_single_rank_ends_with_its_launcher_too(monkeypatch):
    watched = []
    monkeypatch.setattr(ranks, "end_with_launcher", lambda: watched.append(True))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks.join_ranks().size == 1
    assert watched


RUN = """
model = "model"
train_data = "train.jsonl"
[[rewards]]
name = "exact"
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)

    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(RUN + text)
        return path

    return write


def test_the_layout_table(run_file):
    origin, _ = read_run_file(run_file("[layout]\ntrainers = 4\ncpus_per_trainer = 8\n"), {})
    assert origin.layout == Layout(trainers=4, cpus_per_trainer=8)
    assert read_run_file(run_file(""), {})[0].layout is None


RANK, ENGINE = Placement("trainers", 0, 0, NODES[0]), Placement("engines", 0, 1, NODES[1])
ROOM = Room(None, [RANK], [ENGINE], [{"CPU": 1.0}], "")


def test_a_layout_with_engines_and_a_reference_of_their_own(run_file, monkeypatch, tmp_path):
    for name in ("RLOX_GRPO_SERVER_TOKEN", "RLOX_GRPO_REFERENCE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    text = "[layout]\nengines = 2\ntensor_parallel_size = 2\nreference = 'actor'\n"
    overrides = {
        **{"kl_coef": 0.1, "engine_max_length": 64, "dtype": "bfloat16", "fp32_lm_head": False},
        "output_dir": str(tmp_path / "run"),
    }
    origin, config = read_run_file(run_file(text), overrides)
    assert (config.engine, config.reference) == ("vllm_server", "server")
    sizes, servers = read_layout(origin, config)
    assert (sizes.engines, sizes.gpus_per_engine, sizes.references) == (2, 2, 1)
    assert " ".join(servers.commands["engines"]) == (
        "-m rlox_grpo serve model --host {host} --port {port} --dtype bfloat16 --max-length 64 --no-fp32-lm-head "
        "--tensor-parallel-size 2"
    )
    assert all(len(token) > 20 for token in servers.variables.values())
    found = servers.find({"engines": ["http://10.0.0.2:7"], "reference": ["http://10.0.0.1:8"]}, ROOM)
    assert found == [
        *("--server_urls", "['http://10.0.0.2:7']", "--server_sync_dir", "ray:"),
        *("--reference_url", "http://10.0.0.1:8"),
    ]
    told = {**overrides, "server_urls": ["http://10.0.0.2:7"], "reference_url": "http://10.0.0.1:8"}
    assert read_run_file(run_file(text), told)[1].server_urls == ("http://10.0.0.2:7",)  # as a rank reads it


def test_new_weights_take_the_way_that_the_nodes_have(run_file):
    with_gpus = replace(ROOM, resources=[{"CPU": 1.0, "GPU": 1.0}])
    for room, options, way, reads_files in (
        (ROOM, {}, ["--server_sync_dir", "ray:"], True),
        (with_gpus, {}, ["--server_nccl_address", "10.0.0.1"], False),
        (with_gpus, {"server_sync_dir": "ray:"}, [], True),
        (ROOM, {"server_sync_dir": "/mnt/shared"}, [], False),
        (ROOM, {"server_nccl_address": "10.0.0.9"}, [], False),
    ):
        servers = read_layout(*read_run_file(run_file("[layout]\nengines = 1\n"), options))[1]
        assert servers.find({"engines": ["http://10.0.0.2:7"]}, room)[2:] == way
        assert servers.reads_files(room) is reads_files
    without = read_layout(*read_run_file(run_file("[layout]\ntrainers = 2\n"), {}))[1]
    assert not without.reads_files(ROOM)


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        (
            "engines = 1",
            {"engine": "hf"},
            r"\[layout\] engines=1 means engine='vllm_server', and the run has engine='hf'",
        ),
        ("engines = 1", {"server_urls": ["http://10.0.0.2:7"]}, "Ray starts the engines; leave server_urls out"),
        (
            "reference = 'actor'",
            {"kl_coef": 0.1, "reference": "frozen"},
            r"\[layout\] reference='actor' means reference='server', and the run has reference='frozen'",
        ),
        (
            "reference = 'actor'",
            {"kl_coef": 0.1, "reference_url": "http://10.0.0.1:8"},
            "Ray starts the reference; leave reference_url out",
        ),
    ],
)
def test_options_that_contradict_the_layout_are_refused(run_file, table, options, told):
    with pytest.raises(ConfigError, match=told):
        read_layout(*read_run_file(run_file(f"[layout]\n{table}\n"), options))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("engines = 8\ncolocate = true", r"engines=8, colocate=true: training ranks generate"),
        ("colocate = false", "engines=0, colocate=false: training ranks generate"),
        ("tensor_parallel_size = 2", r"\[layout\] tensor_parallel_size=2 is read only with engines"),
        ("cpus_per_engine = 2", r"\[layout\] cpus_per_engine=2 is read only with engines"),
        ("reference = 'server'", r"\[layout\] reference: input should be 'trainer' or 'actor', got 'server'"),
        ("trainers = 0", r"\[layout\] trainers: input should be greater than or equal to 1, got 0"),
        ("trainers = 2.0", r"\[layout\] trainers: input should be a valid integer, got 2.0"),
        ("trainer = 2", r"\[layout\] unknown option 'trainer': did you mean 'trainers'"),
    ],
)
def test_a_layout_that_does_not_work_is_refused(run_file, table, told):
    with pytest.raises(ConfigError, match=told) as found:
        read_run_file(run_file(f"[layout]\n{table}\n"), {})
    assert "run.toml: [layout]" in str(found.value)


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("[layout]\ntrainers = 2\n", [], "[layout] is read only with --ray auto or launcher = 'ray'"),
        ("", ["--ray", "auto"], "a Ray cluster needs ray: pip install ray (the extra 'ray' of rlox-grpo)"),
    ],
)
def test_what_would_be_ignored_or_is_missing_is_an_error(run_file, text, words, told, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["train", str(run_file(text)), *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "--ray 127.0.0.1:1: no Ray cluster answers there"),
        ("ray://host0:10001", "expected auto, local or HOST:PORT"),
        ("host0", "expected auto, local or HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address, told, run_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert cli.main(["train", str(run_file("")), "--ray", address]) == 2
    assert told in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cli.main(["train", str(run_file("")), "--ray", "auto"]) == 2
    assert told in capsys.readouterr().err


def test_the_launcher_key_starts_ray(run_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = run_file("")
    path.write_text('launcher = "ray"\n' + path.read_text())
    assert cli.main(["train", str(path)]) == 2
    assert "a Ray cluster needs ray" in capsys.readouterr().err

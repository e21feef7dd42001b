"""Environments that fail in every way: no episode is paid wrongly, none is waited for, and memory does not grow."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import faulty
import warm
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.report import write_report

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")

EPISODES = 80  # two steps; rows that are paid 0 and 1 of each fault


@pytest.mark.slow
def test_two_ranks_survive_environments_that_fail_in_every_way(tmp_path):
    folder = tmp_path / "run"
    done = warm.run(2, Path(faulty.__file__), str(folder), json.dumps({"episodes": EPISODES}))
    assert done.returncode == 0, done.stderr[-4000:]
    counts = faulty.check(folder)
    each = EPISODES // 20
    assert counts == Counter(
        {
            (name, fault, reason): each
            for name, faults in faulty.EXPECTED.items()
            for fault, (reason, _) in faults.items()
        }
    )
    sums = Counter()
    for row in read_jsonl(folder / "metrics.jsonl"):
        sums.update({key: value for key, value in row.items() if key.startswith("environments/")})
    assert sums == {
        "environments/in_workers/episodes": 10 * each,
        "environments/in_workers/timeout": 2 * each,
        "environments/in_workers/environment_error": 3 * each,
        "environments/in_the_trainer/episodes": 10 * each,
        "environments/in_the_trainer/timeout": 3 * each,
        "environments/in_the_trainer/environment_error": 2 * each,
    }
    page = write_report(folder).read_text()
    row = page.split('<section id="environments">')[1].split("</section>")[0]
    assert "in_the_trainer" in row
    assert "ConnectionError: the service is down" in row
    assert f"<td>{10 * each}</td><td>{3 * each}</td><td>0</td><td>{2 * each}</td><td>50.0&nbsp;%</td>" in row

"""What a benchmark's JSON says of the machine: enough to judge the figures, nothing that names the host."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    cpu = machine_info.get("cpu", {}).get("brand_raw", platform.machine())
    machine_info.clear()
    machine_info["cpu"] = cpu
    machine_info["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine_info["python"] = platform.python_version()
    machine_info |= {package: version(package) for package in ("rlox-grpo", "numpy", "torch", "rlox")}


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    output_json["commit_info"] = {}
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)

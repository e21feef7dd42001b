"""Run this folder's tests in a process that believes in a CUDA device: ``python tests/cuda_sim/run.py [ARGUMENTS]``.

Builds the runtime shim (libcudart and libcuda, of the sources in ``shim/``) and starts pytest with it preloaded. Ends
with status 0 and a reason where there is no compiler or no CUDA build of torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def build_shim(folder: Path) -> str:
    """Compile the shim into ``folder``; returns why that cannot be done, or nothing."""
    import torch

    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        return "there is no C compiler"
    packages = Path(torch.__file__).parents[1]
    headers = [packages / "triton/backends/nvidia/include", *packages.glob("nvidia/*/include")]
    if not any((header / "cuda_runtime_api.h").exists() for header in headers):
        return "CUDA's headers are not installed beside torch"
    includes = [f"-I{header}" for header in headers if header.is_dir()]
    common = [compiler, "-shared", "-fPIC", "-O1", "-w", *includes]
    driver = folder / "libcuda.so.1"
    for command in (
        [*common, str(HERE / "shim/fakecudart.c"), "-o", str(folder / "libfakecudart.so")],
        [*common, "-Wl,-soname,libcuda.so.1", str(HERE / "shim/fakecuda.c"), "-o", str(driver)],
    ):
        subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(driver.name)
    return ""


@contextlib.contextmanager
def shimmed() -> Iterator[tuple[dict[str, str], str]]:
    """The environment of a process that believes in two CUDA devices, and why there can be none, or nothing."""
    with tempfile.TemporaryDirectory(prefix="rlox_cuda_sim_") as name:
        folder = Path(name)
        if reason := build_shim(folder):
            yield {**os.environ}, reason
            return
        yield (
            {
                **os.environ,
                "LD_PRELOAD": str(folder / "libfakecudart.so"),
                "LD_LIBRARY_PATH": os.pathsep.join([name, os.environ.get("LD_LIBRARY_PATH", "")]),
                "RLOX_GRPO_CUDA_SIM": "1",
                "FAKE_CUDA_DEVICES": "2",
            },
            "",
        )


def workers() -> list[str]:
    """Two workers of one thread each, where pytest-xdist is installed."""
    return ["-n", "2", "--dist", "load"] if importlib.util.find_spec("xdist") else []


def main(arguments: list[str]) -> int:
    """Build, run, and return pytest's status."""
    with shimmed() as (environment, reason):
        if reason:
            print(f"cuda_sim: skipped, as {reason}")
            return 0
        named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or workers())]
        command += [] if named else [str(HERE)]  # a bare pytest would run the whole suite
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

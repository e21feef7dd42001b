"""A wheel installs and runs where there is neither cargo nor a checkout.

By default, one is built without the optimizer. `make release-check` has these tests check the wheel of `make wheel`,
which it names in the environment variable WHEEL.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = Path(__file__).with_name("quick_start.py")
# `uv run` tells where it is; an environment made by hand may have it on the PATH.
UV = os.environ.get("UV") or shutil.which("uv")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UV is None, reason="needs uv"),
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]

# All that numpy alone is enough for: the kernels and the rules, as TRL, verl and OpenRLHF use them.
WITHOUT_TORCH = """
import importlib.util, sys
import numpy as np

assert importlib.util.find_spec("torch") is None
from rlox_grpo.advantages import group_advantages
from rlox_grpo.rewards import Countdown

advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0], dtype=np.float32), group_size=2)
assert [float(np.sign(a)) for a in advantages] == [1.0, -1.0, -1.0, 1.0], advantages
scores = Countdown()(completions=["<answer>3 * 7 + 4</answer>", "none"], nums=[[3, 4, 7]] * 2, target=[25] * 2)
assert scores[0] > scores[1], scores
"""


def run(command: list[str], **options: object) -> str:
    """Standard output of a command; on failure the test shows all that it printed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return str(done.stdout)


def make(target: str, *variables: str) -> None:
    # A make that runs this test must not hand its flags to this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    run(["make", target, *variables], cwd=ROOT, env=env)


def list_package_files() -> set[str]:
    """The modules of the package, and the files that they read: presets, tables of names, the report's page."""
    files = [file for kind in ("py", "toml", "css", "js") for file in (ROOT / "python").rglob(f"*.{kind}")]
    assert {file.suffix for file in files} == {".py", ".toml", ".css", ".js"}
    return {file.relative_to(ROOT / "python").as_posix() for file in files}


def only(files: Iterator[Path]) -> Path:
    (file,) = files
    return file


class EmptyVenv:
    """A virtual environment of its own, with a PATH and a home that hold no Rust."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        run([UV, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")])  # type: ignore[list-item]

    def install(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [str(UV), "pip", "install", "--quiet", "--python", str(self.bin / "python"), *arguments]
        run(command, env={**os.environ, **(env or {})})

    def run(self, *command: str) -> str:
        env = {"PATH": str(self.bin), "HOME": str(self.folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        assert shutil.which("cargo", path=env["PATH"]) is None
        program = shutil.which(command[0], path=env["PATH"])
        assert program is not None, f"{command[0]} is not in {self.bin}"
        return run([program, *command[1:]], cwd=self.folder, env=env)


@pytest.fixture
def empty_venv(tmp_path: Path) -> Iterator[EmptyVenv]:
    yield EmptyVenv(tmp_path)
    # pytest keeps the folders of three runs, and torch is large.
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "WHEEL" in os.environ:
        return ROOT / os.environ["WHEEL"]
    folder = tmp_path_factory.mktemp("dist")
    make("wheel-to-test", f"OUT={folder}")
    return only(folder.glob("rlox_grpo-*.whl"))


@pytest.fixture(scope="module")
def locked_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of uv.lock as constraints: they are in uv's cache already."""
    file = tmp_path_factory.mktemp("locked") / "constraints.txt"
    run(
        [str(UV), "export", "--quiet", "--locked", "--no-hashes", "--no-emit-project", "--output-file", str(file)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    return file


def test_wheel_holds_an_abi3_module_with_its_stubs_and_license(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    assert "WHEEL" not in os.environ or wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert {"rlox_grpo/__init__.py", "rlox_grpo/_native.pyi", "rlox_grpo/py.typed"} <= names
    assert list_package_files() <= names
    for name in ("LICENSE", "THIRD_PARTY_LICENSES"):
        assert any(found.endswith(f"/licenses/{name}") for found in names), name
    assert any(name.endswith(".cyclonedx.json") for name in names)  # the SBOM, which maturin writes
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is of Linux")
def test_wheel_needs_no_glibc_newer_than_its_tag_and_names_no_path_of_the_builder(wheel: Path) -> None:
    tagged = re.search(r"manylinux_2_(\d+)_", wheel.name)
    assert tagged is not None
    with zipfile.ZipFile(wheel) as archive:
        module = archive.read("rlox_grpo/_native.abi3.so")
        assert not [name for name in archive.namelist() if f"{ROOT}/".encode() in archive.read(name)]
        assert not [name for name in archive.namelist() if f"{ROOT}#".encode() in archive.read(name)]
    needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", module)}
    assert needed
    assert max(needed) <= int(tagged[1]) <= 17
    assert f"{Path.home()}/".encode() not in module  # with the slash: a crate has a file root.rs
    assert f"{ROOT}/".encode() not in module


def test_wheel_works_with_numpy_alone(wheel: Path, empty_venv: EmptyVenv, locked_versions: Path) -> None:
    empty_venv.install("--no-deps", "--no-build", str(wheel))
    version = "import rlox_grpo; print(rlox_grpo.__version__, rlox_grpo._native.__version__)"
    ours = empty_venv.run("python", "-c", version).split()
    assert ours == [wheel.name.split("-")[1]] * 2  # before numpy: the import needs nothing at all
    empty_venv.install("--no-build", "--constraint", str(locked_versions), "numpy")
    empty_venv.run("python", "-c", WITHOUT_TORCH)


def test_quick_start_runs_in_an_empty_venv_without_cargo(
    wheel: Path, empty_venv: EmptyVenv, locked_versions: Path
) -> None:
    empty_venv.install("--no-build", "--constraint", str(locked_versions), str(wheel))
    assert "mean_reward" in empty_venv.run("python", str(QUICK_START))
    assert "demo" in empty_venv.run("rlox-grpo", "--help")


NEWEST = """
import importlib.metadata, json
print(json.dumps({name: importlib.metadata.version(name) for name in ("torch", "transformers", "datasets", "numpy")}))
"""


@pytest.mark.release
def test_quick_start_runs_on_the_newest_packages(wheel: Path, empty_venv: EmptyVenv) -> None:
    """What PyPI has today, which uv.lock may not have: what `pip install rlox-grpo` gives a new user."""
    empty_venv.install("--no-config", "--no-build", "--upgrade", str(wheel))
    print(empty_venv.run("python", "-c", NEWEST))
    assert "mean_reward" in empty_venv.run("python", str(QUICK_START))
    assert "demo" in empty_venv.run("rlox-grpo", "--help")


@pytest.mark.thorough  # also by make release-check
def test_sdist_builds_and_installs(empty_venv: EmptyVenv) -> None:
    make("sdist")
    sdist = only((ROOT / "dist").glob("rlox_grpo-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/python/")[2] for name in archive.getnames()}
    assert list_package_files() <= names
    # Built now, whatever uv has cached; the compiled dependencies are those of the checkout's own build. The crate is
    # not optimized: the test is about the sources and the build backend, and the wheel's tests about the release build.
    quick = "--config profile.release.package.rlox-grpo.opt-level=0"
    env = {"CARGO_TARGET_DIR": str(ROOT / "target"), "MATURIN_PEP517_ARGS": quick}
    empty_venv.install("--no-deps", "--refresh-package", "rlox-grpo", str(sdist), env=env)
    assert empty_venv.run("python", "-c", "import rlox_grpo; print(rlox_grpo.__version__)").strip() in sdist.name

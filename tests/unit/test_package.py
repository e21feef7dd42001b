"""What `import rlox_grpo` promises: nothing heavy is loaded, names come when used, the stubs tell the truth."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rlox_grpo
from rlox_grpo import _native

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "rlox_grpo"

LOADED_BY_IMPORT = """
import json, sys
before = set(sys.modules)
import rlox_grpo
dir(rlox_grpo)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_import_loads_nothing_but_itself_and_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_BY_IMPORT], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "rlox_grpo" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"rlox_grpo"}


@pytest.mark.parametrize("name", rlox_grpo.__all__)
def test_public_name_loads(name: str) -> None:
    assert getattr(rlox_grpo, name) is not None
    assert name in dir(rlox_grpo)


def test_public_names_are_the_lazy_ones_and_the_version() -> None:
    assert set(rlox_grpo.__all__) == set(rlox_grpo._HOMES) | {"__version__"}


def test_type_checkers_see_each_lazy_name_in_the_module_that_it_loads_from() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    seen = {
        alias.asname or alias.name: statement.module
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == rlox_grpo._HOMES


SECONDS_OF_MODULES = ("transformers.modeling_utils", "transformers.models.auto.auto_factory", "torch.distributed.fsdp")


def test_importing_the_trainer_does_not_load_what_the_first_model_needs() -> None:
    """Together they take longer to import than torch and transformers themselves."""
    program = "import json, sys; from rlox_grpo import GRPO; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(SECONDS_OF_MODULES).isdisjoint(json.loads(done.stdout))


def test_worker_processes_of_rewards_and_environments_import_no_torch() -> None:
    """It takes most of a worker's start, and 200 MB in each."""
    modules = "rlox_grpo.rewards.worker, rlox_grpo.rollout.episodes.process_main"
    program = f"import sys, {modules}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_lazy_name_comes_from_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType("rlox_grpo.a_home")
    home.Thing = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlox_grpo.a_home", home)
    monkeypatch.setitem(rlox_grpo._HOMES, "Thing", "rlox_grpo.a_home")
    assert rlox_grpo.Thing is home.Thing


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rlox_grpo' has no attribute 'PPO'"):
        rlox_grpo.PPO  # noqa: B018


def test_one_version_everywhere() -> None:
    crate = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert crate == rlox_grpo.__version__ == importlib.metadata.version("rlox-grpo")


def test_every_function_of_the_extension_carries_its_signature() -> None:
    """Without one, stubtest compares no parameter of it."""
    for name, value in vars(_native).items():
        if inspect.isbuiltin(value):
            assert inspect.signature(value) is not None, name  # ValueError where there is none


def test_stubs_agree_with_the_built_extension(tmp_path: Path) -> None:
    """Names, parameters, their kinds and which of them have defaults; mypy's own checker, both ways."""
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("rlox_grpo._native.__all__\n")  # PyO3 writes it; a stub that listed it would repeat itself
    alone = tmp_path / "mypy.ini"  # the package's face would bring the trainer, and with it torch
    alone.write_text("[mypy]\n[mypy-rlox_grpo.trainer.*,rlox_grpo.config.*]\nfollow_imports = skip\n")
    options = ["--concise", "--allowlist", str(allowed), "--mypy-config-file", str(alone)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *options, "rlox_grpo._native"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_advantages_batch_and_rewards_import_the_extension() -> None:
    importers = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and "rlox_grpo._native" in [alias.name for alias in node.names])
        or (
            isinstance(node, ast.ImportFrom)
            and (
                (node.module == "rlox_grpo" and "_native" in [alias.name for alias in node.names])
                or (node.module == "rlox_grpo._native" and [alias.name for alias in node.names] != ["__version__"])
            )
        )
    }
    assert importers == {"advantages", "batch", "rewards"}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        pytest.param(module, names, id=module)
        for module, names in {
            "rlox_grpo.advantages": ["group_advantages"],
            "rlox_grpo.batch": ["build_batch", "pad", "pack", "share_prefixes"],
            "rlox_grpo.log_probs": ["token_log_probs"],
            "rlox_grpo.loss": ["grpo_loss", "kl_penalty", "aggregate"],
            "rlox_grpo.presets": ["PRESETS"],
            "rlox_grpo.rewards": ["Countdown", "MathAnswer", "TagFormat", "math_equal", "extract_answer"],
        }.items()
    ],
)
def test_documented_import_paths_hold(module: str, names: list[str]) -> None:
    assert set(names) <= set(vars(importlib.import_module(module)))


def test_the_table_of_contributing_has_each_module_and_package_of_the_top_level() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| path in `python/rlox_grpo` |")[2].partition("\n\n")[0]
    named = {name.strip("/") for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    there = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert named == there - {"__init__.py", "__pycache__"}


KINDS = {
    kind: [
        re.findall(r"`([^`]+)`", row.split("|")[1])
        for row in table.partition("| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    ]
    for kind, table in re.findall(
        r"^### (Add [^\n]+)\n(.*?)(?=^##)", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
    )
}
"""A kind of change, such as ``Add a preset`` → the files that each row of its table names."""


@pytest.mark.parametrize("kind", KINDS)
def test_contributing_names_places_of_code_tests_and_docs_that_exist(kind: str) -> None:
    """``<name>`` stands for any name; a file without a folder is in the package or beside the one before it."""
    files: set[str] = set()
    for row in KINDS[kind]:
        beside = PACKAGE
        for name in row:
            pattern = re.sub(r"<\w+>", "*", name)
            found = [path for folder in (ROOT, PACKAGE, beside) for path in folder.glob(pattern)]
            assert found, f"{name} does not exist"
            beside = found[0].parent
            files.add(found[0].relative_to(ROOT).as_posix())
    for place in ("python/rlox_grpo/", "tests/", "docs/"):
        assert any(file.startswith(place) for file in files), f"no row in {place}"


def test_contributing_has_each_kind_of_change() -> None:
    assert [kind.removeprefix("Add a").removeprefix("n").strip() for kind in KINDS] == [
        *("reward rule", "policy loss", "advantage", "option", "preset", "engine", "environment package", "metric")
    ]

"""What a release needs: the licences of the crates, and an error that says "install Rust" where there is none."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """``.ci/release_check.py`` as a module."""
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("MIT", {"MIT"}),
        ("MIT OR Apache-2.0", {"Apache-2.0"}),
        ("MIT/Apache-2.0", {"Apache-2.0"}),
        ("Unlicense OR MIT", {"MIT"}),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", {"Apache-2.0", "Unicode-3.0"}),
        ("Apache-2.0 WITH LLVM-exception", {"Apache-2.0 WITH LLVM-exception"}),
        ("MIT OR Apache-2.0 OR LGPL-2.1-or-later", {"Apache-2.0"}),
        ("GPL-3.0-only", None),
        ("MIT AND GPL-3.0-only", None),
        ("GPL-3.0-only WITH Classpath-exception-2.0", None),
        ("none", None),
    ],
)
def test_licences_of_an_expression(check: ModuleType, expression: str, chosen: set[str] | None) -> None:
    assert check.choose_licences(expression) == chosen


def test_a_crate_under_another_licence_is_named(check: ModuleType) -> None:
    crates = [{"name": name, "version": "1.0.0", "license": licence} for name, licence in (("a", "MIT"), ("b", "GPL"))]
    (line,) = check.find_forbidden([*crates])
    assert line.startswith("b 1.0.0 has the licence 'GPL', which is not in ALLOWED")
    (line,) = check.find_forbidden([{"name": "c", "version": "1.0.0", "license": None}])
    assert line.startswith("c 1.0.0 has the licence None")


@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo")
def test_the_crates_of_this_project_are_allowed_and_their_texts_are_written_down(check: ModuleType) -> None:
    crates = check.read_crates()
    assert check.find_forbidden([*crates.values()]) == []
    linked = {crate["name"] for crate in crates.values() if crate["linked"]}
    assert {"rayon", "pyo3", "dashu-int", "memchr"} <= linked
    assert not {"criterion", "proptest", "thiserror-impl", "pyo3-build-config"} & linked  # tests, macros and builds
    assert check.THIRD_PARTY.read_text() == check.make_third_party(crates), "run python .ci/release_check.py --write"


def write_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"rlox_grpo-1.dist-info/{name}", text)
    return path


def test_a_wheel_without_a_whole_sbom_is_refused(check: ModuleType, tmp_path: Path) -> None:
    crates = [{"name": "rayon", "version": "1.0.0"}, {"name": "memchr", "version": "2.0.0"}]
    bare = write_wheel(tmp_path / "bare.whl", {"METADATA": ""})
    assert check.find_missing_in_sbom(bare, crates) == ["bare.whl has no SBOM: build it with maturin 1.10 or newer"]
    bom = json.dumps({"components": [crates[0], {**crates[1], "version": "2.0.1"}]})
    wheel = write_wheel(tmp_path / "a.whl", {"sboms/rlox-grpo.cyclonedx.json": bom})
    assert check.find_missing_in_sbom(wheel, crates) == ["the SBOM of a.whl does not name memchr 2.0.0"]


def test_the_sbom_names_no_folder_of_the_builder(check: ModuleType, tmp_path: Path) -> None:
    bom = json.dumps({"components": [], "metadata": {"bom-ref": "path+file:///home/me/clone#rlox-grpo@1"}})
    name = "rlox_grpo-1.dist-info/sboms/rlox-grpo.cyclonedx.json"
    record = f"{name},sha256=old,1\nrlox_grpo-1.dist-info/RECORD,,\n"
    wheel = write_wheel(tmp_path / "a.whl", {"sboms/rlox-grpo.cyclonedx.json": bom, "RECORD": record})
    (problem,) = check.find_missing_in_sbom(wheel, [])
    assert "names a folder of the builder, path+file:///home/me/clone: run python .ci/strip_paths.py" in problem
    subprocess.run([sys.executable, str(ROOT / ".ci/strip_paths.py"), str(wheel)], check=True)
    assert check.find_missing_in_sbom(wheel, []) == []
    with zipfile.ZipFile(wheel) as archive:
        data, record = archive.read(name), archive.read("rlox_grpo-1.dist-info/RECORD").decode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert record.splitlines() == [f"{name},sha256={digest},{len(data)}", "rlox_grpo-1.dist-info/RECORD,,"]


def test_missing_files_are_named(check: ModuleType, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", {"METADATA": ""})
    assert check.find_missing_files(wheel, ["METADATA", "licenses/LICENSE"]) == ["a.whl lacks licenses/LICENSE"]
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("rlox_grpo-1/PKG-INFO"), io.BytesIO())
    assert check.find_missing_files(tmp_path / "a.tar.gz", ["PKG-INFO", "Cargo.lock"]) == ["a.tar.gz lacks Cargo.lock"]


HOOKS = [
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
    "build_wheel",
    "build_editable",
    "build_sdist",
]


@pytest.mark.skipif(importlib.util.find_spec("maturin") is None, reason="needs maturin")
def test_a_build_without_cargo_says_install_rust(tmp_path: Path) -> None:
    """Each hook alone, as pip and uv call them; with cargo they are maturin's."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "rust")!r})
import build_backend
for hook in {HOOKS}:
    try:
        getattr(build_backend, hook)
    except SystemExit as stopped:
        print(hook, "Install Rust from https://rustup.rs" in stopped.code)
"""
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{hook} True" for hook in HOOKS]


@pytest.mark.skipif(importlib.util.find_spec("maturin") is None, reason="needs maturin")
@pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo")
def test_the_backend_has_every_hook_of_maturin(monkeypatch: pytest.MonkeyPatch) -> None:
    import maturin

    monkeypatch.syspath_prepend(ROOT / "rust")
    import build_backend

    ours = {name for name in dir(maturin) if name.startswith(("get_requires_for_", "prepare_metadata_for_", "build_"))}
    for hook in ours:
        assert getattr(build_backend, hook) is getattr(maturin, hook), hook

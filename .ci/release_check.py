"""Checks of a release: licences of the crates, the SBOM in the wheel, and what wheel and source distribution hold.

``python .ci/release_check.py dist/*.whl dist/*.tar.gz`` checks; ``--write`` writes THIRD_PARTY_LICENSES again. Every
failure is one line that says what to do. Only the standard library and cargo are needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = ROOT / "THIRD_PARTY_LICENSES"

ALLOWED = {
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
"""Licences that a crate may have: permissive ones, which Apache-2.0 code may be linked with."""

EXTENSION = "rlox-grpo"
# A crate whose archive lacks the text of its repository's licence: the crate of the same repository that has it.
TEXT_OF = {"pulp-wasm-simd-flag": "pulp"}
IN_SDIST = (
    *("Cargo.lock", "Cargo.toml", "LICENSE", "PKG-INFO", "pyproject.toml", "rust/build_backend.py"),
    *(
        f"rust/{crate}/{file}"
        for crate in ("kernels", "math_answers", "python", "rules")
        for file in ("Cargo.toml", "src/lib.rs")
    ),
    "rust/math_answers/README.md",  # the documentation of its lib.rs
)


def read_crates() -> dict[str, dict[str, Any]]:
    """Every crate of Cargo.lock by its id, with ``linked``: whether its code is in the extension.

    Crates of builds, of macros and of tests are not. All platforms count.
    """
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    crates = {crate["id"]: {**crate, "linked": False} for crate in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [crate["id"] for crate in metadata["packages"] if crate["name"] == EXTENSION]
    while waiting:
        crate = crates[waiting.pop()]
        is_macro = any("proc-macro" in target["kind"] for target in crate["targets"])
        if crate["linked"] or is_macro:
            continue
        crate["linked"] = True
        for edge in nodes[crate["id"]]["deps"]:
            if any(kind["kind"] is None for kind in edge["dep_kinds"]):
                waiting.append(edge["pkg"])
    return crates


def choose_licences(expression: str, allowed: set[str] | None = None) -> set[str] | None:
    """The licences of an SPDX expression that apply: of ``OR`` Apache-2.0, else MIT, else the first allowed.

    Args:
        expression: such as ``(MIT OR Apache-2.0) AND Unicode-3.0``; ``/`` is an old form of ``OR``.
        allowed: None: :data:`ALLOWED`.

    Returns:
        None where the expression leaves no allowed choice.
    """
    allowed = ALLOWED if allowed is None else allowed
    words = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def read_choice() -> set[str] | None:
        options = [read_both()]
        while words and words[0] == "OR":
            words.pop(0)
            options.append(read_both())
        permitted = [option for option in options if option is not None]
        return min(permitted, key=lambda option: (option != {"Apache-2.0"}, option != {"MIT"}), default=None)

    def read_both() -> set[str] | None:
        found = read_one()
        while words and words[0] == "AND":
            words.pop(0)
            other = read_one()
            found = None if found is None or other is None else found | other
        return found

    def read_one() -> set[str] | None:
        if words[0] == "(":
            words.pop(0)
            inner = read_choice()
            words.pop(0)
            return inner
        name = words.pop(0)
        if words and words[0] == "WITH":
            name = f"{name} WITH {words[1]}"
            del words[:2]
        return {name} if name in allowed else None

    return read_choice()


def find_forbidden(crates: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each crate whose licence is not allowed."""
    return [
        f"{crate['name']} {crate['version']} has the licence {crate['license']!r}, which is not in ALLOWED of "
        ".ci/release_check.py: use another crate, or add the licence after you have read it"
        for crate in crates
        if choose_licences(crate["license"] or "none") is None
    ]


def make_third_party(crates: dict[str, dict[str, Any]]) -> str:
    """The text of THIRD_PARTY_LICENSES: each linked crate with its licence, and the texts that LICENSE lacks."""
    linked = sorted((c for c in crates.values() if c["linked"] and c["source"]), key=lambda c: c["name"])
    folders = {crate["name"]: Path(crate["manifest_path"]).parent for crate in linked}
    lines = [
        "The extension of rlox_grpo contains code of these crates. Where a crate offers a choice of licences, it is",
        "used under Apache-2.0, whose text is in LICENSE. Written by .ci/release_check.py --write.",
        "",
        *(f"{c['name']} {c['version']}: {', '.join(sorted(choose_licences(c['license']) or {'?'}))}" for c in linked),
    ]
    for crate in linked:
        names = ["NOTICE*"]
        if choose_licences(crate["license"]) != {"Apache-2.0"}:
            names += ["LICENSE-MIT*", "LICENSE", "LICENSE.*"]
        folder = folders[TEXT_OF.get(crate["name"], crate["name"])]
        for file in sorted({file for name in names for file in folder.glob(name)}):
            lines += ["", "-" * 80, f"{crate['name']}: {file.name}", "", file.read_text(encoding="utf-8").strip()]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


def find_missing_in_sbom(wheel: Path, crates: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each crate that is linked on every platform and that the SBOM of the wheel does not name.

    A path of the builder's machine in the SBOM is a line too.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"\.dist-info/sboms/.*\.cyclonedx\.json$", name)]
        if not names:
            return [f"{wheel.name} has no SBOM: build it with maturin 1.10 or newer"]
        text = archive.read(names[0]).decode()
    if local := re.search(r"path\+file://(?!/rlox-grpo[/#])[^#\"]*", text):
        return [
            f"the SBOM of {wheel.name} names a folder of the builder, {local[0]}: run python .ci/strip_paths.py on it"
        ]
    bom = json.loads(text)
    listed = {(component["name"], component["version"]) for component in bom["components"]}
    return [
        f"the SBOM of {wheel.name} does not name {crate['name']} {crate['version']}"
        for crate in crates
        if (crate["name"], crate["version"]) not in listed
    ]


def find_missing_files(archive: Path, expected: Sequence[str]) -> list[str]:
    """A line for each file that the wheel or source distribution lacks."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [re.sub(r"^[^/]*\.dist-info/", "", name) for name in wheel.namelist()]
    else:
        with tarfile.open(archive) as sdist:
            names = [name.partition("/")[2] for name in sdist.getnames()]
    return [f"{archive.name} lacks {name}" for name in expected if name not in names]


def main(arguments: Sequence[str]) -> int:
    """Check and print; returns the exit status."""
    crates = read_crates()
    if "--write" in arguments:
        THIRD_PARTY.write_text(make_third_party(crates), encoding="utf-8")
        return 0
    linked = [crate for crate in crates.values() if crate["linked"] and crate["source"]]
    problems = find_forbidden([*crates.values()])
    if not THIRD_PARTY.exists() or THIRD_PARTY.read_text(encoding="utf-8") != make_third_party(crates):
        problems.append("THIRD_PARTY_LICENSES is not of these crates: run python .ci/release_check.py --write")
    wheels = [Path(name) for name in arguments if name.endswith(".whl")]
    sdists = [Path(name) for name in arguments if name.endswith(".tar.gz")]
    if not wheels or not sdists:
        problems.append(
            "expected a wheel and a source distribution as arguments; make wheel sdist builds them in dist/"
        )
    platform_free = [crate for crate in linked if is_everywhere(crate)]
    for wheel in wheels:
        problems += find_missing_in_sbom(wheel, platform_free)
        problems += find_missing_files(wheel, ["METADATA", "licenses/LICENSE", "licenses/THIRD_PARTY_LICENSES"])
    for sdist in sdists:
        problems += find_missing_files(sdist, [*IN_SDIST, "THIRD_PARTY_LICENSES"])
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(crates)} crates of Cargo.lock have allowed licences; {len(linked)} are in the extension")
    return int(bool(problems))


def is_everywhere(crate: dict[str, Any]) -> bool:
    """Whether Cargo.toml of this project names the crate, so that every platform links it."""
    return re.search(rf"^{re.escape(crate['name'])} = ", (ROOT / "Cargo.toml").read_text(), re.MULTILINE) is not None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

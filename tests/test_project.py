"""The project's own rules: who imports whom, what is pinned, what is documented, what must not be committed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from infra.settings import Settings

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "infra")

#: By importing package, longest prefix first: which of our modules it may import.
MAY_IMPORT = {
    # The bare package ``tasks`` says where it lies, which is what a child's import path is made from.
    "tasks.engines": ("tasks.engines", "tasks.records", "tasks.errors"),
    "tasks": ("tasks", "infra"),
    "infra": ("infra", "tasks.records", "tasks.errors", "tasks.engines.wire"),
    "flows": ("flows", "tasks", "infra"),
}
#: Only what runs in an engine's child may import its TVM.
MAY_IMPORT_TVM = ("tasks.engines.relax", "tasks.engines.relay", "infra.pyfunc_model")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours by its dotted name."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


ALL_MODULES = dict(modules())


def imports_of(path: Path) -> set[str]:
    """The dotted names that ``path`` imports, those inside functions and type checks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative imports hide where they lead"
            # ``from tasks import errors`` imports a module, ``from tasks.errors import InputError`` a name.
            found.update(
                name if (name := f"{node.module}.{alias.name}") in ALL_MODULES else node.module for alias in node.names
            )
    return found


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("module", ALL_MODULES)
def test_imports_run_one_way(module: str) -> None:
    allowed = next(names for package, names in MAY_IMPORT.items() if is_in(module, package))
    ours = {name for name in imports_of(ALL_MODULES[module]) if name.partition(".")[0] in PACKAGES}
    if is_in(module, "tasks.engines"):
        ours.discard("tasks")
    wrong = sorted(name for name in ours if not any(is_in(name, package) for package in allowed))
    assert not wrong, f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("module", ALL_MODULES)
def test_only_the_engine_imports_tvm(module: str) -> None:
    if not any(is_in(module, package) for package in MAY_IMPORT_TVM):
        assert not {name for name in imports_of(ALL_MODULES[module]) if name.partition(".")[0].startswith("tvm")}


def test_the_parent_process_never_imports_tvm() -> None:
    ours = [name for name in ALL_MODULES if is_in(name, "flows") or is_in(name, "infra")]
    assert {"flows.cli", "flows.tune_model", "flows.running", "infra.settings"} <= set(ours)
    program = (
        "import importlib, sys\n"
        f"for name in {ours!r}: importlib.import_module(name)\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('tvm', 'tvm_ffi')))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip().splitlines()[-1] == "[]"


def tracked_files() -> list[Path]:
    """What is committed, or would be by ``git add``."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


#: Put together here, lest this file be its own finding.
FORBIDDEN = {
    "a registry's address": r"py" + r"pi\.(?:org|python)|files\.python" + r"hosted|index" + r"-url|find" + r"-links",
    "a developer machine's path": r"(?<![\w.$}\)-])/(?:wo" + r"rk|ro" + r"ot|home/\w+)/",
    "the steering folder": r"\.\./sha" + r"red",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_local_is_committed(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.IGNORECASE)
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}:{i}: {line.strip()[:120]}" for i, line in enumerate(lines, 1)
                  if pattern.search(line)]  # fmt: skip
    assert not found, f"{what}:\n" + "\n".join(found)


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [Requirement(line) for line in every]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_constraints_satisfy_what_the_project_requires(requirement: Requirement) -> None:
    pinned = constraints()
    assert canonicalize_name(requirement.name) in pinned
    assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_packages_that_must_match_are_pinned() -> None:
    exact = {r.name for r in requirements() if str(r.specifier).startswith("==")}
    assert exact == {"apache-tvm", "apache-tvm-ffi", "apache-tvm-ffi-orcjit"}


def test_constraints_hold_exact_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_setting_is_documented(field: str) -> None:
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", (ROOT / "README.md").read_text()))
    alias = Settings.model_fields[field].validation_alias
    names = set(getattr(alias, "choices", ())) or {f"TUNEWRIGHT_{field.upper()}"}
    assert names <= documented, f"README.md does not name {', '.join(sorted(names - documented))}"


@pytest.mark.parametrize("script", ["Makefile", ".ci/run"])
def test_scripts_name_files_and_targets_that_exist(script: str) -> None:
    text = (ROOT / script).read_text()
    for name in re.findall(r"(?<![\w./*$)-])[\w.-]+(?:/[\w.-]+)*\.(?:py|txt|toml|ya?ml|md|sh|cfg)\b", text):
        assert (ROOT / name).exists(), f"{script} names {name}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in text.splitlines():
        used = re.fullmatch(r"\s*make ((?:[a-z-]+ ?)+)", line)
        assert not used or set(used[1].split()) <= targets, f"{script}: {line}"


def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"

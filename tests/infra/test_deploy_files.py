"""What operators start is checked as far as it goes without a container engine or a cluster.

Every command line of ours in these files is parsed by our own command, so that none goes stale.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from compose_pydantic import ComposeSpecification

from flows.cli import app
from infra.settings import Settings
from infra.work_pool import POOL, PRIORITIES, TAG

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra" / "compose.yaml"
UNITS = sorted((ROOT / "infra" / "agents").glob("*.service"))
MANIFESTS = sorted((ROOT / "infra" / "kubernetes").glob("*.yaml"))
PAGES = [ROOT / "docs" / name for name in ("deploy.md", "nightly.md")]
FILES = [COMPOSE, *UNITS, *MANIFESTS, *PAGES, ROOT / "infra" / "Dockerfile", *ROOT.glob("infra/agents/*.example")]
#: Versions of Kubernetes whose schemas the manifests must satisfy.
KUBERNETES = ("1.30", kubernetes_validate.latest_version())


def compose() -> dict[str, Any]:
    return {k: v for k, v in yaml.safe_load(COMPOSE.read_text()).items() if not k.startswith("x-")}


def manifests(path: Path) -> list[dict[str, Any]]:
    return [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]


def containers() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for manifest in manifests(path):
            yield from manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


def exec_lines() -> Iterator[list[str]]:
    for path in UNITS:
        (line,) = [line for line in path.read_text().splitlines() if line.startswith("ExecStart=")]
        yield shlex.split(line.removeprefix("ExecStart="))


def page_lines() -> Iterator[list[str]]:
    """Our commands in the pages' blocks of shell."""
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and Path(words[0]).name == "tunewright":
                    yield words


def our_commands() -> list[list[str]]:
    lists = [service.get("command", []) for service in compose()["services"].values()]
    lists += [container["args"] for container in containers()]
    lists += [*exec_lines(), *page_lines()]
    return [words for words in lists if words and Path(words[0]).name == "tunewright"]


def test_there_are_commands_to_check() -> None:
    used = {words[1] for words in our_commands()}
    assert {"agent", "scheduler", "certs", "webhook", "deploy", "nightly", "reconcile"} <= used


@pytest.mark.parametrize("words", our_commands(), ids=" ".join)
def test_our_command_takes_what_the_files_give_it(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    arguments, context = words[1:], None
    while True:
        context = command.make_context(command.name, list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        _, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


def test_a_wrong_option_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_our_command_takes_what_the_files_give_it(["tunewright", "agent", "--devise", "cuda:0"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_in_the_files_exist(path: Path) -> None:
    aliases = {name for f in Settings.model_fields.values() for name in getattr(f.validation_alias, "choices", ())}
    known = aliases | {f"TUNEWRIGHT_{name.upper()}" for name in Settings.model_fields}
    used = set(re.findall(r"\bTUNEWRIGHT_[A-Z0-9_]+\b", path.read_text()))
    assert used <= known, used - known


def test_compose_file_is_one() -> None:
    found = compose()
    ComposeSpecification.model_validate(found)
    with pytest.raises(ValueError, match="commnd"):
        ComposeSpecification.model_validate({"services": {"x": {"commnd": "typo"}}})


def test_compose_services_name_only_what_is_there() -> None:
    found = compose()
    services = found["services"]
    for name, service in services.items():
        for other, condition in service.get("depends_on", {}).items():
            assert other in services, f"{name} depends on {other}"
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
        for mount in service.get("volumes", []):
            assert mount.partition(":")[0] in found["volumes"]
        for config in service.get("configs", []):
            assert (COMPOSE.parent / found["configs"][config["source"]]["file"]).is_file()
    hosts = set(re.findall(r"(?:://|@)([a-z0-9-]+):\d+", COMPOSE.read_text()))
    assert hosts - {"localhost"} <= set(services)
    assert {"postgres", "s3", "prefect", "mlflow", "scheduler", "webhook", "worker", "agent-0", "agent-1"} <= set(
        services
    )
    build = services["buckets"]["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).is_file()


def test_no_secret_is_written_down() -> None:
    for path in FILES:
        for line in path.read_text().splitlines():
            named = re.search(r"(?:SECRET|PASSWORD)[A-Z_]*[:=]\s*(\S+)", line)
            assert not named or named[1].startswith(("${", "...")), f"{path.name}: {line}"


def test_the_image_holds_what_its_build_copies() -> None:
    dockerfile = (ROOT / "infra" / "Dockerfile").read_text()
    allowed = set((ROOT / "infra" / "Dockerfile.dockerignore").read_text().split())
    for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in allowed, f"{name} is not sent to the build"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_satisfy_kubernetes_schemas(path: Path, version: str) -> None:
    for manifest in manifests(path):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    (wrong, *_) = manifests(ROOT / "infra" / "kubernetes" / "scheduler.yaml")
    wrong["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_gpu_agents_have_one_gpu_each_and_every_container_is_limited() -> None:
    for container in containers():
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        wants_gpu = any(word.startswith("cuda") for word in container["args"])
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == int(wants_gpu)


def test_manifests_name_only_what_is_there() -> None:
    every = [manifest for path in MANIFESTS for manifest in manifests(path)]
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in every}
    config = (ROOT / "infra" / "kubernetes" / "config.yaml").read_text()
    made = set(re.findall(r"create secret generic (\S+)", config))
    for manifest in every:
        spec = manifest.get("spec", {})
        for volume in spec.get("template", {}).get("spec", {}).get("volumes", []):
            assert volume.get("secret", {}).get("secretName", "tunewright") in made
        if manifest["kind"] == "Service":
            assert ("Deployment", spec["selector"]["app.kubernetes.io/component"]) in names
    assert ("ConfigMap", "tunewright") in names


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_what_systemd_takes(path: Path, tmp_path: Path) -> None:
    # Where the unit's program lies is the operator's machine; here it is this environment.
    text = path.read_text().replace("/srv/tunewright/.venv/bin/", f"{Path(sys.executable).parent}/")
    unit = tmp_path / path.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "wrong.service").write_text("[Service]\nExecStart=/nowhere/at/all\n")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "wrong.service")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_deployments_name_flows_and_queues_that_exist() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert [d["name"] for d in deployments] == ["tune-model", "reconcile", "nightly"]
    for deployment in deployments:
        # A module's name and not a file: agents import by it what the flow sends them.
        module, _, function = deployment["entrypoint"].rpartition(".")
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE)
        assert deployment["work_pool"]["name"] == POOL
        assert deployment["work_pool"]["work_queue_name"] in PRIORITIES
        # What the zombies' automation looks for.
        assert TAG in deployment["tags"]
        assert int(deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= 30

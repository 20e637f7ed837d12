"""The Helm chart, rendered by Helm."""

import re
import subprocess
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.core.settings import REPOSITORY
from tests.conftest import skip_or_fail

CHART = REPOSITORY / "deploy" / "helm" / "attune"
TOOLS = REPOSITORY / ".venv-chart" / "bin"
Manifest = dict[str, Any]


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Helm of `make chart`, or an installed one; skip the test where there is none."""
    binary = which("helm", path=str(TOOLS)) or which("helm")
    if binary is None:
        skip_or_fail("Helm is not installed: `make chart`")
    return subprocess.run([binary, *arguments], capture_output=True, text=True, cwd=REPOSITORY)


@cache
def render_text(*options: str) -> str:
    """Return what `helm template` writes for the release `prod` in the namespace `chat`."""
    result = helm("template", "prod", str(CHART), "--namespace", "chat", *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@cache
def render(*options: str) -> list[Manifest]:
    """Return the manifests that `helm template` writes."""
    return [manifest for manifest in yaml.load_all(render_text(*options), yaml.CSafeLoader) if manifest]


def refusal(*options: str) -> str:
    """Return why Helm refuses the values."""
    result = helm("template", "prod", str(CHART), *options)
    assert result.returncode != 0, "the values are accepted"
    return result.stderr


def by_kind(kind: str, *options: str) -> dict[str, Manifest]:
    """Return the manifests of a kind by name."""
    return {each["metadata"]["name"]: each for each in render(*options) if each["kind"] == kind}


def pods(*options: str) -> dict[str, Manifest]:
    """Return the specification of the pods by the name of the workload, without the release's name."""
    return {
        each["metadata"]["name"].removeprefix("prod-attune-"): each["spec"]["template"]["spec"]
        for each in render(*options)
        if each["kind"] in ("Deployment", "StatefulSet", "Job")
    }


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """Return the variables of a container with a secret, a pod's name and references as the kubelet sets them."""
    values: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if (key := source.get("secretKeyRef")) is not None:
            value = SECRET[key["key"]]
        elif "fieldRef" in source:
            value = "prod-attune-engine-0"
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], variable["value"])
        values[variable["name"]] = value
    return values


SECRET = {
    "ATTUNE_DATABASE__URL": "postgresql+psycopg://attune:secret@db/attune",
    "ATTUNE_DATABASE__OWNER_URL": "postgresql+psycopg://owner:secret@db/attune",
    "ATTUNE_BROKER__URL": "redis://:secret@redis:6379/0",
    "ATTUNE_LIMITS__URL": "async+redis://:secret@redis:6379/1",
    "ATTUNE_ENGINE__API_KEY": "a" * 24,
    "ATTUNE_ENGINE__ADMIN_KEY": "b" * 24,
    "ATTUNE_DATABASE__ENCRYPTION_KEYS": "",
    "ATTUNE_SECRETS": '{"judge": "secret"}',
    "HF_TOKEN": "hf_secret",
}


def write_settings(folder: Path, *options: str) -> Path:
    """Write the rendered attune.toml into a folder and return its path."""
    file = folder / "attune.toml"
    file.write_text(by_kind("ConfigMap", *options)["prod-attune"]["data"]["attune.toml"])
    return file

"""The fleets of k8s/ as kubectl builds them, and the settings that their processes would have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import yaml

from pdserve.config import Settings, load

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
POD_IP = "10.0.0.7"
"""What the downward API would say."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet, and the settings of its first pod's process."""

    manifest: Manifest
    settings: Settings

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def is_worker(self) -> bool:
        return str(self.manifest["kind"]) == "StatefulSet"

    @property
    def pod(self) -> Manifest:
        return _pod(self.manifest)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.manifest["spec"]["template"]["metadata"]["labels"])

    @property
    def container(self) -> Manifest:
        return _container(self.manifest)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str]:
        return _environment(self.manifest)

    @property
    def drain_s(self) -> float:
        part = self.settings.worker if self.is_worker else self.settings.coordinator
        return part.drain_s


@dataclass(frozen=True)
class Fleet:
    """Everything that one kustomization makes; workloads are in order of their names."""

    manifests: tuple[Manifest, ...]
    workloads: tuple[Workload, ...]

    def kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    @property
    def coordinator(self) -> Workload:
        (coordinator,) = (workload for workload in self.workloads if not workload.is_worker)
        return coordinator

    @property
    def workers(self) -> tuple[Workload, ...]:
        return tuple(workload for workload in self.workloads if workload.is_worker)

    def selected(self, selector: Manifest) -> list[str]:
        """Names of the workloads whose pods the label selector finds."""
        return [w.name for w in self.workloads if matches(selector, w.labels)]


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


@cache
def build(folder: str) -> Fleet:
    """The fleet of a folder below k8s/."""
    command = [str(BIN / "kubectl"), "kustomize", str(ROOT / "k8s" / folder)]
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    manifests = tuple(yaml.safe_load_all(built.stdout))
    files = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    workloads = (
        Workload(manifest, _load(files[_config_map(manifest)]["config.yaml"], manifest))
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "StatefulSet")
    )
    return Fleet(manifests, tuple(sorted(workloads, key=lambda workload: workload.name)))


def _load(content: str, manifest: Manifest) -> Settings:
    with TemporaryDirectory() as folder, _only(_environment(manifest)):
        path = Path(folder) / "config.yaml"
        path.write_text(content)
        return load(path, {})


@contextmanager
def _only(environment: Mapping[str, str]) -> Iterator[None]:
    """The given PDSERVE_ variables, and none that the machine happens to have."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("PDSERVE_")}
    with mock.patch.dict(os.environ, {**others, **environment}, clear=True):
        yield


def _environment(manifest: Manifest) -> dict[str, str]:
    """The container's variables, with what the downward API would say in the first pod."""
    downward = {"metadata.name": f"{manifest['metadata']['name']}-0", "status.podIP": POD_IP}
    return {
        variable["name"]: variable.get("value")
        or downward[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in _container(manifest).get("env", [])
    }


def _config_map(manifest: Manifest) -> str:
    (name,) = (
        volume["configMap"]["name"]
        for volume in _pod(manifest)["volumes"]
        if volume["name"] == "config"
    )
    return str(name)


def _container(manifest: Manifest) -> Manifest:
    (container,) = _pod(manifest)["containers"]
    return dict(container)


def _pod(manifest: Manifest) -> Manifest:
    return dict(manifest["spec"]["template"]["spec"])

"""What no schema knows of k8s/ and the Dockerfile: that their parts fit one another and pdserve."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pdserve
from pdserve.config import Listen, WorkerConfig
from pdserve.types import Role
from tests.support.k8s_fleet import BIN, POD_IP, ROOT, Fleet, Manifest, Workload, build, matches

FLEETS = ("base", "overlays/gpu", "overlays/gpu-rdma", "overlays/sim")


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return build(request.param)


def test_each_workload_runs_its_role_with_the_file_that_it_mounts(fleet: Fleet) -> None:
    assert [w.name for w in fleet.workloads] == [
        "pdserve-coordinator",
        "pdserve-decode",
        "pdserve-prefill",
    ]
    for workload in fleet.workloads:
        verb = workload.name.removeprefix("pdserve-")
        assert workload.container["args"] == [verb, "--config", "/etc/pdserve/config.yaml"]
        mounts = {m["name"]: m["mountPath"] for m in workload.container["volumeMounts"]}
        assert mounts["config"] == "/etc/pdserve"
        if workload.is_worker:
            assert workload.settings.worker.roles == {Role(verb)}


def test_variables_are_real_settings(fleet: Fleet) -> None:
    """A misspelt section would be ignored in silence: each value must be seen in the settings."""
    for workload in fleet.workloads:
        for name, expected in workload.environment.items():
            if not name.startswith("PDSERVE_"):
                continue
            value: Any = workload.settings
            for part in name.removeprefix("PDSERVE_").lower().split("__"):
                value = getattr(value, part)
            assert value == expected, name
        assert workload.pod["enableServiceLinks"] is False


def side_channel(worker: WorkerConfig) -> Listen:
    return worker.vllm.side_channel if worker.engine == "vllm" else worker.sim.side_channel


def test_workers_have_names_and_addresses_of_their_own(fleet: Fleet) -> None:
    for workload in fleet.workers:
        assert workload.settings.worker.id == f"{workload.name}-0"
        assert side_channel(workload.settings.worker).host == POD_IP


def test_processes_listen_where_ports_and_probes_point(fleet: Fleet) -> None:
    for workload in fleet.workloads:
        settings = workload.settings
        listens: dict[str, Listen] = {
            "http": settings.coordinator.http,
            "grpc": settings.coordinator.grpc,
        }
        if workload.is_worker:
            listens = {"grpc": settings.worker.grpc, "metrics": settings.worker.metrics}
            listens["nixl"] = side_channel(settings.worker)
        for name, listen in listens.items():
            assert not listen.is_loopback, (workload.name, name)
            assert workload.ports[name] == listen.port, (workload.name, name)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if workload.is_worker:  # a gRPC probe takes a number only
                assert workload.container[probe]["grpc"]["port"] == workload.ports["grpc"]
            else:
                assert workload.container[probe]["httpGet"]["port"] == "http"


def test_a_drain_is_never_cut_short(fleet: Fleet) -> None:
    for workload in fleet.workloads:
        hook = workload.container.get("lifecycle", {}).get("preStop", {})
        waits = workload.drain_s + hook.get("sleep", {}).get("seconds", 0)
        assert workload.pod["terminationGracePeriodSeconds"] >= waits + 15, workload.name


def test_the_coordinator_looks_up_every_headless_service(fleet: Fleet) -> None:
    names = {
        f"dns:{w.manifest['spec']['serviceName']}:{w.settings.worker.grpc.port}"
        for w in fleet.workers
    }
    assert set(fleet.coordinator.settings.coordinator.workers) == names


def test_all_roles_mean_the_same_model_and_the_same_kv_blocks(fleet: Fleet) -> None:
    (model,) = fleet.coordinator.settings.coordinator.models
    prefill, decode = (workload.settings.worker for workload in fleet.workers)
    for worker in (prefill, decode):
        assert (worker.model.name, worker.model.path) == (model.name, model.path)
        if worker.vllm.quantization:
            assert worker.vllm.extra_args["kv_cache_dtype"] not in (None, "auto")
    for field in ("dtype", "block_size", "tensor_parallel", "max_model_len"):
        assert getattr(prefill.vllm, field) == getattr(decode.vllm, field), field
    assert prefill.vllm.extra_args == decode.vllm.extra_args


def test_gpus_are_as_many_as_tensor_parallel_ranks(fleet: Fleet) -> None:
    for workload in fleet.workers:
        gpus = workload.container["resources"]["limits"].get("nvidia.com/gpu")
        on_gpu = workload.container["image"].startswith("pdserve/worker-gpu:")
        ranks = str(workload.settings.worker.vllm.tensor_parallel)
        assert gpus == (ranks if on_gpu else None), workload.name


def test_selectors_find_their_pods(fleet: Fleet) -> None:
    for workload in fleet.workloads:
        selector = workload.manifest["spec"]["selector"]
        assert fleet.selected(selector) == [workload.name]
        for constraint in workload.pod["topologySpreadConstraints"]:
            assert constraint["labelSelector"] == selector
        budgets = [
            budget["metadata"]["name"]
            for budget in fleet.kind("PodDisruptionBudget")
            if matches(budget["spec"]["selector"], workload.labels)
        ]
        assert budgets == [workload.name]
    for service in fleet.kind("Service"):
        spec = service["spec"]
        assert fleet.selected({"matchLabels": spec["selector"]}) == [service["metadata"]["name"]]
    for workload in fleet.workers:
        (service,) = (
            service
            for service in fleet.kind("Service")
            if service["metadata"]["name"] == workload.manifest["spec"]["serviceName"]
        )
        assert service["spec"]["clusterIP"] == "None"


def test_services_target_ports_that_exist(fleet: Fleet) -> None:
    for service in fleet.kind("Service"):
        (workload,) = (w for w in fleet.workloads if w.name == service["metadata"]["name"])
        for port in service["spec"]["ports"]:
            assert workload.ports[port["targetPort"]] == port["port"]


def test_policies_let_in_what_the_fleet_needs_and_no_more(fleet: Fleet) -> None:
    for workload in fleet.workers:
        assert set(_let_in(fleet, workload)) == {
            ("coordinator", "grpc", None),
            ("worker", 7001, None),
            ("worker", 7010, 7019),
            ("worker", 7100, 7199),
            ("namespace", "metrics", None),
        }
        assert workload.environment["UCX_TCP_PORT_RANGE"] == "7100-7199"
        assert workload.ports["nixl"] == 7001
    assert set(_let_in(fleet, fleet.coordinator)) == {("any", "http", None), ("any", "grpc", None)}


def _let_in(fleet: Fleet, workload: Workload) -> Iterator[tuple[str, str | int, int | None]]:
    """Who may connect to which port or range of ports of the workload."""
    for policy in fleet.kind("NetworkPolicy"):
        if matches(policy["spec"]["podSelector"], workload.labels):
            assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
            for rule in policy["spec"]["ingress"]:
                for source in rule.get("from", [None]):
                    for port in rule["ports"]:
                        yield _who(fleet, source), port["port"], port.get("endPort")


def _who(fleet: Fleet, source: Manifest | None) -> str:
    if source is None:
        return "any"
    if "podSelector" not in source:
        return "namespace"
    names = fleet.selected(source["podSelector"])
    return {
        ("pdserve-coordinator",): "coordinator",
        ("pdserve-decode", "pdserve-prefill"): "worker",
    }[tuple(names)]


def test_images_are_of_this_version_and_have_a_recipe(fleet: Fleet) -> None:
    targets = re.findall(r"^FROM runtime AS (\S+)$", _dockerfile(), re.MULTILINE)
    for workload in fleet.workloads:
        name, _, tag = workload.container["image"].partition(":")
        assert tag == pdserve.__version__
        assert name in {f"pdserve/{target}" for target in targets}


def test_pods_have_no_more_rights_than_they_need(fleet: Fleet) -> None:
    for workload in fleet.workloads:
        resources = workload.container["resources"]
        for kind in ("requests", "limits"):
            assert {"cpu", "memory", "ephemeral-storage"} <= resources[kind].keys()
        assert workload.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert workload.pod["securityContext"]["runAsNonRoot"] is True
        assert workload.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert workload.pod["automountServiceAccountToken"] is False
        user = workload.pod["securityContext"]["runAsUser"]
        assert f"--uid {user} " in _dockerfile()


def test_volumes_are_mounted_and_key_files_are_in_secrets(fleet: Fleet) -> None:
    assert not fleet.kind("Secret"), "secrets are made by whoever runs the fleet"
    for workload in fleet.workloads:
        volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
        mounts = {mount["name"]: mount for mount in workload.container["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        secrets = {m["mountPath"] for name, m in mounts.items() if "secret" in volumes[name]}
        keys = {workload.settings.fleet.key_file, workload.settings.coordinator.gateway.keys_file}
        assert {str(path.parent) for path in keys if path is not None} == secrets


def test_prefill_and_decode_differ_in_names_alone() -> None:
    prefill, decode = (
        [*yaml.safe_load_all((ROOT / f"k8s/base/{role}.yaml").read_text().replace(role, "ROLE"))]
        for role in ("prefill", "decode")
    )
    assert prefill == decode


@pytest.mark.parametrize(
    ("file", "right", "wrong", "complaint"),
    [
        ("decode.yaml", "livenessProbe:", "livenesProbe:", "livenesProbe"),
        ("decode.yaml", "replicas: 1", "replicas: one", "replicas"),
        ("decode.yaml", "kind: StatefulSet", "kind: StatefullSet", "StatefullSet"),
        ("kustomization.yaml", "- decode.yaml", "- decod.yaml", "decod.yaml"),
        ("decode.yaml", "      containers:", "     containers:", "does not build"),
    ],
)
def test_the_check_finds(tmp_path: Path, file: str, right: str, wrong: str, complaint: str) -> None:
    shutil.copytree(ROOT / "k8s/base", tmp_path / "base")
    text = (tmp_path / "base" / file).read_text()
    assert text.count(right) == 1
    (tmp_path / "base" / file).write_text(text.replace(right, wrong))
    checked = subprocess.run(
        [ROOT / "scripts/check-k8s", tmp_path / "base"],
        env={"PATH": "/usr/bin:/bin", "VENV": str(BIN.parent)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 1
    assert complaint in checked.stderr


def test_images_get_what_the_recipe_copies_and_the_torch_that_is_tested() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(\S+)", _dockerfile(), re.MULTILINE)
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    (torch,) = re.findall(r"^ARG TORCH=(.*)\+cpu$", _dockerfile(), re.MULTILINE)
    assert re.search(rf"^torch={re.escape(torch)} ", _read("scripts/install"), re.MULTILINE)


def _dockerfile() -> str:
    return _read("Dockerfile")


def _read(name: str) -> str:
    return (ROOT / name).read_text()

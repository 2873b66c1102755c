"""Manifests against the schemas of Kubernetes and Kubeflow, and against what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = ROOT / "deploy" / "kubernetes"
OVERLAYS = ["single", "trainjob", "elastic", "pack", "pack-ray", "monitoring"]
VERSIONS = ["1.32", "1.37"]
# Of operators: not in Kubernetes' own schemas.
CUSTOM = {"TrainJob", "TrainingRuntime", "RayJob", "PodMonitor", "PrometheusRule"}
Manifest = dict[str, Any]


def _documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _rendered(overlay: str) -> list[Manifest]:
    """What kustomize makes of an overlay: of its features the three that are used."""
    folder = MANIFESTS / overlay
    (kustomization,) = _documents(folder / "kustomization.yaml")
    assert set(kustomization) <= {"apiVersion", "kind", "namespace", "resources", "images"}
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += _rendered(name.removeprefix("../")) if path.is_dir() else _documents(path)
    text = json.dumps(found)
    for image in kustomization.get("images", []):
        name = re.escape(json.dumps(image["name"]))
        text = re.sub(rf'"image": {name}', f'"image": "{image["name"]}:{image["newTag"]}"', text)
    found = json.loads(text)
    for document in found:
        if document["kind"] != "Namespace":
            document["metadata"]["namespace"] = kustomization["namespace"]
    return found


def _of_kind(overlay: str, kind: str) -> Manifest:
    (found,) = (document for document in _rendered(overlay) if document["kind"] == kind)
    return found


def _pods(node: Any) -> Iterator[Manifest]:
    """Every pod specification inside of a manifest."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from _pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from _pods(value)


def _containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def _trains(container: Manifest) -> bool:
    return any("--output" in word for word in container.get("args", []))


TRAINING = [
    ("single", "Job"),
    ("elastic", "StatefulSet"),
    ("trainjob", "TrainingRuntime"),
]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_makes_the_same(overlay: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / overlay)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    theirs = [document for document in yaml.safe_load_all(done.stdout) if document]

    def key(document: Manifest) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(theirs, key=key) == sorted(_rendered(overlay), key=key)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_schemas(overlay: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in _rendered(overlay):
        if document["kind"] not in CUSTOM:
            validate.validate(document, version, strict=True)


def test_schemas_are_looked_at() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = _of_kind("single", "Job")
    job["spec"]["template"]["spec"]["gracePeriod"] = 1
    with pytest.raises(validate.ValidationError, match="gracePeriod"):
        validate.validate(job, VERSIONS[0], strict=True)


@pytest.mark.parametrize("kind", ["TrainJob", "TrainingRuntime"])
def test_kubeflow_knows_it(kind: str) -> None:
    """Read by Kubeflow's own models and written again, nothing is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _of_kind("trainjob", kind)
    read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(manifest)
    again = json.loads(read.to_json())

    def lost(ours: Any, theirs: Any, where: str) -> Iterator[str]:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for name, value in ours.items():
                if name not in theirs:
                    yield f"{where}.{name}"
                else:
                    yield from lost(value, theirs[name], f"{where}.{name}")
        elif isinstance(ours, list) and isinstance(theirs, list):
            assert len(ours) == len(theirs), where
            for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from lost(one, other, f"{where}[{place}]")
        elif str(ours) != str(theirs):
            yield where

    assert list(lost(manifest, again, kind)) == []


def test_trainjob_names_its_runtime() -> None:
    job, runtime = (_of_kind("trainjob", kind) for kind in ("TrainJob", "TrainingRuntime"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    # Kubeflow puts command, arguments and resources into the container of this name.
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    (pod,) = _pods(runtime)
    assert [container["name"] for container in pod["containers"]] == ["node"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    """What the namespace demands, which enforces the restricted standard, and a little more."""
    for document in _rendered(overlay):
        for pod in _pods(document):
            security = pod["securityContext"]
            assert security["runAsNonRoot"] is True and security["runAsUser"] == 1000
            assert security["seccompProfile"]["type"] == "RuntimeDefault"
            assert pod["automountServiceAccountToken"] is False
            assert not any("hostPath" in volume for volume in pod["volumes"])
            for container in _containers(pod):
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]
                assert security["readOnlyRootFilesystem"] is True
                mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
                assert "/tmp" in mounts  # where the entry point keeps what it writes
                volumes = {volume["name"] for volume in pod["volumes"]}
                assert {mount["name"] for mount in mounts.values()} <= volumes
                image = container["image"].partition(":")
                version = image[2].removeprefix("torch")
                assert (ROOT / f"deploy/requirements/torch-{version}.txt").is_file(), image


@pytest.mark.parametrize(("overlay", "kind"), TRAINING)
def test_training_pods(overlay: str, kind: str) -> None:
    (pod,) = _pods(_of_kind(overlay, kind))
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/workspace/data"]["readOnly"] is True
    assert "readOnly" not in mounts["/checkpoints"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "data", "readOnly": True}
    shared = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert shared["medium"] == "Memory" and shared["sizeLimit"]
    # torchrun's processes have time to save, and torchrun to leave, before the pod is killed.
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    patience = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert patience + 10 <= pod["terminationGracePeriodSeconds"]


def _training_arguments() -> Iterator[tuple[list[str], Manifest, int]]:
    """Arguments, resources and ranks of each container that trains."""
    for overlay in ("single", "elastic"):
        for document in _rendered(overlay):
            for pod in _pods(document):
                for container in filter(_trains, pod["containers"]):
                    yield container["args"], container["resources"], 1
    trainer = _of_kind("trainjob", "TrainJob")["spec"]["trainer"]
    yield trainer["args"], trainer["resourcesPerNode"], trainer["numProcPerNode"]


def test_training_arguments_are_the_recipes() -> None:
    text = (ROOT / "recipes/imagenet/train.py").read_text()
    known = set(re.findall(r'add\(\s*"(--[a-z0-9-]+)"', text))
    seen = 0
    for arguments, resources, ranks in _training_arguments():
        given = dict(
            word.partition("=")[::2]
            for word in arguments[
                1 + max(i for i, w in enumerate(arguments) if w == "train" or "train.py" in w) :
            ]
        )
        assert set(given) <= known, given
        assert given["--resume"] == "auto" and given["--output"].startswith("/checkpoints/")
        # A core for each worker of each rank and one for the training; a GPU for each rank.
        assert int(resources["requests"]["cpu"]) == ranks * (int(given["--workers"]) + 1)
        assert int(resources["limits"]["nvidia.com/gpu"]) == ranks
        seen += 1
    assert seen == 3


def test_elastic_numbers_agree() -> None:
    scaler, pods = (
        _of_kind("elastic", "HorizontalPodAutoscaler"),
        _of_kind("elastic", "StatefulSet"),
    )
    service = _of_kind("elastic", "Service")
    name = pods["metadata"]["name"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == name
    assert service["metadata"]["name"] == pods["spec"]["serviceName"]
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert pods["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    given = dict(word.partition("=")[::2] for word in container["args"])
    low, high = scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]
    assert given["--nnodes"] == f"{low}:{high}"
    host, port = given["--rdzv-endpoint"].split(":")
    assert host == f"{name}-0.{service['metadata']['name']}"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert int(given["--max-restarts"]) >= 10 * high


def test_the_metric_has_one_name() -> None:
    """From the recipe's log over exporter and adapter to autoscaler and alert."""
    (adapter,) = _documents(MANIFESTS / "elastic/prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["external"]
    (metric,) = _of_kind("elastic", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    exported = "training_data_wait_share"
    assert rule["name"]["matches"] == exported and exported in rule["metricsQuery"]
    (alert,) = _of_kind("monitoring", "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert exported in alert["expr"]
    assert "data_wait_share=" in (ROOT / "recipes/imagenet/train.py").read_text()
    monitor = _of_kind("monitoring", "PodMonitor")["spec"]
    for overlay, kind in TRAINING:
        manifest = _of_kind(overlay, kind)
        text = json.dumps(manifest)
        for label, value in monitor["selector"]["matchLabels"].items():
            assert f'"{label}": "{value}"' in text
        (pod,) = _pods(manifest)
        ports = [p["name"] for c in _containers(pod) for p in c.get("ports", [])]
        assert monitor["podMetricsEndpoints"][0]["port"] in ports


def test_no_scale_up_while_data_binds() -> None:
    """The autoscaler's own rule, with its tolerance of a tenth, on shares of waiting."""
    (metric,) = _of_kind("elastic", "HorizontalPodAutoscaler")["spec"]["metrics"]
    target = int(metric["external"]["target"]["value"].removesuffix("m")) / 1000

    def wanted(pods: int, waiting: float) -> int:
        ratio = (1 - waiting) / target
        return pods if abs(ratio - 1) <= 0.1 else ceil(pods * ratio)

    assert all(wanted(pods, 0.02) == pods + 1 for pods in (1, 2, 3, 4))
    assert all(wanted(pods, 0.2) == pods for pods in range(1, 9))
    assert all(
        wanted(pods, waiting) <= pods for pods in range(1, 9) for waiting in (0.15, 0.5, 0.9)
    )


def test_packing_on_pods_is_the_whole_set() -> None:
    job = _of_kind("pack", "Job")["spec"]
    (pod,) = _pods(job)
    (container,) = pod["containers"]
    assert job["completionMode"] == "Indexed"
    assert f"--part=$(JOB_COMPLETION_INDEX)/{job['completions']}" in container["args"]
    ray = _of_kind("pack-ray", "RayJob")["spec"]
    locks = (ROOT / "deploy/requirements/torch-2.14.txt").read_text()
    assert f"\nray=={ray['rayClusterSpec']['rayVersion']} " in locks
    for words in (container["args"], ray["entrypoint"].split()):
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "pack", "--help"],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
            check=True,
        )
        assert all(option in done.stdout or option == "--no-measure" for option in options)


def test_figures_for_prometheus(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    script = ROOT / "deploy/training-metrics"
    # Port 0 would not be told; one that was free a moment ago is.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(log), str(port)])
    try:

        def scraped() -> str:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as a:
                        return str(a.read().decode())
                except OSError:  # it is about to start
                    threading.Event().wait(0.05)
            raise AssertionError("it does not answer")

        assert scraped() == ""
        line = {"kind": "train", "step": 7, "time": time.time(), "data_wait_share": 0.25}
        log.write_text(json.dumps(line) + '\n{"kind": "train", "st')
        assert "# TYPE training_data_wait_share gauge\ntraining_data_wait_share 0.25\n" in scraped()
        assert "training_step 7.0\n" in scraped()
        log.write_text("no JSON\n[1]\n" + json.dumps({**line, "time": 1.0}) + "\n")
        assert scraped() == ""  # ended long ago
    finally:
        process.terminate()
        process.wait(20)

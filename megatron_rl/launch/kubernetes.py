"""`megatron-rl launch kubernetes`: a StatefulSet of agents, a Job of ranks, and a headless Service for their names.

The ranks are an indexed Job, since a StatefulSet would start a run that has ended again.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UsageError
from megatron_rl.flag import FlagParser
from megatron_rl.launch.files import HOSTS_FILE, TOKEN_FILE, submit, write_hosts
from megatron_rl.launch.settings import RENDEZVOUS_PORT, SERVICE_PORT, LaunchSettings, add_flags, read_common
from megatron_rl.launch.yaml import write_yaml
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.sidecar.hosts import VARIABLE

_RUN_FILE, _SECRET_FILE = "run.yaml", "secret.yaml"
_LABEL, _PART = "megatron-rl/run", "megatron-rl/part"
_ENGINES, _TRAINER = "engines", "trainer"
_MOUNT = "/etc/megatron_rl"
_LOGS = "/tmp/engine-logs"
_GRACE_SECONDS = 120
_RETRIES = 6

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _KubernetesSettings:
    """The settings of a launch by Kubernetes."""

    common: LaunchSettings
    namespace: str
    image: str
    engine_image: str
    resource: str
    """The name of a host's accelerators among the resources of a container."""
    claims: tuple[tuple[str, str], ...]
    """Claims of volumes, each with the folder that it is mounted at."""

    @property
    def engines(self) -> str:
        """The name of the StatefulSet."""
        return f"{self.common.name}-{_ENGINES}"

    @property
    def trainer(self) -> str:
        """The name of the Job."""
        return f"{self.common.name}-{_TRAINER}"


def launch(argv: Sequence[str], words: Sequence[str]) -> None:
    """Write the manifests, print those without the token, and apply all."""
    settings = _parse(argv, words)
    folder = settings.common.folder
    token = write_hosts(folder, _describe_hosts(settings))
    run, secret = folder / _RUN_FILE, folder / _SECRET_FILE
    write_private(secret, write_yaml([build_secret(settings, token)]).encode())
    run.write_text(write_yaml(list(build_manifests(settings))))
    print(run.read_text(), flush=True)
    submit(["kubectl", "apply", "-f", str(secret), "-f", str(run)], is_dry=settings.common.is_dry)


def build_secret(settings: _KubernetesSettings, token: str) -> Object:
    """Return the object that has the agents' token."""
    return {**_head(settings, "v1", "Secret", settings.common.name), "stringData": {TOKEN_FILE: token}}


def build_manifests(settings: _KubernetesSettings) -> Iterator[Object]:
    """Yield all objects but the secret."""
    common = settings.common
    ports = {"agents": common.port, "weights": common.port + 1, "ranks": RENDEZVOUS_PORT, "service": SERVICE_PORT}
    yield {
        **_head(settings, "v1", "Service", common.name),
        "spec": {
            "clusterIP": "None",
            # Agents and ranks find each other before all of them are ready.
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: common.name},
            "ports": [{"name": name, "port": port} for name, port in ports.items()],
        },
    }
    yield {**_head(settings, "v1", "ConfigMap", common.name), "data": {HOSTS_FILE: _describe_hosts(settings)}}
    yield _build_engines(settings)
    yield _build_trainer(settings)


def _build_engines(settings: _KubernetesSettings) -> Object:
    common = settings.common
    # An address of IPv6 is written in brackets.
    container = _build_container(
        settings,
        _ENGINES,
        f"exec {common.agent('${POD_IP/*:*/[$POD_IP]}', f'{_MOUNT}/{TOKEN_FILE}', _LOGS)}",
        [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    )
    container["ports"] = [
        {"name": "agents", "containerPort": common.port},
        {"name": "weights", "containerPort": common.port + 1},
    ]
    container["readinessProbe"] = {"httpGet": {"path": "/health", "port": "agents"}}
    return {
        **_head(settings, "apps/v1", "StatefulSet", settings.engines),
        "spec": {
            "serviceName": common.name,
            "replicas": common.engine_hosts,
            # No agent waits for another.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(settings, _ENGINES)},
            "template": _build_template(settings, _ENGINES, container, {}),
        },
    }


def _build_trainer(settings: _KubernetesSettings) -> Object:
    common = settings.common
    container = _build_container(
        settings,
        _TRAINER,
        f"exec {common.torchrun('$JOB_COMPLETION_INDEX', f'{settings.trainer}-0.{common.name}')}",
        [{"name": VARIABLE, "value": f"{_MOUNT}/{HOSTS_FILE}"}],
    )
    # The name of a pod of an indexed Job is that of its host: NAME-INDEX.
    own = {"subdomain": common.name, "restartPolicy": "OnFailure"}
    return {
        **_head(settings, "batch/v1", "Job", settings.trainer),
        "spec": {
            "completionMode": "Indexed",
            "completions": common.trainer_hosts,
            "parallelism": common.trainer_hosts,
            "backoffLimit": _RETRIES,
            "template": _build_template(settings, _TRAINER, container, own),
        },
    }


def _build_template(settings: _KubernetesSettings, part: str, container: Object, own: Mapping[str, Any]) -> Object:
    """Return the description of a pod; `own` is what only this part needs."""
    name = settings.common.name
    files = {
        "name": "hosts",
        "projected": {
            # An agent, and the sidecar, refuse a token that others can read.
            "defaultMode": 0o400,
            "sources": [{"secret": {"name": name}}, {"configMap": {"name": name}}],
        },
    }
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(settings.claims)
    ]
    return {
        "metadata": {"labels": _labels(settings, part)},
        "spec": {
            **own,
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "containers": [container],
            "volumes": [files, memory, *claims],
        },
    }


def _build_container(settings: _KubernetesSettings, part: str, command: str, environment: list[Object]) -> Object:
    common = settings.common
    limits = {settings.resource: common.devices_per_host} if common.devices_per_host else {}
    claims = [{"name": f"claim-{number}", "mountPath": folder} for number, (_, folder) in enumerate(settings.claims)]
    return {
        "name": part,
        "image": settings.engine_image if part == _ENGINES else settings.image,
        "command": ["bash", "-c", command],
        "env": environment,
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "hosts", "mountPath": _MOUNT, "readOnly": True},
            # Weights travel through files in memory; a container has 64 MB of it otherwise.
            {"name": "memory", "mountPath": "/dev/shm"},
            *claims,
        ],
    }


def _head(settings: _KubernetesSettings, version: str, kind: str, name: str) -> Object:
    metadata = {"name": name, "namespace": settings.namespace, "labels": {_LABEL: settings.common.name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _labels(settings: _KubernetesSettings, part: str) -> Object:
    return {_LABEL: settings.common.name, _PART: part}


def _describe_hosts(settings: _KubernetesSettings) -> str:
    common = settings.common
    table = [f'stateful_set = "{settings.engines}"', f'service = "{common.name}"', f"replicas = {common.engine_hosts}"]
    return common.describe_hosts("kubernetes", "\n".join(table))


def _parse(argv: Sequence[str], words: Sequence[str]) -> _KubernetesSettings:
    parser = FlagParser(prog="megatron-rl launch kubernetes", description=(__doc__ or "").partition(": ")[2])
    add_flags(parser)
    parser.add_argument("--image", help="the image of docker/Dockerfile, for ranks and engines")
    parser.add_argument("--engine-image", help="the image of docker/engines.Dockerfile; that of --image if not given")
    parser.add_argument("--namespace", help="the namespace of all objects; default if not given")
    parser.add_argument("--resource", help="the name of accelerators among resources; nvidia.com/gpu if not given")
    parser.add_argument("--claim", action="append", help="CLAIM:FOLDER, a claim of a volume and where it is mounted")
    given = parser.parse_args(list(argv))
    common, problems = read_common(given, words, "kubernetes", python="python")
    # The run's folder is one of the containers'.
    common = dataclasses.replace(common, folder=getattr(given, "out", Path(f"{common.name}-launch")).absolute())
    claims = [tuple(claim.partition(":")[::2]) for claim in getattr(given, "claim", [])]
    for claim, folder in claims:
        if not claim or not folder.startswith("/"):
            problems.append(f"--claim {claim}:{folder} must be CLAIM:FOLDER, with an absolute folder")
    if "image" not in given:
        problems.append("--image is missing: name the image that docker/Dockerfile makes, as your registry knows it")
    if problems:
        raise UsageError(*problems)
    namespace, resource = getattr(given, "namespace", "default"), getattr(given, "resource", "nvidia.com/gpu")
    engine_image = getattr(given, "engine_image", given.image)
    return _KubernetesSettings(common, namespace, given.image, engine_image, resource, tuple(claims))

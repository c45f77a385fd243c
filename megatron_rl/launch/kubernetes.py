"""`megatron-rl launch kubernetes`: a StatefulSet of agents, a Job of ranks, and a headless Service for their names."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.flag_parser import FlagParser
from megatron_rl.launch.files import TOKEN_FILE, fill_template, submit, write_hosts
from megatron_rl.launch.settings import RENDEZVOUS_PORT, SERVICE_PORT, LaunchSettings, add_flags, read_common
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.sidecar.hosts import VARIABLE

_RUN_FILE, _SECRET_FILE = "run.yaml", "secret.yaml"
_MOUNT = "/etc/megatron_rl"
_LOGS = "/tmp/engine-logs"


@dataclasses.dataclass(frozen=True)
class _KubernetesSettings:
    common: LaunchSettings
    namespace: str
    image: str
    engine_image: str
    resource: str
    """The name of a host's accelerators among the resources of a container."""
    claims: tuple[tuple[str, str], ...]
    """Claims of volumes, each with the folder that it is mounted at."""


def launch(argv: Sequence[str], words: Sequence[str]) -> None:
    """Write the manifests, print those without the token, and apply all."""
    settings = _parse(argv, words)
    common, folder = settings.common, settings.common.folder
    table = [
        f'stateful_set = "{common.name}-engines"',
        f'service = "{common.name}"',
        f"replicas = {common.engine_hosts}",
    ]
    hosts = common.describe_hosts("kubernetes", "\n".join(table))
    token = write_hosts(folder, hosts)
    run, secret = folder / _RUN_FILE, folder / _SECRET_FILE
    namespace = json.dumps(settings.namespace)
    text = fill_template(_SECRET_FILE, name=common.name, namespace=namespace, token=json.dumps(token))
    write_private(secret, text.encode())
    run.write_text(_fill_manifests(settings, hosts))
    print(run.read_text(), flush=True)
    submit(["kubectl", "apply", "-f", str(secret), "-f", str(run)], is_dry=common.is_dry)


def _fill_manifests(settings: _KubernetesSettings, hosts: str) -> str:
    """Return all objects but the secret. Values that users write are JSON, which YAML reads as it is."""
    common = settings.common
    # An address of IPv6 is written in brackets.
    agent = common.agent("${POD_IP/*:*/[$POD_IP]}", f"{_MOUNT}/{TOKEN_FILE}", _LOGS)
    ranks = common.torchrun("$JOB_COMPLETION_INDEX", f"{common.name}-trainer-0.{common.name}")
    sources = [{"secret": {"name": common.name}}, {"configMap": {"name": common.name}}]
    # Weights travel through files in memory; a container has 64 MB of it otherwise. Only its user reads the token.
    mounts: list[object] = [
        {"name": "hosts", "mountPath": _MOUNT, "readOnly": True},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[object] = [
        {"name": "hosts", "projected": {"defaultMode": 0o400, "sources": sources}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    for number, (claim, folder) in enumerate(settings.claims):
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return fill_template(
        _RUN_FILE,
        name=common.name,
        namespace=json.dumps(settings.namespace),
        hosts=textwrap.indent(hosts.rstrip("\n"), "    "),
        hosts_variable=VARIABLE,
        image=json.dumps(settings.image),
        engine_image=json.dumps(settings.engine_image),
        agent=json.dumps(f"exec {agent}"),
        ranks=json.dumps(f"exec {ranks}"),
        trainer_hosts=common.trainer_hosts,
        engine_hosts=common.engine_hosts,
        limits=json.dumps({settings.resource: common.devices_per_host} if common.devices_per_host else {}),
        mounts=_list_lines(mounts, 12),
        volumes=_list_lines(volumes, 8),
        port=common.port,
        weights_port=common.port + 1,
        rendezvous_port=RENDEZVOUS_PORT,
        service_port=SERVICE_PORT,
    )


def _list_lines(items: Sequence[object], indent: int) -> str:
    """Return a list of YAML's with an item a line."""
    return "".join(f"\n{' ' * indent}- {json.dumps(item)}" for item in items)


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

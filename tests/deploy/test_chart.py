"""The Helm chart, rendered: against the schemas of Kubernetes, the command line, the settings and the routes."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.server import build_processes
from app.core.settings import REPOSITORY, Settings
from app.core.settings.loading import load_settings
from app.main import create_app
from tests.conftest import skip_or_fail
from tests.deploy.chart import (
    CHART,
    SECRET,
    TOOLS,
    by_kind,
    containers,
    environment,
    helm,
    pods,
    refusal,
    render,
    render_text,
    write_settings,
)
from tests.support.settings import is_variable

pytestmark = pytest.mark.slow  # they need Helm, which `make chart` installs
OTHER = ("--values", str(REPOSITORY / "tests" / "deploy" / "values.yaml"))
MEMORY = ("--set", "engine.adapterDelivery=memory")
KUBERNETES = "1.35.0"
VALUES = pytest.mark.parametrize("options", [(), OTHER], ids=["defaults", "other"])


@VALUES
def test_helm_lint_reports_nothing(options: tuple[str, ...]) -> None:
    result = helm("lint", "--strict", str(CHART), *options)
    assert result.returncode == 0, result.stdout


def test_manifests_conform_to_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Of all kinds but KEDA's ScaledObject, which is no part of Kubernetes: the validator has no schema for it."""
    manifests = [each for each in (*render(), *render(*OTHER)) if each["kind"] != "ScaledObject"]
    validator = TOOLS / "kubernetes-validate"
    if not validator.exists():
        skip_or_fail("kubernetes-validate is not installed: `make chart`")
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    result = subprocess.run([validator, "--strict", "-k", KUBERNETES, file], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stdout + result.stderr).count(" passed ") == len(manifests)


def test_each_process_of_attune_up_has_a_workload() -> None:
    assert set(pods()) == {child.name for child in build_processes(Settings())} | {"migration"}


def test_commands_exist() -> None:
    every_pod = (*pods().values(), *pods(*OTHER).values())
    commands = {tuple(container["args"]) for pod in every_pod for container in containers(pod)}
    assert len(commands) == 11, "eight roles, one of them on one host and on several, and two commands of the hook"
    for command in commands:
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0 and "Usage" in result.output, result.output
        wrong = CliRunner().invoke(app, [*command, "--no-such-option", "--help"])
        assert wrong.exit_code != 0, "an unknown option is an error"


@VALUES
def test_settings_of_every_container_are_valid(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_settings(tmp_path, *options)
    migration = by_kind("ConfigMap", *options)["prod-attune-migration"]["data"]
    assert migration["attune.toml"] == file.read_text(), "the hook checks what the pods get"
    for name, pod in pods(*options).items():
        for container in containers(pod):
            variables = environment(container)
            assert variables["ATTUNE_CONFIG"] == "/etc/attune/attune.toml"
            variables |= {"ATTUNE_CONFIG": str(file)}
            assert all(is_variable(each) for each in variables if each.startswith("ATTUNE_") and "CONFIG" not in each)
            loaded = load_settings(variables).settings
            assert loaded.database_url == SECRET["ATTUNE_DATABASE__URL"] and loaded.home == Path("/data")
            if name not in ("engine", "migration"):
                assert loaded.broker.url == SECRET["ATTUNE_BROKER__URL"], "the embedded broker reaches one host only"
            if name == "api":
                assert loaded.limits.url == SECRET["ATTUNE_LIMITS__URL"] and loaded.server.host == "0.0.0.0"
    for variable, value in ({"ATTUNE_CONFIG": str(file)} | SECRET).items():
        monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, ["config", "check", "--settings-only"])
    assert result.exit_code == 0 and "valid" in result.output


def test_settings_reach_the_file_with_their_types(tmp_path: Path) -> None:
    settings = load_settings({"ATTUNE_CONFIG": str(write_settings(tmp_path, *OTHER))} | SECRET).settings
    assert (settings.trainer.batch_size, settings.trainer.optim.lr) == (48, 1e-5)
    assert (settings.engine.max_total_tokens, settings.engine.extra_flags) == (10_000_000, ("--enable-metrics",))
    assert settings.algorithm.type == "grpo" and settings.engine.adapter_delivery == "memory"


@VALUES
def test_no_secret_is_in_a_manifest(options: tuple[str, ...]) -> None:
    """A container gets the keys that its role needs, from the Secret: an engine runs a model's files."""
    by_role = {
        name: {each["name"] for each in containers(pod)[-1]["env"] if "secretKeyRef" in each.get("valueFrom", {})}
        for name, pod in pods(*options).items()
    }
    assert by_role["engine"] == {
        "ATTUNE_DATABASE__URL",
        "ATTUNE_ENGINE__API_KEY",
        "ATTUNE_ENGINE__ADMIN_KEY",
        "HF_TOKEN",
    }
    assert {role for role, names in by_role.items() if "HF_TOKEN" in names} == {
        "engine",
        "trainer",
        "worker",
        "publisher",
    }
    with_engine_keys = {role for role, names in by_role.items() if "ATTUNE_ENGINE__API_KEY" in names}
    assert with_engine_keys == {"api", "engine", "worker", "publisher", "rollout", "trainer"}, (
        "the trainer's parity check"
    )
    assert by_role.pop("migration") == {"ATTUNE_DATABASE__URL", "ATTUNE_DATABASE__OWNER_URL"}
    assert by_role["api"] == SECRET.keys() - {"ATTUNE_DATABASE__OWNER_URL", "HF_TOKEN"}
    assert not any("ATTUNE_DATABASE__OWNER_URL" in names for names in by_role.values()), "the migration's alone"
    optional = {"ATTUNE_SECRETS", "ATTUNE_DATABASE__ENCRYPTION_KEYS", "ATTUNE_DATABASE__OWNER_URL", "HF_TOKEN"}
    for pod in pods(*options).values():
        for variable in containers(pod)[-1]["env"]:
            if (key := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                assert key.get("optional", False) == (variable["name"] in optional)
    assert not any(each["kind"] == "Secret" for each in render(*options))


@VALUES
def test_pods_are_restricted(options: tuple[str, ...]) -> None:
    """They satisfy the profile "restricted" of the Pod Security Standards, with a read-only root file system."""
    for pod in pods(*options).values():
        security = pod["securityContext"]
        assert (security["runAsUser"], security["runAsNonRoot"]) == (10001, True)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"} and security["fsGroup"] == 10001
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert {"/tmp", "/data", "/home/attune/.cache"} <= mounts.keys(), "these are written to"
            assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


def test_user_of_the_pods_is_that_of_the_images() -> None:
    assert "USER 10001" in (REPOSITORY / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def routes() -> set[str]:
    return {path for path, methods in create_app(Settings()).openapi()["paths"].items() if "get" in methods}


@VALUES
def test_probes_use_routes_that_exist(options: tuple[str, ...], routes: set[str]) -> None:
    [api] = pods(*options)["api"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert api[probe]["httpGet"]["path"] in routes
    assert api["livenessProbe"]["httpGet"]["path"] == "/livez", "an absent engine is no reason to restart the API"
    [engine] = pods(*options)["engine"]["containers"]
    assert engine["startupProbe"]["httpGet"]["path"] == "/health" and "livenessProbe" not in engine
    start = 1200 if options == OTHER else Settings().engine.start_timeout_seconds
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > start


def test_engine_is_ready_when_it_takes_traffic() -> None:
    [engine] = pods()["engine"]["containers"]
    file = engine["args"][engine["args"].index("--ready-file") + 1]
    assert engine["readinessProbe"]["exec"]["command"] == ["test", "-f", file] and file.startswith("/tmp/")


@pytest.mark.parametrize(("options", "seconds", "delay"), [((), 600, 5), (OTHER, 900, 12.5)])
def test_replies_end_before_a_pod_is_killed(options: tuple[str, ...], seconds: float, delay: float) -> None:
    grace = {name: pod["terminationGracePeriodSeconds"] for name, pod in pods(*options).items()}
    assert grace["api"] > seconds + delay
    assert grace["engine"] > seconds + 30, "its replies, then SGLang"
    assert grace["trainer"] > 45, "torchrun waits 30 s for its ranks"


def test_replies_that_last_longer_than_a_pod_are_refused() -> None:
    reason = refusal("--set", "settings.server.chat_timeout_seconds=900")
    assert "settings.server.shutdown_seconds must be at least settings.server.chat_timeout_seconds (900)" in reason


@VALUES
def test_one_pod_at_a_time_is_disrupted(options: tuple[str, ...]) -> None:
    budgets = by_kind("PodDisruptionBudget", *options)
    assert {name: each["spec"]["maxUnavailable"] for name, each in budgets.items()} == {
        "prod-attune-api": 1,
        "prod-attune-engine": 1,
    }
    workloads = by_kind("StatefulSet", *options) | by_kind("Deployment", *options)
    for name, budget in budgets.items():
        labels = workloads[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert workloads["prod-attune-api"]["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


@VALUES
def test_selectors_match_only_their_own_pods(options: tuple[str, ...]) -> None:
    workloads = [each for each in render(*options) if each["kind"] in ("Deployment", "StatefulSet")]
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads}
    for each in workloads:
        wanted = each["spec"]["selector"]["matchLabels"].items()
        assert [name for name, found in labels.items() if wanted <= found.items()] == [each["metadata"]["name"]]
    for service in by_kind("Service", *options).values():
        wanted = service["spec"]["selector"].items()
        assert sum(wanted <= found.items() for found in labels.values()) == 1


def test_beat_runs_once() -> None:
    beat = by_kind("Deployment")["prod-attune-beat"]["spec"]
    assert beat["replicas"] == 1 and beat["strategy"] == {"type": "Recreate"}


def test_database_is_migrated_by_a_hook_that_checks_the_settings_first() -> None:
    job = by_kind("Job")["prod-attune-migration"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]["spec"]
    assert [container["args"] for container in containers(pod)] == [
        ["config", "check", "--settings-only"],
        ["db", "upgrade"],
    ]
    own = {"prod-attune-migration"}
    volumes = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert volumes == own and not any("persistentVolumeClaim" in volume for volume in pod["volumes"]), (
        "no other object of the release exists before the first installation"
    )
    settings = by_kind("ConfigMap")["prod-attune-migration"]["metadata"]["annotations"]
    weights = [int(each["helm.sh/hook-weight"]) for each in (settings, job["metadata"]["annotations"])]
    assert settings["helm.sh/hook"] == "pre-install,pre-upgrade" and weights == sorted(set(weights))


def test_engines_listen_on_the_address_that_they_publish(tmp_path: Path) -> None:
    [engine] = pods()["engine"]["containers"]
    variables = environment(engine)
    assert variables["ATTUNE_ENGINE__NAME"] == "prod-attune-engine-0"
    assert variables["ATTUNE_ENGINE__HOST"] == "prod-attune-engine-0.prod-attune-engine.chat.svc.cluster.local"
    service = by_kind("Service")[by_kind("StatefulSet")["prod-attune-engine"]["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert "ATTUNE_ENGINE__VERSIONS_URL" not in variables


def test_engines_without_shared_storage_download_versions(tmp_path: Path) -> None:
    def storage(name: str, *options: str) -> dict[str, object]:
        [volume] = [volume for volume in pods(*options)[name]["volumes"] if volume["name"] == "data"]
        return {key: value for key, value in volume.items() if key != "name"}

    claim = {"persistentVolumeClaim": {"claimName": "prod-attune"}}
    assert storage("engine") == storage("api") == storage("trainer") == storage("publisher", *MEMORY) == claim
    assert storage("engine", *MEMORY) == {"emptyDir": {}}
    [engine] = pods(*MEMORY)["engine"]["containers"]
    variables = {"ATTUNE_CONFIG": str(write_settings(tmp_path, *MEMORY))} | environment(engine)
    settings = load_settings(variables | {"ATTUNE_CONFIG": str(tmp_path / "attune.toml")}).settings
    url = settings.engine.versions_url
    assert url is not None and settings.engine.adapter_delivery == "memory"
    service = by_kind("Service", *MEMORY)[str(url.host)]["spec"]
    assert service["publishNotReadyAddresses"] is True, "an API that waits for an engine must answer that engine"
    assert service["ports"][0]["port"] == url.port == 8700


def test_versions_outlive_the_release() -> None:
    claim = by_kind("PersistentVolumeClaim")["prod-attune"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert not by_kind("PersistentVolumeClaim", *OTHER), "an existing claim is used"


@VALUES
def test_engines_answer_only_the_roles_that_use_them(options: tuple[str, ...]) -> None:
    policies = by_kind("NetworkPolicy", *options)
    rule, *metrics = policies["prod-attune-engine"]["spec"]["ingress"]
    roles = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in rule["from"]
        if "podSelector" in peer
    }
    assert roles == {"api", "worker", "publisher", "rollout", "trainer"} and rule["ports"] == [
        {"port": 8710, "protocol": "TCP"}
    ]
    workers = policies["prod-attune-workers"]["spec"]
    [selected] = workers["podSelector"]["matchExpressions"]
    assert {"api", "engine", "trainer"} | set(selected["values"]) == set(pods(*options))
    assert workers["ingress"] == metrics, "nobody, but Prometheus"
    assert len(metrics) == (options == OTHER)


def test_prometheus_reaches_the_metrics_of_every_role(tmp_path: Path) -> None:
    policies = by_kind("NetworkPolicy", *OTHER)
    [scraper] = yaml.safe_load(Path(OTHER[1]).read_text())["networkPolicy"]["scrapers"]
    settings = load_settings({"ATTUNE_CONFIG": str(write_settings(tmp_path, *OTHER))} | SECRET).settings
    assert settings.observability.metrics_host == "0.0.0.0"
    for name in ("engine", "trainer", "workers"):
        rule = policies[f"prod-attune-{name}"]["spec"]["ingress"][-1]
        assert rule["from"] == [scraper] and rule["ports"][0]["port"] == settings.observability.metrics_port
    [api] = policies["prod-attune-api"]["spec"]["ingress"]
    assert len(api["from"]) == 3 and scraper in api["from"], "the gateway, the engines, which download versions, and it"
    assert scraper in policies["prod-attune-engine"]["spec"]["ingress"][0]["from"], "SGLang's own metrics"
    for name, pod in pods(*OTHER).items():
        ports = {port["name"]: port["containerPort"] for port in pod["containers"][0].get("ports", [])}
        assert name in ("api", "migration") or ports["metrics"] == settings.observability.metrics_port


def test_metrics_are_not_served_where_nobody_may_read_them(tmp_path: Path) -> None:
    settings = load_settings({"ATTUNE_CONFIG": str(write_settings(tmp_path))} | SECRET).settings
    assert settings.observability.metrics_host == "127.0.0.1"


def test_keda_scales_engines_by_waiting_requests() -> None:
    scaled = by_kind("ScaledObject", *OTHER)["prod-attune-engine"]["spec"]
    assert scaled["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "prod-attune-engine"}
    metadata = scaled["triggers"][0]["metadata"]
    assert metadata["query"] == 'sum(sglang:num_queue_reqs{namespace="chat",pod=~"prod-attune-engine-.*"})'
    assert "replicas" not in by_kind("StatefulSet", *OTHER)["prod-attune-engine"]["spec"]
    assert "replicas" not in by_kind("Deployment")["prod-attune-api"]["spec"], "the autoscaler decides"
    assert by_kind("Deployment", *OTHER)["prod-attune-api"]["spec"]["replicas"] == 3


def test_trainers_on_several_hosts_form_a_group() -> None:
    [trainer] = pods()["trainer"]["containers"]
    assert trainer["args"] == ["trainer", "--nproc", "1"]
    [trainer] = pods(*OTHER)["trainer"]["containers"]
    endpoint = "prod-attune-trainer-0.prod-attune-trainer.chat.svc.cluster.local:29500"
    assert trainer["args"][:7] == ["trainer", "--nproc", "4", "--nnodes", "2", "--rdzv-endpoint", endpoint]
    assert by_kind("StatefulSet", *OTHER)["prod-attune-trainer"]["spec"]["replicas"] == 2


def test_changed_settings_replace_the_pods() -> None:
    def checksums(*options: str) -> set[str]:
        workloads = [each for each in render(*options) if each["kind"] in ("Deployment", "StatefulSet")]
        return {each["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for each in workloads}

    assert len(checksums()) == 1 and checksums().isdisjoint(checksums("--set", "settings.policy=shop"))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("api.replica=2", "additional properties 'replica' not allowed"),
        ("engine.adapterDelivery=http", "value must be one of 'path', 'memory'"),
        ("existingSecret=", "existingSecret"),
        ("worker.replicas=0", "minimum"),
        ("storage.size=big", "storage/size"),
        ("settings.database.url=postgresql://db", "settings.database.url is set by the chart: use existingSecret"),
        ("settings.engine.host=10.0.0.1", "settings.engine.host is set by the chart"),
        ("engine.keda.enabled=true", "engine.keda"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(option: str, reason: str) -> None:
    assert reason in refusal("--set", option)


def test_keda_without_metrics_of_the_engines_is_refused() -> None:
    options = ("--set", "engine.keda.enabled=true,engine.keda.serverAddress=http://prometheus:9090")
    assert "needs settings.engine.extra_flags with --enable-metrics" in refusal(*options)


def test_schema_knows_every_default() -> None:
    """A value that the schema does not know would be refused; one that values.yaml lacks would have no default."""

    def names(schema: dict[str, object], values: object, path: str = "") -> None:
        while "$ref" in schema:
            schema = root["$defs"][str(schema["$ref"]).rpartition("/")[2]]
        properties = schema.get("properties")
        if isinstance(properties, dict) and isinstance(values, dict):
            missing = properties.keys() - values.keys() - {"global"}
            assert path.endswith("resources") or not missing, f"values.yaml lacks {path}.{missing}"
            for name, value in values.items():
                names(properties[name], value, f"{path}.{name}")

    root = json.loads((CHART / "values.schema.json").read_text())
    names(root, yaml.safe_load((CHART / "values.yaml").read_text()))


def test_release_name_is_part_of_every_name() -> None:
    named = set(re.findall(r"^  name: (\S+)$", render_text(), re.MULTILINE))
    assert named and all(name.startswith("prod-attune") for name in named)

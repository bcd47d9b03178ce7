"""Test docs/cluster/*.yaml against Ray's own schema, and what becomes of a cluster's options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="needs pip install 'moeinf[cluster]'")
pytestmark = [
    pytest.mark.full,  # the import of Ray takes seconds
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),  # in Ray
]
DOCS = Path(__file__).parents[3] / "docs/cluster"


def served(text: str) -> list[Any]:
    """Return the arguments of each application of a Serve config."""
    from ray.serve.schema import ServeDeploySchema

    from moeinf.server.cluster.launch import Arguments

    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    return [Arguments.model_validate(application.args) for application in config.applications]


def test_serve_yaml_is_what_serve_deploy_takes() -> None:
    (arguments,) = served((DOCS / "serve.yaml").read_text())
    assert (arguments.min_replicas, arguments.max_replicas, arguments.retry) == (2, 4, True)


def test_serve_builds_the_deployment_that_serve_yaml_asks_for() -> None:
    """`serve deploy` passes args as a mapping, unless it finds a class as the annotation."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built

    from moeinf.server.cluster.launch import build

    config = yaml.safe_load((DOCS / "serve.yaml").read_text())["applications"][0]
    assert config["import_path"] == f"{build.__module__}:{build.__name__}"
    ingress = built(build, {**config["args"], "drain_s": 7})._bound_deployment
    replica = ingress.init_args[0]._bound_deployment
    assert ingress.ray_actor_options == {"num_cpus": 0}
    assert replica.ray_actor_options == {
        "num_cpus": 4.0, "memory": 8 << 30, "resources": {"moeinf_drive": 1.0},
    }  # fmt: skip
    about = replica._deployment_config
    scaling = about.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 4)
    # An update replaces both. Serve's own time for the ingress would cut answers off.
    assert about.graceful_shutdown_timeout_s == 7
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 7


def test_the_manifest_serves_as_many_replicas_as_it_has_drives() -> None:
    manifest = yaml.safe_load((DOCS / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    spec = manifest["spec"]
    (arguments,) = served(spec["serveConfigV2"])
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["rayStartParams"]["resources"] == '"{\\"moeinf_drive\\": 1}"'
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        arguments.min_replicas / arguments.drives,
        arguments.max_replicas / arguments.drives,
    )
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["cpu"]) >= arguments.cpus


def test_unknown_arguments_are_refused() -> None:
    text = (DOCS / "serve.yaml").read_text().replace("router:", "ruoter:")
    with pytest.raises(ValueError, match="ruoter"):
        served(text)


@pytest.mark.parametrize(
    ("replicas", "drives", "part"),
    [(2, 2.0, 1.0), (4, 2.0, 0.5), (3, 2.0, 0.5), (1, 8.0, 1.0), (2, 0.0, 0.0)],
)
def test_all_drives_get_as_many_replicas(replicas: int, drives: float, part: float) -> None:
    from moeinf.server.cluster.launch import ClusterSettings, drives_of

    settings = ClusterSettings(min_replicas=1, max_replicas=replicas)
    assert drives_of(settings, {"moeinf_drive": drives} if drives else {}) == part


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("failed. Error:\n  File x\n    raise\nmoeinf.errors.NotFound: no such model\n", "no such"),
        ("failed. Error:\n  File x\nMemoryError: 8 GiB\nA later line", "MemoryError: 8 GiB"),
        ("", "the deployment"),
    ],
)
def test_why_replicas_do_not_start(told: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moeinf.server.cluster import launch

    status = {"moeinf": SimpleNamespace(deployments={"replica": SimpleNamespace(message=told)})}
    monkeypatch.setattr(launch.serve, "status", lambda: SimpleNamespace(applications=status))
    assert launch._why(RuntimeError("the deployment")).startswith(words)


@pytest.mark.parametrize("memory", [None, "auto"])
def test_a_replica_takes_what_is_free(memory: str | None) -> None:
    from moeinf.server.cluster.launch import build

    ingress = build({"memory": memory})._bound_deployment
    assert "memory" not in ingress.init_args[0]._bound_deployment.ray_actor_options

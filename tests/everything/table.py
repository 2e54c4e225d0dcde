"""All suites, in the order in which they run, and the skips that are accepted.

A suite is a make target, so that each is defined once. The first ones are fast.
"""

from collections.abc import Sequence

from everything.suite import Accepted, Suite

FAST = (
    Suite("lint", "format and lint", "lint", pytest=False),
    Suite("types", "mypy, strict", "types", pytest=False),
    Suite("walls", "the direction of imports", "walls", pytest=False),
    Suite("docs", "the site, its links and anchors", "docs", pytest=False),
    Suite("unit", "unit tests, with the coverage of branches", "unit"),
    Suite("unit-long", "the long unit tests", "unit-long"),
    Suite(
        "lowest-versions", "the lowest versions of dependencies", "lowest-versions", pytest=False
    ),
    Suite("recipes", "examples/recipes and the launcher, with a real torchrun", "recipes"),
)
SIMULATED = (
    Suite("thorough", "each property of the pure core with 1,000 examples", "thorough"),
    Suite("faults", "faults at every request and event, in virtual time", "faults"),
)
CLUSTERS = (
    Suite("integration-all", "a real API server, with the long tests", "integration-all"),
    Suite("e2e-all", "real pods, torch, Ray and KubeRay, pages of the SDK", "e2e-all"),
    Suite("ha", "replicas: 50 kills of the leader", "ha"),
    Suite("faults-proxied", "single faults on a real API server", "faults-proxied"),
    Suite("monitoring", "every panel and alert, by a real Prometheus", "monitoring"),
    Suite("hostile", "malformed frames and hostile objects", "hostile"),
    Suite("demo", "make demo, from nothing to Succeeded", "demo", pytest=False),
    Suite("bench", "every part of the bench, in small sizes", "bench", ("ARGS=--quick",), False),
    Suite("soak", "three minutes of kills and restarts", "soak", ("MINUTES=3",), False),
    Suite("e2e-kind", "Docker and kind: the demo and the core of e2e", "e2e-kind"),
)

# Targets that run tests and are no suites: the suite of their tests, or why there is none.
NO_SUITE = {
    "integration": "integration-all",
    "e2e": "e2e-all",
    "faults-pairs": "faults",
    "faults-time-travel": "faults",
    "restart-times": "e2e-all measures two restarts; this one measures 30 for docs/design.md",
    "generate": "writes the golden files, which unit compares",
    "pictures": "records for the docs; a person looks at the difference",
}


def suites(pythons: Sequence[str], releases: Sequence[str]) -> tuple[Suite, ...]:
    """All suites, with one for each version of Python and release of Kubernetes."""
    matrix = [
        *(
            Suite(f"matrix-python-{version}", "unit and integration", f"matrix-python-{version}")
            for version in pythons
        ),
        *(
            Suite(f"matrix-kubernetes-{each}", "integration and a run", f"matrix-kubernetes-{each}")
            for each in releases
        ),
    ]
    return (*FAST, *SIMULATED, *CLUSTERS, *matrix)


ACCEPTED = (
    Accepted("unit", "*", "takes minutes: run with --long", "runs in unit-long"),
    Accepted(
        "matrix-*",
        "*",
        "takes minutes: run with --long",
        "runs in unit-long, integration-all and ha, on the default versions",
    ),
    *(
        Accepted(suite, test, "TORCHRUN_TEST_TORCH_PYTHON *", "runs in recipes, with real torch")
        for suite in ("unit", "matrix-python-*")
        for test in ("tests.unit.examples.test_gpt*", "tests.unit.runtime.launch.*")
    ),
    Accepted(
        "*",
        "tests.unit.runtime.launch.test_supervise*",
        "*python3.* does not start here",
        "a version of Python that pyenv lists and has not selected; others are tried",
    ),
    Accepted(
        "*",
        "tests.unit.cluster.test_node*",
        "needs the CNI plugins",
        "a program of Debian that e2e installs; every e2e test uses these networks",
    ),
    Accepted(
        "*",
        "tests.unit.plugin.*",
        "kubectl is not installed",
        "no kubectl on PATH; e2e runs the plugin with a kubectl that it builds",
    ),
    Accepted(
        "*",
        "tests.unit.serving.test_server*",
        "this machine has no *",
        "a machine without IPv6, or without an address but localhost",
    ),
    *(
        Accepted(
            "matrix-kubernetes-*",
            "tests.integration.test_gangs*",
            reason,
            "this release does not have the feature",
        )
        for reason in (
            "Kubernetes * schedules no gangs itself",
            "Kubernetes * has no PodGroups",
            "PodGroups of Kubernetes * have no priority",
        )
    ),
    Accepted(
        "matrix-kubernetes-*",
        "tests.integration.test_simulation*",
        "this API server streams no lists",
        "this release does not have the feature",
    ),
    Accepted(
        "e2e-all",
        "tests.e2e.test_sdk_page*",
        "the mission's pages are not beside the checkout",
        "the pages are not in this repository; test_sdk.py has calls of every kind",
    ),
)

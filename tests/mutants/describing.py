"""Bugs in the API types, from which the CRDs are generated."""

from functools import partial

from mutants.mutant import Mutant

API = partial(Mutant, package="torchrun_api")
_TESTS = "tests/unit/api"
QUANTITY = (f"{_TESTS}/test_quantity.py",)
NAMES = (f"{_TESTS}/test_names.py",)
CRD = (f"{_TESTS}/test_crd.py",)

DESCRIBING = (
    API(
        "cores-are-rounded-down",
        "quantity.py",
        "millicores = ceil(cores * 1000)",
        "millicores = int(cores * 1000)",
        "a job gets less than it asked for",
        QUANTITY,
    ),
    API(
        "bytes-are-rounded-down",
        "quantity.py",
        "whole = ceil(amount)",
        "whole = int(amount)",
        "the same, of memory",
        QUANTITY,
    ),
    API(
        "amounts-without-end",
        "quantity.py",
        "if amount > _LARGEST:",
        "if amount < 0:",
        "a quota of 1e30 is capped by the API server in silence",
        QUANTITY,
    ),
    API(
        "kilo-is-kibi",
        "quantity.py",
        '"k": 3,',
        '"k": 4,',
        "64k is 640,000 bytes",
        QUANTITY,
    ),
    API(
        "rules-do-not-reach-the-crd",
        "structural.py",
        'if defaults and (rules := validations(getattr(shape.cls, "RULES", ()))):',
        'if defaults and (rules := validations(getattr(shape.cls, "NO_RULES", ()))):',
        "the API server takes any spec, and the job is stopped later or not at all",
        CRD,
    ),
    API(
        "bounds-do-not-reach-the-crd",
        "structural.py",
        "if (bound := getattr(shape, attribute)) is not None",
        "if (bound := getattr(shape, attribute)) is None",
        "numNodes: -1 is stored",
        CRD,
    ),
    API(
        "required-fields-are-optional",
        "structural.py",
        "    if required:\n",
        "    if False:\n",
        "a job without jobQueue is stored and waits for ever",
        CRD,
    ),
    API(
        "the-core-group-has-a-group",
        "kind.py",
        'root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"',
        'root = f"/apis/{self.api_version}"',
        "no pod is ever found",
        ("tests/unit/cache/test_informer.py", "tests/unit/client/test_apply.py"),
    ),
    API(
        "etcd-without-an-endpoint-is-silent",
        "unsupported.py",
        'return backend if backend in ("etcd", "etcd-v2") and endpoint is None else None',
        "return None",
        "a rendezvous is not the one that was asked for, and nobody says so",
        (f"{_TESTS}/test_unsupported.py",),
    ),
)

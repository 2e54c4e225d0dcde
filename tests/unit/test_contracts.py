"""Every module of the controller is in a contract of import-linter."""

import tomllib
from pathlib import Path

from pages import ROOT

CONTROLLER = ROOT / "controller"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def package(folder: Path) -> str:
    return ".".join(folder.relative_to(CONTROLLER).parts)


def packages() -> set[str]:
    """Packages with more than one module; a single module needs no order."""
    folders = {path.parent for path in CONTROLLER.rglob("*.py") if path.name != "__init__.py"}
    folders |= {path.parent.parent for path in CONTROLLER.rglob("*/__init__.py")} - {CONTROLLER}
    return {package(f) for f in folders if len([*f.glob("*.py"), *f.glob("*/__init__.py")]) > 2}


def test_every_module_is_in_a_contract():
    """An exhaustive contract fails by itself for a module outside its layers."""
    layered = {
        container
        for contract in CONTRACTS
        if contract["type"] == "layers" and contract.get("exhaustive")
        for container in contract["containers"]
    }
    acyclic = tuple(
        f"{ancestor}."
        for contract in CONTRACTS
        if contract["type"] == "acyclic_siblings"
        for ancestor in contract["ancestors"]
    )
    assert {p for p in packages() if p not in layered and not p.startswith(acyclic)} == set()

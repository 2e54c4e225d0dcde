"""A module, a page and help texts, generated from `contract.launch` and `contract.sync`.

python -m torchrun_api.generate.contract_reference LAUNCHER_MODULE PAGE
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from torchrun_api import names
from torchrun_api.contract import contents, exit_codes, launch, peer_loss, sync
from torchrun_api.contract.variable import LAUNCHER, RANK, SERVE, SYNC, TORCHRUN, USER, Variable

# In the order of their declarations, by the name of the constant.
VARIABLES: dict[str, Variable[str] | Variable[int] | Variable[object]] = {
    name: value
    for module in (launch, sync)
    for name, value in vars(module).items()
    if isinstance(value, Variable)
}

_MODULE = '''"""The contract with the controller and the sync pod: names that both sides know.

Generated from torchrun_api (contract, names, exit_codes, contents, peer_loss) by `make generate`.
"""
'''
_ANNOTATIONS = (
    *("START", "FENCE", "IN_PLACE", "COMPLETE_CHECKPOINTS", "REVISION", "SERVED", "DEVELOPMENT"),
)

_PAGE = """# Environment variables

Your command can read these variables in its pods. The page also lists the variables that torchrun,
the launcher and the other programs of a job read.

| set by | meaning |
|---|---|
| controller | reserved: with it in `spec.env` a job gets `InvalidSpec`. Defaults are not set |
| user | optional: set it in `spec.env` |
| launcher | set for the command and its children only. Reserved as well, unless users set it |
| tests | not set in a cluster |

The SDK reads [other variables](../sdk/README.md#variables) on your machine, and the controller has
[settings](settings.md).

torchrun sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` of each rank, among others.
With `launcher: none` they are not set. The launcher also puts a directory at the front of
`PYTHONPATH`, for reports of exceptions. It sets `PYTHONUNBUFFERED`, `PYTHONFAULTHANDLER` and
`SPT_NOENV` to 1 unless the pod has them.

`make generate` writes this page from `api/torchrun_api/contract/launch.py` and `sync.py`.

"""
_SECTIONS = (
    ("Training pods", (LAUNCHER, TORCHRUN, USER)),
    ("Ranks", (RANK,)),
    ("Sync pods", (SYNC,)),
    ("Serve pods", (SERVE,)),
)


def usage(reader: str) -> str:
    """The variables that a program reads, for its help text; one line each."""
    return "\n".join(
        f"  {variable.name} ({variable.default})  {variable.meaning}"
        for variable in VARIABLES.values()
        if reader in variable.read_by
    )


def launcher_module() -> str:
    """Source of the launcher's module: a constant for each name, and the defaults."""
    generated = {
        constant: variable
        for constant, variable in VARIABLES.items()
        if LAUNCHER in (*variable.set_by, *variable.read_by)
    }
    lines = [_MODULE]
    for constant, variable in generated.items():
        lines.append(f'{constant} = "{variable.name}"  # {variable.type.name}')
    lines += [
        "",
        "# For variables that are not set; the others default to the empty string.",
        "DEFAULTS = {",
    ]
    lines += [f'    {c}: "{v.default}",' for c, v in generated.items() if v.default]
    lines += ["}", "", "# Annotations of the worker, in the file that START_FILE names."]
    lines += [f'{name}_ANNOTATION = "{getattr(names, name)}"' for name in _ANNOTATIONS]
    lines += ["", "# Exit codes of the container."]
    lines += [f"{name} = {getattr(exit_codes, name)}" for name in exit_codes.LAUNCHER_CONSTANTS]
    lines += ["", "# Of a workspace: its marker, and the most bytes that its manifest may have."]
    lines += [f'MARKER = "{contents.MARKER}"', f"LARGEST_MANIFEST = {contents.LARGEST_TEXT}"]
    lines += ["", "# What follows PROGRESS_URL.", f'PROGRESS_PATH = "{launch.PROGRESS_PATH}"']
    lines += ["", "# Of the message of a rank that lost its peer, without regard to case."]
    lines += ["PEER_LOSS = (", *(f'    r"{text}",' for text in peer_loss.PEER_LOSS), ")"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The reference as Markdown."""
    return _PAGE + "\n".join(_sections())


def _sections() -> Iterator[str]:
    listed: set[str] = set()
    for title, readers in _SECTIONS:
        rows = [
            _row(variable)
            for variable in VARIABLES.values()
            if variable.name not in listed and set(readers) & {*variable.read_by}
        ]
        listed |= {v.name for v in VARIABLES.values() if set(readers) & {*v.read_by}}
        head = "| variable | type | set by | read by | meaning (default) |\n|---|---|---|---|---|\n"
        yield f"## {title}\n\n{head}" + "".join(rows)


def _row(variable: Variable[str] | Variable[int] | Variable[object]) -> str:
    meaning = variable.meaning.replace("|", "\\|")
    default = f" (`{variable.default}`)" if variable.default else ""
    cells = (
        f"`{variable.name}`",
        variable.type.name,
        ", ".join(variable.set_by),
        ", ".join(variable.read_by),
        meaning + default,
    )
    return f"| {' | '.join(cells)} |\n"


def main(module: str, page_file: str) -> None:
    """Write both files."""
    Path(module).write_text(launcher_module(), encoding="utf-8")
    Path(page_file).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One seeded bug: a small change of the code, and the tests that should detect it."""

from pathlib import Path

from msgspec import Struct

CHECKOUT = Path(__file__).parents[2]
CONTROLLER = "torchrun_controller"
# The folder of each package in the checkout.
PACKAGES = {
    "torchrun_api": "api",
    CONTROLLER: "controller",
    "torchrun_runtime": "runtime",
    "kubectl_torchrun": "plugin",
    "torchrun_sdk": "sdk",
}


class DoesNotApplyError(Exception):
    """The code that a mutant changes does not occur exactly once."""


class Mutant(Struct, frozen=True):
    """`old` in `file` becomes `new`. `harm`: the effect for a user.

    `file` is relative to its package, `tests` are run in their order, the fastest first.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]
    package: str = CONTROLLER

    @property
    def origin(self) -> Path:
        """The file in the checkout."""
        return CHECKOUT / PACKAGES[self.package] / self.package / self.file

    def mutated(self) -> str:
        """The text of the file with the bug. Raises DoesNotApplyError."""
        text = self.origin.read_text()
        if (occurrences := text.count(self.old)) != 1:
            message = f"{self.name}: {self.file} has {occurrences} times, not once: {self.old!r}"
            raise DoesNotApplyError(message)
        return text.replace(self.old, self.new)

    def plant(self, root: Path) -> None:
        """Write the bug into copies of the packages. Raises DoesNotApplyError."""
        (root / self.package / self.file).write_text(self.mutated())

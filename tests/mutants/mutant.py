"""One seeded bug: a change of a few words in the controller, and the tests that should notice it."""

from pathlib import Path

from msgspec import Struct

CHECKOUT = Path(__file__).parents[2]
PACKAGE = "torchrun_controller"
SOURCE = CHECKOUT / "controller" / PACKAGE


class DoesNotApplyError(Exception):
    """The code that a mutant changes is not there any more, or is there more than once."""


class Mutant(Struct, frozen=True):
    """`old` of `file` (relative to the package) becomes `new`; `harm` is what a user would see.

    `tests` are run in their order, the fastest first.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]

    def mutated(self, package: Path = SOURCE) -> str:
        """The file's text with the bug. Raises DoesNotApplyError."""
        text = (package / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            message = f"{self.name}: {self.file} has {found} times, not once: {self.old!r}"
            raise DoesNotApplyError(message)
        return text.replace(self.old, self.new)

    def plant(self, package: Path) -> None:
        """Write the bug into a copy of the package. Raises DoesNotApplyError."""
        mutated = self.mutated(package)
        (package / self.file).write_text(mutated)

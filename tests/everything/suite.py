"""A suite: one make target and its variables."""

from msgspec import Struct


class Suite(Struct, frozen=True):
    """`about` is for people. `pytest`: whether the target runs pytest, which then writes JUnit files."""

    name: str
    about: str
    target: str
    variables: tuple[str, ...] = ()
    pytest: bool = True

    @property
    def command(self) -> list[str]:
        """Goes on with the other prerequisites of a target after one has failed."""
        return ["make", "--keep-going", "--no-print-directory", self.target, *self.variables]


class Accepted(Struct, frozen=True):
    """Skips that are accepted, as patterns of fnmatch, and why.

    `test` is compared with the id in a JUnit file: `tests.unit.sdk.test_gang::test_two_nodes[a]`.
    """

    suite: str
    test: str
    reason: str
    why: str

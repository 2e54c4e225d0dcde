"""Time that passes at once while somebody sleeps, in place of the module `time`."""


class Clock:
    """`now`: seconds of the monotonic clock."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

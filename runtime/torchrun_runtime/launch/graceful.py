"""The end of a command by a signal, or by agreement: first the ranks, then what started them."""

from __future__ import annotations

import os
import signal
import time
from typing import Callable

from .output import say
from .processes import (
    Process,
    agents,
    alive,
    catches,
    descendants,
    foremost,
    foremost_orphans,
    handles,
    programs,
    send,
    signal_name,
    trapping,
)

# Grace period of torchrun after its ranks have ended. After a stop by agreement, it first has the
# same time to end by itself: it waits for the torchrun of the node whose ranks end last.
_AGENT_SECONDS = 10.0


class GracefulStop:
    """Signal the ranks, which may write a checkpoint; end the other processes after them.

    torchrun kills its ranks 30 s after it gets SIGTERM; old releases cannot change that. Therefore
    it gets its signal last. torchrun also terminates all ranks if one of them dies of the signal
    while another still saves. Therefore it is halted (SIGSTOP) for that time, so that neither a
    second SIGTERM nor a SIGKILL reaches a rank that saves. For the next round, torchrun need not
    end by itself and is killed.

    have_been_told: set if the ranks have agreed to end by themselves, and get no signal: whether
    one of them has got the answer.
    """

    def __init__(
        self,
        number: int,
        grace: float | None,
        *,
        for_next_round: bool = False,
        have_been_told: Callable[[], bool] | None = None,
    ) -> None:
        self.number = number
        self.for_next_round = for_next_round
        self._have_been_told = have_been_told
        self.has_signalled = have_been_told is None
        self._deadline = None if grace is None else time.monotonic() + grace
        tree = descendants(os.getpid())
        self._first = foremost(tree, number)
        self._agents = [] if for_next_round else agents(tree)
        self._halted = False
        self._rest: list[Process] = []
        self._rest_since: float | None = None
        self._ended_at: float | None = None  # the ranks, by agreement
        self._awaits_orphans = False
        if have_been_told is not None:
            return
        if not for_next_round:
            _report_forwarded(number, self._first)
        saving = [process for process in self._first if catches(process, number)]
        if 0 < len(saving) < len(self._first):
            self._halt_agents()
        send(self._first, number)

    def advance(self) -> None:
        """Take the next step if it is due; never blocks."""
        if self._rest_since is None:
            self._await_first()
        elif self._is_late():
            send(descendants(os.getpid()), signal.SIGKILL)
        elif time.monotonic() - self._rest_since > _AGENT_SECONDS:
            self._kill_rest()

    def awaits_orphans(self) -> bool:
        """Whether programs of a command that has ended handle the signal. They get it here first.

        For example, a wrapper dies of the signal, and the program that it has started has not got
        one yet.
        """
        if self.for_next_round or self._have_been_told is not None:
            return False
        if not self._awaits_orphans:
            self._awaits_orphans = True
            orphans = foremost_orphans(descendants(os.getpid()), self.number)
            received = {process.pid for process in (*self._first, *self._rest)}
            self._first, self._rest_since = orphans, None
            missed = [process for process in orphans if process.pid not in received]
            if missed:
                _report_forwarded(self.number, missed)
                send(missed, self.number)
        return any(alive(p) and handles(p, self.number) for p in self._first)

    def _await_first(self) -> None:
        remaining = [process for process in self._first if alive(process)]
        if self._is_late():
            if not self.for_next_round:
                say("the grace period is over: killing the remaining processes")
            send(descendants(os.getpid()), signal.SIGKILL)
        elif remaining:
            if len(remaining) < len(self._first):
                self._halt_agents()
            return
        elif self._have_been_told is not None and self._may_end_alone(self._have_been_told):
            return
        self._rest_since = time.monotonic()
        tree = descendants(os.getpid())
        if self.for_next_round:
            send(tree, signal.SIGKILL)
            return
        shells = [shell for shell in trapping(tree, signal.SIGTERM) if shell not in self._first]
        self._rest = [*programs(tree), *shells]
        send(self._rest, signal.SIGTERM)
        send(self._agents if self._halted else [], signal.SIGCONT)

    def _may_end_alone(self, have_been_told: Callable[[], bool]) -> bool:
        """Whether what started the ranks, which have all ended by themselves, goes on undisturbed.

        Without the answer the ranks had finished before.
        """
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            send(self._agents if self._halted else [], signal.SIGCONT)
        return time.monotonic() - self._ended_at < _AGENT_SECONDS or not have_been_told()

    def _kill_rest(self) -> None:
        """Kill processes that do not end, except shells in their traps and their programs."""
        remaining = descendants(os.getpid())
        shells = trapping(remaining, signal.SIGTERM)
        spared = shells if self._rest else []
        send([p for p in (self._rest if spared else remaining) if p not in spared], signal.SIGKILL)

    def _halt_agents(self) -> None:
        if self._agents and not self._halted:
            self._halted = True
            send(self._agents, signal.SIGSTOP)

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


def _report_forwarded(number: int, processes: list[Process]) -> None:
    names = ", ".join(f"{process.name}[{process.pid}]" for process in processes)
    say(f"forwarded {signal_name(number)} to {names or 'no process'}")

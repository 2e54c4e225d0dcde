"""The agreement of a gang on a call at which all its ranks stop, or save and go on. Pure.

Each rank counts its calls of torchrun_progress.stopping(), one for each step. A node that wants a
stop votes for it, and the leader leads the gang through these states:

    asked      each node votes for the earliest call that none of its ranks makes before the next
               message arrives; an obstacle, such as a rank that makes no calls, refuses the stop
    proposed   of these calls the latest. A node accepts it if none of its ranks has passed it, and
               from then on its ranks wait there. It declines otherwise, and the leader asks again
    committed  once every node has accepted. This never changes: each rank gets the answer there
    refused    the ranks go on, and a node that is asked to end forwards SIGTERM
    done       every rank has passed the call of a save

The leader commits only in a limited time after it has proposed, and a rank waits longer than that,
so that only a node without a connection to the leader can miss a commit. Both sides repeat their
latest message after a new connection. Agreements are numbered, and an answer has the number of its
question, so a late or repeated one does no harm.
"""

from __future__ import annotations

from typing import Collection, Mapping, NamedTuple, TypeVar, get_type_hints

from .messages import InvalidMessageError, decode, encode

ASKED, PROPOSED, COMMITTED, REFUSED, DONE = "asked", "proposed", "committed", "refused", "done"
_STATES = (ASKED, PROPOSED, COMMITTED, REFUSED, DONE)
STOP, SAVE = "stop", "save"
ACCEPTS, DECLINES, REACHED = "accepts", "declines", "reached"
# How long after a proposal the leader may commit it.
PROPOSAL_SECONDS = 5.0  # less than a rank waits: rank._torchrun_stopping.WAIT_SECONDS
# The parts of the grace period after which the leader commits no more, and after which a node
# forwards SIGTERM. The difference is for the messages.
_COMMIT_PART, HOLD_PART = 0.4, 0.5
_SAVE_SECONDS = 60.0  # to agree on a save
# How long the messages may take until the ranks see a proposal. Doubled for each further question.
_FIRST_MARGIN, _LONGEST_MARGIN = 0.25, 4.0


class Agreement(NamedTuple):
    """What the leader tells all nodes.

    number: of the question, larger for each. call: at which the ranks get the answer, from 1.
    seconds: left for the ranks at the time of the commit of a stop. margin: seconds for messages.
    why: of a refusal.
    """

    round: int
    number: int
    kind: str
    state: str
    call: int = 0
    seconds: float = 0.0
    margin: float = 0.0
    why: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the leader has yet to decide."""
        return self.state in (ASKED, PROPOSED)


class Vote(NamedTuple):
    """What a node tells the leader.

    wants: STOP, SAVE or "". seconds: its ranks have left, for a stop. after: the number of the
    newest agreement that it knew when a save was asked for. number: of the agreement that the rest
    answers: an obstacle, or the earliest call that none of its ranks makes within the margin, the
    seconds until then, and those of a step; verdict: on the proposal, or REACHED.
    """

    round: int
    wants: str = ""
    seconds: float = 0.0
    after: int = 0
    number: int = 0
    obstacle: str = ""
    earliest: int = 0
    expected: float = 0.0
    step: float = 0.0
    verdict: str = ""


class Agreements:
    """The present agreement of a gang of this size, as its leader decides it."""

    def __init__(self, size: int) -> None:
        self.present: Agreement | None = None
        self._size = size
        self._round = -1
        self._number = 0
        self._votes: dict[int, Vote] = {}
        self._since = 0.0  # when the present state began
        self._save_limit = self._stop_limit = self._end = float("inf")

    @property
    def ends_gang(self) -> bool:
        """Whether all ranks stop."""
        present = self.present
        return present is not None and (present.kind, present.state) == (STOP, COMMITTED)

    def begin(self, number: int) -> None:
        """Forget everything: the ranks of another round start, and count from the beginning."""
        self.present, self._round, self._votes = None, number, {}
        self._stop_limit = self._end = float("inf")

    def receive(self, index: int, vote: Vote, now: float) -> None:
        """Note the vote of a node, which is connected."""
        if vote.round != self._round:
            return
        self._votes[index] = vote
        if vote.wants == STOP:
            # A vote may be repeated later, when less is left.
            self._stop_limit = min(self._stop_limit, now + vote.seconds * _COMMIT_PART)
            self._end = min(self._end, now + vote.seconds)

    def decide(self, lost: Collection[int], obstacle: str, now: float) -> None:
        """Decide again. lost: nodes without a connection. obstacle: why ranks do not all run."""
        while (following := self._next(lost, obstacle, now)) != self.present:
            self.present, self._since = following, now

    def _next(self, lost: Collection[int], obstacle: str, now: float) -> Agreement | None:
        present, wanted = self.present, self._wanted()
        if present is None or present.state in (REFUSED, DONE):
            is_final = present is not None and present.kind == STOP
            return self._ask(wanted, now) if wanted and not is_final else present
        if present.state == COMMITTED:
            is_done = present.kind == SAVE and self._all(present, REACHED)
            return present._replace(state=DONE) if is_done else present
        if obstacle:
            return _refuse(present, obstacle)
        if present.kind == SAVE and wanted == STOP:
            return self._ask(STOP, now)
        if now >= (self._stop_limit if present.kind == STOP else self._save_limit):
            missing = f"node {min(lost)} has no connection" if lost else "the answers took too long"
            return _refuse(present, missing)
        if present.state == ASKED:
            return self._propose(present, lost, now)
        return self._commit(present, lost, now)

    def _wanted(self) -> str:
        """The kind of agreement that nodes want, and that the present one does not give them."""
        votes = self._votes.values()
        if any(vote.wants == STOP for vote in votes):
            return STOP
        is_new = any(vote.wants == SAVE and vote.after >= self._number for vote in votes)
        return SAVE if is_new else ""

    def _ask(self, kind: str, now: float, margin: float = 0.0) -> Agreement:
        if self.present is None or not self.present.is_open:
            self._save_limit = now + _SAVE_SECONDS
        self._number += 1
        return Agreement(self._round, self._number, kind, ASKED, margin=margin or _FIRST_MARGIN)

    def _propose(self, asked: Agreement, lost: Collection[int], now: float) -> Agreement:
        votes = self._answers(asked)
        for index, vote in sorted(votes.items()):
            if vote.obstacle:
                return _refuse(asked, f"node {index}: {vote.obstacle}")
        if lost or len(votes) < self._size:
            return asked
        call = max(vote.earliest for vote in votes.values())
        wait = max(v.expected + (call - v.earliest) * v.step for v in votes.values())
        if asked.kind == STOP and wait > (self._end - now) * HOLD_PART:
            return _refuse(asked, f"the ranks need {wait:.0f} s for their present step")
        return asked._replace(state=PROPOSED, call=call)

    def _commit(self, proposed: Agreement, lost: Collection[int], now: float) -> Agreement:
        verdicts = [vote.verdict for vote in self._answers(proposed).values()]
        if DECLINES in verdicts or now - self._since >= PROPOSAL_SECONDS:
            margin = min(proposed.margin * 2, _LONGEST_MARGIN)
            return self._ask(proposed.kind, now, margin)
        if lost or not self._all(proposed, ACCEPTS):
            return proposed
        seconds = self._end - now if proposed.kind == STOP else 0.0
        return proposed._replace(state=COMMITTED, seconds=seconds)

    def _all(self, agreement: Agreement, verdict: str) -> bool:
        verdicts = [vote.verdict for vote in self._answers(agreement).values()]
        return verdicts.count(verdict) == self._size

    def _answers(self, agreement: Agreement) -> Mapping[int, Vote]:
        return {i: vote for i, vote in self._votes.items() if vote.number == agreement.number}


def _refuse(agreement: Agreement, why: str) -> Agreement:
    return agreement._replace(state=REFUSED, why=why)


def encode_agreement(agreement: Agreement) -> bytes:
    """The line of an agreement."""
    return encode({"agreement": agreement._asdict()})


def decode_agreement(line: bytes) -> Agreement | None:
    """The agreement in a line; None for another message. Raises InvalidMessageError."""
    agreement = _read(Agreement, "agreement", line)
    if agreement and not (agreement.kind in (STOP, SAVE) and agreement.state in _STATES):
        raise InvalidMessageError(f"not an agreement: {line[:80]!r}")
    return agreement


def encode_vote(vote: Vote) -> bytes:
    """The line of a vote."""
    return encode({"vote": vote._asdict()})


def decode_vote(line: bytes) -> Vote | None:
    """The vote in a line; None for another message. Raises InvalidMessageError."""
    return _read(Vote, "vote", line)


_T = TypeVar("_T", Agreement, Vote)


def _read(kind: type[_T], name: str, line: bytes) -> _T | None:
    body = decode(line).get(name)
    if body is None:
        return None
    try:
        return kind(**{field: of(body[field]) for field, of in get_type_hints(kind).items()})
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidMessageError(f"not a {name}: {line[:80]!r}") from error

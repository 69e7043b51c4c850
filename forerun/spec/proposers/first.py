"""Proposers that work together: each request gets the first draft that is not empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.models.paged import new_memory
from forerun.spec.proposer import Constraint, Draft, DraftInputs, Grant, KnownRows, Proposer, RequestDraft
from forerun.spec.stats import Stopwatch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.attention.slots import SlotBatch
    from forerun.engine.plan import Hidden, Plan
    from forerun.engine.slots import Slots
    from forerun.memory.groups import GroupSpec
    from forerun.models.decoder import Tap
    from forerun.request import Request
    from forerun.spec.verifier import Verdict


@dataclass(frozen=True, slots=True)
class Member:
    """A proposer, the method that a request may name to have it, and the bounds of its drafts: longer ones are cut
    before they are made, shorter ones are dropped."""

    proposer: Proposer
    method: str
    max_tokens: int
    min_tokens: int = 0


class FirstOf(Proposer):
    """Asks its members in order, each for the requests that have no draft yet. Without members: plain decoding.

    A request's own choice (`Request.draft_methods`) leaves members out for it. What a constraint rules out is cut from
    each draft before it is judged: it costs no row, and does not count as drafted.
    """

    def __init__(self, members: Sequence[Member] = (), constraint: Constraint | None = None) -> None:
        self.members = members
        self.constraint = constraint
        self.name = ", ".join(member.proposer.name for member in members)
        self._clocks = {member.proposer.name: Stopwatch() for member in members}
        self.notes = [note for member in members for note in member.proposer.notes]
        self.hidden_taps = tuple(dict.fromkeys(tap for member in members for tap in member.proposer.hidden_taps))

    @property
    def own_groups(self) -> list[GroupSpec]:
        """The members' cache groups with blocks of their own, in the order of the places that `attach_all` gives."""
        return [group for group in self._groups() if not group.beside_target]

    @property
    def groups_beside(self) -> list[GroupSpec]:
        """Those that lie beside the target's blocks."""
        return [group for group in self._groups() if group.beside_target]

    def _groups(self) -> list[GroupSpec]:
        return [member.proposer.group for member in self.members if member.proposer.group is not None]

    def attach_all(self, memory: Tensor, num_target_blocks: int) -> None:
        """Give the members with a group their places among a request's caches, the target's being the first, and their
        memory: `memory`, the pool's, or what lies beside the target's blocks."""
        place = 0
        for proposer in (member.proposer for member in self.members):
            if proposer.group is None:
                continue
            if proposer.group.beside_target:
                proposer.attach(0, new_memory(num_target_blocks * proposer.group.block_bytes, memory.device))
            else:
                place += 1
                proposer.attach(place, memory)

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        draft = Draft()
        for member in self.members:
            own = self._grant_of(member, grant, draft)
            if not own.requests and not own.filling:
                continue
            with self._clocks[member.proposer.name]:
                found = member.proposer.propose(DraftInputs(own.requests, inputs.target), own)
            draft.filled |= found.filled
            for request in own.requests:
                guess = self._allowed(request, found.of(request.request_id))
                if guess.tokens and len(guess) >= member.min_tokens:
                    draft.by_request[request.request_id] = guess
        return draft

    @property
    def serves_slots(self) -> bool:  # type: ignore[override]
        """Of several members the later ones would have to know what the first has found."""
        return all(member.proposer.serves_slots and not member.min_tokens for member in self.members[:1]) and (
            len(self.members) <= 1
        )

    def attach_slots(self, slots: Slots, shapes: Sequence[tuple[int, int]]) -> None:
        for member in self.members:
            member.proposer.attach_slots(slots, shapes)

    def draft_slots(self, slots: Slots, grant: Grant) -> Draft:
        for member in self.members:
            with self._clocks[member.proposer.name]:
                return member.proposer.draft_slots(slots, self._grant_of(member, grant, Draft()))
        return Draft()

    def follow_slots(self, batch: SlotBatch, positions: Tensor, verdict: Tensor, taps: Mapping[Tap, Tensor]) -> None:
        for member in self.members:
            with self._clocks[member.proposer.name]:
                member.proposer.follow_slots(batch, positions, verdict, taps)

    def follow_known(self, rows: KnownRows, verdict: Tensor | None, taps: Mapping[Tap, Tensor]) -> None:
        for member in self.members:
            with self._clocks[member.proposer.name]:
                member.proposer.follow_known(rows, verdict, taps)

    def _allowed(self, request: Request, guess: RequestDraft) -> RequestDraft:
        if self.constraint is None or not guess.tokens or not self.constraint.constrains(request):
            return guess
        return self.constraint.cut(request, guess)

    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        for member in self.members:
            with self._clocks[member.proposer.name]:
                member.proposer.observe(plan, verdict, hidden)

    def forget(self, request_id: str) -> None:
        for member in self.members:
            member.proposer.forget(request_id)

    @property
    def times_s(self) -> dict[str, float]:
        return {name: clock.total_s for name, clock in self._clocks.items()}

    @property
    def state_bytes(self) -> int:
        return sum(member.proposer.state_bytes for member in self.members)

    @staticmethod
    def _grant_of(member: Member, grant: Grant, draft: Draft) -> Grant:
        """What of the step's grant is left for a member."""
        without = [r for r in grant.requests if r.request_id not in draft.by_request]
        requests = [r for r in without if r.may_draft_with(member.method)]
        lengths = {r.request_id: min(grant.lengths[r.request_id], member.max_tokens) for r in requests}
        return Grant(requests, lengths, [r for r in grant.filling if r.may_draft_with(member.method)])

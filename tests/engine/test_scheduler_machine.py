"""The scheduler, driven by hypothesis: arrivals, drafts of any length, rejections, stops, aborts, too few blocks, and
plans that are made while one is in flight."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forerun.engine.cache import CachePool, GroupSpec
from forerun.engine.plan import Plan
from forerun.engine.scheduler import Scheduler
from forerun.request import FinishReason, Request, SamplingParams
from forerun.spec.proposer import UNKNOWN, Draft, RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict

BLOCK_SIZE = 4


class SchedulerMachine(RuleBasedStateMachine):
    """Plays proposer, target and verifier. Every request must end with exactly the tokens that its target wrote."""

    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, prefix_caching: bool) -> None:
        self.released: list[str] = []
        self.scheduler = Scheduler(
            CachePool([GroupSpec("target", 16)], 16 * num_blocks),
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=prefix_caching,
            on_release=self.released.append,
        )
        self.capacity = num_blocks * BLOCK_SIZE
        self.requests: dict[str, Request] = {}
        self.in_flight: Plan | None = None

    @staticmethod
    def target_token(request: Request, position: int) -> int:
        """The text of every request is fixed: a drafted token is right if it is this one."""
        return (request.seed * 7 + position * position) % 5

    @rule(num_prompt=st.integers(1, 20), max_tokens=st.integers(1, 12), seed=st.integers(0, 3), twin=st.booleans())
    def arrive(self, num_prompt: int, max_tokens: int, seed: int, twin: bool) -> None:
        request_id = f"r{len(self.requests)}"
        prompt = [1] * num_prompt if twin else [(seed + i) % 5 for i in range(num_prompt)]
        request = Request(
            request_id,
            prompt,
            num_prompt,
            SamplingParams(max_tokens=max_tokens),
            seed,
            max_tokens=min(max_tokens, self.capacity - num_prompt),
            arrival=len(self.requests),
        )
        self.requests[request_id] = request
        self.scheduler.add(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            was_there = any(r.request_id == request_id for r in (*self.scheduler.running, *self.scheduler.waiting))
            gone = self.scheduler.abort([request_id, "unknown"])
            assert [r.request_id for r in gone] == ([request_id] if was_there else [])

    @rule(data=st.data(), wanted=st.integers(0, 6), ahead=st.booleans())
    def step(self, data: st.DataObject, wanted: int, ahead: bool) -> None:
        """Launch a plan. `ahead`: with one in flight where that can be, and it stays in flight itself."""
        scheduler = self.scheduler
        if self.in_flight is not None and not (ahead and scheduler.can_run_ahead()):
            self._land(data)
        before, self.in_flight = self.in_flight, None
        running = list(scheduler.running)
        grant = scheduler.reserve({r.request_id: wanted for r in scheduler.decoding})
        assert all(0 < length <= wanted for length in grant.lengths.values())
        draft = Draft({r.request_id: self._draft(data, r, wanted) for r in grant.requests})
        plan = scheduler.schedule(draft)
        scheduler.check_integrity()
        assert plan.num_rows <= scheduler.max_num_batched_tokens
        if before is None:
            assert plan.num_rows > 0 or not scheduler.has_work, "work is there, but nothing was scheduled"
        else:
            assert scheduler.running[: len(running)] == running, "somebody was preempted while a step was in flight"
        ids = [s.request.request_id for s in plan.scheduled]
        assert len(set(ids)) == len(ids) <= scheduler.max_num_seqs
        for s in plan.scheduled:
            assert s.start == (s.request.most_tokens - 1 if s.request.decoding else s.request.num_computed_tokens)
            assert s.request.most_tokens + len(s.draft) < s.request.num_prompt_tokens + s.request.max_tokens
            assert len(s.draft) <= grant.lengths.get(s.request.request_id, 0)
            assert s.start + s.num_rows <= len(s.request.caches[0].blocks) * BLOCK_SIZE, "a row has no slot"
        scheduler.advance(plan)
        if before is not None:
            self.in_flight = before
            self._land(data)
        self.in_flight = plan
        if not ahead:
            self._land(data)

    def _land(self, data: st.DataObject | None) -> None:
        """Commit the plan in flight."""
        assert self.in_flight is not None
        plan, self.in_flight = self.in_flight.still_running(), None
        samples = [s for s in plan.scheduled if s.samples]
        self.scheduler.commit(
            plan, Verdict({s.request.request_id: self._verify(data, s.request, s.draft) for s in samples})
        )

    def _draft(self, data: st.DataObject, request: Request, wanted: int) -> RequestDraft:
        if request.num_in_flight:  # where it will stand nobody knows yet
            return RequestDraft([UNKNOWN] * (wanted + 2))
        right = data.draw(st.integers(0, wanted + 2))
        tokens = [self.target_token(request, request.num_output_tokens + i) for i in range(wanted + 2)]  # overlong
        return RequestDraft([t if i < right else (t + 1) % 5 for i, t in enumerate(tokens)])

    def _verify(self, data: st.DataObject | None, request: Request, draft: RequestDraft) -> RequestVerdict:
        position = request.num_output_tokens
        accepted = 0
        if draft.tokens and draft.tokens[0] == UNKNOWN:
            accepted = data.draw(st.integers(0, len(draft))) if data else 0
        while accepted < len(draft) and draft.tokens[accepted] == self.target_token(request, position + accepted):
            accepted += 1
        tokens = [self.target_token(request, position + i) for i in range(accepted + 1)]
        verdict = RequestVerdict(list(range(accepted)), tokens, len(draft))
        if data is not None and data.draw(st.integers(0, 9)) == 0:  # a stop somewhere in the accepted run
            kept = data.draw(st.integers(1, len(tokens)))
            verdict.token_ids, verdict.accepted = tokens[:kept], verdict.accepted[:kept]
            verdict.finish_reason = FinishReason.STOP
        elif position + len(tokens) >= request.max_tokens:
            verdict.finish_reason = FinishReason.LENGTH
        return verdict

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for request in self.requests.values():
            assert request.num_output_tokens <= request.max_tokens
            assert request.output_token_ids == [self.target_token(request, i) for i in range(request.num_output_tokens)]

    def teardown(self) -> None:
        """Left alone, everything finishes, and all blocks come back."""
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self._land(None)
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.scheduler.reserve({})
            self.in_flight = self.scheduler.schedule(Draft())
            self.scheduler.advance(self.in_flight)
            self._land(None)
        assert not self.scheduler.has_work, "requests hang"
        assert self.scheduler.target.num_used == 0
        self.scheduler.check_integrity()


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase

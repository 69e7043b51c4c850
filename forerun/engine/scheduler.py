"""Who runs in a step, with how many tokens, on which blocks. Ints only: thousands of schedules a second, no torch.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens, and a step closes the
gap; drafted tokens are known tokens on trial. When blocks run out, the request that arrived last gives its own back
and starts again from its known tokens (preemption by recompute).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from forerun.engine.cache import BlockHash, CacheGroup, CachePool, hash_block
from forerun.engine.plan import Grant, Plan, ScheduledRequest
from forerun.request import FinishReason, Request
from forerun.spec.proposer import EMPTY_DRAFT, Draft, RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict


def _ignore(request_id: str) -> None:
    pass


def share_evenly(wanted: Sequence[int], total: int) -> list[int]:
    """What each gets of `total`: all that it wants where that goes, else nobody more than another who wants it too."""
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    for served, place in enumerate(order):
        shares[place] = min(wanted[place], total // (len(wanted) - served))
        total -= shares[place]
    return shares


class Scheduler:
    """Owns the requests and the blocks that they hold.

    Args:
        pool: the cache memory; its first group is the target's.
        block_size: tokens a block.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most rows in one step, drafted ones included.
        enable_prefix_caching: let prompts share full blocks.
        on_release: told the id of each request whose blocks are taken away: finished, aborted or preempted.
    """

    def __init__(
        self,
        pool: CachePool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        on_release: Callable[[str], None] = _ignore,
    ) -> None:
        self.pool = pool
        self.target: CacheGroup = pool.groups[0]
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.on_release = on_release
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of admitted requests
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0
        self._grant = Grant()  # this step's
        self._preempted = False  # in this step: nobody new is admitted
        self._hashes: dict[str, list[BlockHash]] = {}  # of the full blocks of each request's known tokens

    # -- requests come and go

    def add(self, request: Request) -> None:
        request.block_tables = [[] for _ in self.pool.groups]
        self._hashes[request.request_id] = []
        self.waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Forget these requests and free their blocks at once; unknown ids are ignored."""
        ids = set(request_ids)
        gone = [r for r in (*self.running, *self.waiting) if r.request_id in ids]
        for request in gone:
            self._remove(request)
        return gone

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def decoding(self) -> list[Request]:
        """Requests whose prompt is computed: each has one known token left to compute and may draft."""
        return [r for r in self.running if r.decoding]

    # -- the three calls of a step

    def reserve(self, lengths: Mapping[str, int]) -> Grant:
        """Blocks for one token of every decoding request, preempting where they run out, and how far each may draft.

        A draft takes no blocks of the target before it is made, and never preempts.

        Args:
            lengths: how far each request may draft, at most; of requests that are not decoding it is ignored.
        """
        self._preempted = False
        for request in self.decoding:
            if request in self.running:  # not preempted meanwhile
                self._make_room(request, request.num_tokens)
        decoding = self.decoding
        budget = self._draft_budget(len(decoding))
        grant = Grant()
        for request in decoding:
            room = self._room(request) + self.target.num_available * self.block_size
            length = min(lengths.get(request.request_id, 0), request.remaining_tokens - 1, budget, room)
            if length > 0:
                grant.requests.append(request)
                grant.lengths[request.request_id] = length
        self._grant = grant
        return grant

    def schedule(self, draft: Draft) -> Plan:
        """Which tokens this step computes: decoding requests first, then prompts under way, then new ones."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        decoding = self.decoding
        prefilling = [r for r in self.running if r.num_computed_tokens < r.num_tokens - 1]
        for request, request_draft in self._fit_drafts(decoding[:budget], draft):
            plan.scheduled.append(
                ScheduledRequest(request, request.num_computed_tokens, 1, request_draft, samples=True)
            )
            budget -= 1 + len(request_draft)
        for request in prefilling:
            if budget and request in self.running:
                budget -= self._schedule_chunk(plan, request, budget)
        while budget and self.waiting and len(self.running) < self.max_num_seqs and not self._preempted:
            request = self.waiting[0]
            if not self._admit(request):
                break
            budget -= self._schedule_chunk(plan, request, budget)
        plan.scheduled = [s for s in plan.scheduled if s.request in self.running]
        return plan

    def commit(self, plan: Plan, verdict: Verdict) -> None:
        """Take over what stands: the one place where requests change. Finished requests give their blocks back."""
        for scheduled in plan.scheduled:
            request = scheduled.request
            request.num_computed_tokens = scheduled.start + scheduled.num_tokens
            if scheduled.samples:
                self._accept(request, verdict.by_request[request.request_id])
            if request.finish_reason is not FinishReason.ERROR:  # what failed is not worth finding again
                self._publish(request)
            if request.finish_reason is not None:
                self._remove(request)
            else:
                self._trim(request)

    # -- invariants

    def check_integrity(self) -> None:
        """Blocks and requests agree. For tests."""
        self.pool.check_integrity()
        held: dict[int, int] = {}
        for request in self.running:
            table = request.block_tables[0]
            assert len(table) * self.block_size >= request.num_computed_tokens
            assert request.num_computed_tokens <= request.num_tokens
            assert request.finish_reason is None
            for block in table:
                held[block] = held.get(block, 0) + 1
        assert held == self.target._references
        for request in self.waiting:
            assert not any(request.block_tables)
            assert request.num_computed_tokens == 0
        ids = [r.request_id for r in (*self.running, *self.waiting)]
        assert sorted(ids) == sorted(self._hashes)
        assert len(set(ids)) == len(ids)

    # -- details

    def _accept(self, request: Request, verdict: RequestVerdict) -> None:
        request.last_token_time = time.monotonic()
        request.first_token_time = request.first_token_time or request.last_token_time
        request.token_ids.extend(verdict.token_ids)
        request.num_computed_tokens += len(verdict.accepted)
        request.spec.observe(verdict.num_drafted, len(verdict.accepted))
        request.finish_reason = verdict.finish_reason
        request.stop_reason = verdict.stop_reason

    def _draft_budget(self, num_decoding: int) -> int:
        """Rows left for drafts: prompts that wait for their turn keep half of the step."""
        budget = self.max_num_batched_tokens - num_decoding
        prompts_wait = self.waiting or len(self.running) > num_decoding
        return max(0, budget - self.max_num_batched_tokens // 2 if prompts_wait else budget)

    def _room(self, request: Request) -> int:
        """Drafted tokens that fit into the blocks the request already holds."""
        return len(request.block_tables[0]) * self.block_size - request.num_tokens

    def _fit_drafts(self, decoding: list[Request], draft: Draft) -> list[tuple[Request, RequestDraft]]:
        """Cut drafts to what was granted, to even shares of the rows left, and to the blocks that there are."""
        drafts = [draft.of(r.request_id).cut(self._grant.lengths.get(r.request_id, 0)) for r in decoding]
        shares = share_evenly([len(d) for d in drafts], self._draft_budget(len(decoding)))
        return [(r, d.cut(self._look_ahead(r, n))) for r, d, n in zip(decoding, drafts, shares, strict=True)]

    def _look_ahead(self, request: Request, wanted: int) -> int:
        missing = self._blocks_missing(request, request.num_tokens + wanted)
        blocks = self.target.allocate(min(missing, self.target.num_available))
        request.block_tables[0].extend(blocks or [])
        return min(wanted, self._room(request))

    def _trim(self, request: Request) -> None:
        """Give back the blocks that only a rejected draft needed."""
        needed = -(-max(request.num_computed_tokens, 1) // self.block_size)
        table = request.block_tables[0]
        self.target.free(table[needed:])
        del table[needed:]

    def _blocks_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.block_tables[0]))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` tokens of a running request; False if it had to be preempted itself."""
        missing = self._blocks_missing(request, num_tokens)
        while (blocks := self.target.allocate(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.block_tables[0].extend(blocks)
        return True

    def _schedule_chunk(self, plan: Plan, request: Request, budget: int) -> int:
        start = request.num_computed_tokens
        num_tokens = min(request.num_tokens - start, budget)
        if not self._make_room(request, start + num_tokens):
            return 0
        samples = start + num_tokens == request.num_tokens
        plan.scheduled.append(ScheduledRequest(request, start, num_tokens, EMPTY_DRAFT, samples))
        return num_tokens

    def _admit(self, request: Request) -> bool:
        """Move the first waiting request to the running ones, with the prefix that the cache holds for it."""
        shared = self._cached_prefix(request)
        self.target.share(shared)
        request.block_tables[0].extend(shared)
        if self._blocks_missing(request, request.num_tokens + 1) > self.target.num_available:
            self.target.free(shared)
            request.block_tables[0].clear()
            return False
        self.waiting.popleft()
        request.num_computed_tokens = len(shared) * self.block_size
        if request.num_preemptions == 0:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prompt_tokens += request.num_tokens
            self.prefix_cache_queries += request.num_tokens if self.enable_prefix_caching else 0
            self.prefix_cache_hits += request.num_computed_tokens
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)
        return True

    def _cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest known beginning. The last token is always computed: its row gives the next one."""
        if not self.enable_prefix_caching:
            return []
        blocks: list[int] = []
        num_full = (request.num_tokens - 1) // self.block_size
        for block_hash in self._block_hashes(request, num_full)[:num_full]:
            block = self.target.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _block_hashes(self, request: Request, count: int) -> list[BlockHash]:
        """At least the first `count` hashes of the request's full blocks. Each is computed once."""
        hashes = self._hashes[request.request_id]
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            tokens = request.token_ids[start : start + self.block_size]
            hashes.append(hash_block(hashes[-1] if hashes else None, tokens, request.cache_salt))
        return hashes

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that are full of computed tokens."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        for place in range(request.num_published_blocks, num_full):
            self.target.publish(request.block_tables[0][place], self._block_hashes(request, num_full)[place])
        request.num_published_blocks = max(request.num_published_blocks, num_full)

    def _release(self, request: Request) -> None:
        for group, table in zip(self.pool.groups, request.block_tables, strict=True):
            group.free(table)
            table.clear()
        request.num_computed_tokens = 0
        request.num_published_blocks = 0
        self.on_release(request.request_id)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted = True
        self.waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)
        del self._hashes[request.request_id]

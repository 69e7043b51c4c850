"""Who runs in a step, with how many tokens, on which blocks. Ints only: thousands of schedules a second, no torch.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens, and a step closes the
gap; drafted tokens are known tokens on trial. When blocks run out, proposers' caches are taken back first; then the
request that arrived last gives its own blocks back and starts again from its known tokens (preemption by recompute).

A step may be planned while the one before it is in flight (`advance`d, not `commit`ted): for as many tokens as may come
of that. Nobody is preempted then.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from forerun.engine.cache import BlockHash, CacheGroup, CachePool, hash_block
from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import FinishReason, Request, RequestCache
from forerun.spec.proposer import EMPTY_DRAFT, Draft, Grant, RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict


def _ignore(request_id: str) -> None:
    pass


def _empty(group: CacheGroup, cache: RequestCache) -> None:
    group.free(cache.blocks)
    cache.blocks.clear()
    cache.num_tokens = cache.num_published = 0


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
        scratch_tokens: slots of the target after the known tokens that a proposer writes beside while it drafts.
        hash_look_ahead: tokens after a block that its identity depends on: a draft head's row knows the next token.
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
        scratch_tokens: int = 0,
        hash_look_ahead: int = 0,
        on_release: Callable[[str], None] = _ignore,
    ) -> None:
        self.pool = pool
        self.target: CacheGroup = pool.groups[0]
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.scratch_tokens = scratch_tokens
        self.hash_look_ahead = hash_look_ahead
        self.on_release = on_release
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of admitted requests
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0
        self._grant = Grant()  # this step's
        self._preempted = False  # in this step: nobody new is admitted
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._hashes: dict[str, list[BlockHash]] = {}  # of the full blocks of each request's known tokens

    # -- requests come and go

    def add(self, request: Request) -> None:
        request.caches = [RequestCache() for _ in self.pool.groups]
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

    @property
    def next_requests(self) -> list[Request]:
        """All that may have a part in the next step: those that run, and as many in the queue as there are places."""
        return [*self.running, *itertools.islice(self.waiting, self.max_num_seqs - len(self.running))]

    # -- the calls of a step

    def can_run_ahead(self) -> bool:
        """Whether the next step can be planned before the one in flight is committed: nobody is to be preempted."""
        missing = sum(self._blocks_missing(request, request.most_tokens) for request in self._ready())
        return missing <= self.target.num_available

    def reserve(self, lengths: Mapping[str, int]) -> Grant:
        """Blocks for one token of every decoding request, preempting where they run out, and how far each may draft.

        A draft takes no blocks of the target before it is made, and never preempts. Blocks of the proposers' groups,
        which are written while a draft is made, are set aside here, for requests that may draft and as far as the
        target can spare them.

        Args:
            lengths: how far each running request may draft, at most; proposers may fill their caches along with the
                prompt of one that is not there yet.
        """
        self._preempted = False
        for request in self._ready():
            if self._blocks_missing(request, request.most_tokens) and request in self.running:  # not preempted since
                self._make_room(request, request.most_tokens)
        decoding = self._ready()
        budget = self._draft_budget(len(decoding))
        grant = Grant()
        for request in decoding:
            length = min(lengths.get(request.request_id, 0), request.remaining_tokens - 1, budget)
            if length <= 0:
                continue
            length = min(length, self._room(request) + self.target.num_available * self.block_size)
            if length > 0 and self._reserve_scratch(request, length):
                grant.requests.append(request)
                grant.lengths[request.request_id] = length
        for request in self.running:
            if lengths.get(request.request_id, 0) > 0:
                self._reserve_for_proposers(request, grant.lengths.get(request.request_id, 0))
                if not request.decoding:
                    grant.filling.append(request)
        self._grant = grant
        return grant

    def schedule(self, draft: Draft) -> Plan:
        """Which tokens this step computes: decoding requests first, then prompts under way, then new ones."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        decoding = [r for r in self._ready() if not self._blocks_missing(r, r.most_tokens)]
        if draft.filled:
            for request in self.running:
                for place, cache in enumerate(request.caches):
                    cache.num_tokens = draft.filled.get((place, request.request_id), cache.num_tokens)
        prefilling = [r for r in self.running if not r.decoding]
        for request, request_draft in self._fit_drafts(decoding[:budget], draft):
            plan.scheduled.append(ScheduledRequest(request, request.most_tokens - 1, 1, request_draft, samples=True))
            budget -= 1 + len(request_draft)
        for request in prefilling:
            if budget and request in self.running:
                budget -= self._schedule_chunk(plan, request, budget)
        while budget and self.waiting and len(self.running) < self.max_num_seqs and not self._preempted:
            request = self.waiting[0]
            if not self._admit(request):
                break
            budget -= self._schedule_chunk(plan, request, budget)
        if self._preempted:
            plan.scheduled = [s for s in plan.scheduled if s.request in self.running]
        return plan

    def advance(self, plan: Plan) -> None:
        """The plan is launched: the known tokens in it count as computed, and what may come of it as in flight."""
        for scheduled in plan.scheduled:
            scheduled.request.caches[0].num_tokens += scheduled.num_tokens
            scheduled.request.num_in_flight += scheduled.most_emitted

    def commit(self, plan: Plan, verdict: Verdict) -> None:
        """Take over what stands of a plan: the one place where requests change. Finished requests give their blocks
        back."""
        for scheduled in plan.scheduled:
            request = scheduled.request
            request.num_in_flight -= scheduled.most_emitted
            if scheduled.samples:
                self._accept(request, scheduled.draft, verdict.by_request[request.request_id])
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
        held: list[dict[int, int]] = [{} for _ in self.pool.groups]
        for request in self.running:
            assert request.num_computed_tokens <= request.num_tokens
            assert request.finish_reason is None
            assert request.slot >= 0
            in_flight = request.most_tokens - 1 if request.num_in_flight else 0  # rows that have, or may have, a slot
            assert in_flight <= len(request.caches[0].blocks) * self.block_size
            for group, cache in enumerate(request.caches):
                assert cache.num_published * self.block_size <= cache.num_tokens <= len(cache.blocks) * self.block_size
                for block in cache.blocks:
                    held[group][block] = held[group].get(block, 0) + 1
        assert held == [group._references for group in self.pool.groups]
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        for request in self.waiting:
            assert all(cache == RequestCache() for cache in request.caches)
            assert request.slot < 0
            assert request.num_in_flight == 0
        ids = [r.request_id for r in (*self.running, *self.waiting)]
        assert sorted(ids) == sorted(self._hashes)
        assert len(set(ids)) == len(ids)

    # -- details

    def _ready(self) -> list[Request]:
        """Decoding requests that have a token to compute, whatever comes of what is in flight."""
        return [r for r in self.running if r.decoding and r.remaining_tokens > 0]

    @property
    def _in_flight(self) -> bool:
        return any(request.num_in_flight for request in self.running)

    def _accept(self, request: Request, draft: RequestDraft, verdict: RequestVerdict) -> None:
        request.last_token_time = time.monotonic()
        request.first_token_time = request.first_token_time or request.last_token_time
        num_known = request.num_tokens
        request.token_ids.extend(verdict.token_ids)
        request.caches[0].num_tokens += len(verdict.accepted)
        for group, cache in zip(self.pool.groups[1:], request.caches[1:], strict=True):
            if cache.num_tokens > num_known:  # all that was in flight was counted
                cache.num_tokens -= 1 + len(draft) - len(verdict.token_ids)
            elif group.spec.name == draft.source and cache.blocks:  # not taken back meanwhile
                cache.num_tokens += min(draft.num_cached, len(verdict.accepted))
        request.spec.observe(verdict.num_drafted, len(verdict.accepted), len(verdict.loose))
        request.finish_reason = verdict.finish_reason
        request.stop_reason = verdict.stop_reason

    def _draft_budget(self, num_decoding: int) -> int:
        """Rows left for drafts: prompts that wait for their turn keep half of the step."""
        budget = self.max_num_batched_tokens - num_decoding
        prompts_wait = self.waiting or len(self.running) > num_decoding
        return max(0, budget - self.max_num_batched_tokens // 2 if prompts_wait else budget)

    def _room(self, request: Request) -> int:
        """Drafted tokens that fit into the blocks the request already holds."""
        return len(request.caches[0].blocks) * self.block_size - request.most_tokens

    def _fit_drafts(self, decoding: list[Request], draft: Draft) -> list[tuple[Request, RequestDraft]]:
        """Cut drafts to what was granted, to even shares of the rows left, and to the blocks that there are."""
        drafts = [draft.of(r.request_id).cut(self._grant.lengths.get(r.request_id, 0)) for r in decoding]
        # What was drawn must not decide how a probabilistic draft is cut: its length, which it decides, does not count
        wanted = [
            len(d) if d.probs is None else self._grant.lengths[r.request_id]
            for r, d in zip(decoding, drafts, strict=True)
        ]
        shares = share_evenly(wanted, self._draft_budget(len(decoding)))
        return [(r, d.cut(self._look_ahead(r, n))) for r, d, n in zip(decoding, drafts, shares, strict=True)]

    def _look_ahead(self, request: Request, wanted: int) -> int:
        if missing := self._blocks_missing(request, request.most_tokens + wanted):
            blocks = self.target.allocate(min(missing, self.target.num_available))
            request.caches[0].blocks.extend(blocks or [])
        return min(wanted, self._room(request))

    def _trim(self, request: Request) -> None:
        """Give back the blocks that only a rejected draft needed."""
        in_flight = request.most_tokens - 1 if request.num_in_flight else 0
        for group, cache in zip(self.pool.groups, request.caches, strict=True):
            needed = -(-max(cache.num_tokens, in_flight) // self.block_size)
            if needed < len(cache.blocks):
                group.free(cache.blocks[needed:])
                del cache.blocks[needed:]

    def _reserve_for_proposers(self, request: Request, length: int) -> None:
        """Blocks for the request's known tokens and its draft in each proposer's group, all of them or none."""
        known = request.most_tokens if request.decoding else request.num_computed_tokens
        for place, group in enumerate(self.pool.groups[1:], 1):
            if not request.may_draft_with(group.spec.method):
                continue
            cache = request.caches[place]
            if not cache.blocks:
                cache.blocks.extend(self._share_prefix(request, place))
                cache.num_published = len(cache.blocks)
                cache.num_tokens = len(cache.blocks) * self.block_size
            wanted = min(known + length, group.spec.max_tokens)
            missing = max(0, -(-wanted // self.block_size) - len(cache.blocks))
            if self._can_spare(group, missing):
                cache.blocks.extend(group.allocate(missing) or [])

    def _reserve_scratch(self, request: Request, length: int) -> bool:
        """Slots that a proposer writes beside the target's while it drafts, where the target can spare them."""
        if not self.scratch_tokens:
            return True
        missing = self._blocks_missing(request, request.most_tokens + max(length, self.scratch_tokens))
        if missing and not self._can_spare(self.target, missing):
            return False
        request.caches[0].blocks.extend(self.target.allocate(missing) or [])
        return True

    def _can_spare(self, group: CacheGroup, num_blocks: int) -> bool:
        """Whether the target keeps a block for each running request and what the next one in the queue needs."""
        reserve = len(self.running)
        if self.waiting:
            reserve += -(-(self.waiting[0].num_tokens + 1) // self.block_size)
        chunks = group.num_chunks_taken(num_blocks)
        cost = num_blocks if group is self.target else chunks * self.target.blocks_per_chunk
        return self.target.num_available - cost >= reserve

    def _take_back(self) -> bool:
        """Empty the proposers' caches of the request that arrived last and has any; False where none has."""
        for request in reversed(self.running):
            if any(cache.blocks for cache in request.caches[1:]):
                for group, cache in zip(self.pool.groups[1:], request.caches[1:], strict=True):
                    _empty(group, cache)
                return True
        return False

    def _blocks_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.caches[0].blocks))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` tokens of a running request; False if there are none for it now: it was
        preempted itself, or nobody may be."""
        missing = self._blocks_missing(request, num_tokens)
        while (blocks := self.target.allocate(missing)) is None:
            if self._in_flight:
                return False
            if self._take_back():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.caches[0].blocks.extend(blocks)
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
        """Move the first waiting request to the running ones, with the prefix that the cache holds for it.

        False where there is no room for it, or where more of its prefix is about to be there.
        """
        cache = request.caches[0]
        cache.blocks.extend(self._share_prefix(request, 0))
        if self._is_under_way(request, len(cache.blocks)):
            _empty(self.target, cache)
            return False
        while self._blocks_missing(request, request.num_tokens + 1) > self.target.num_available:
            if self._in_flight or not self._take_back():
                _empty(self.target, cache)
                return False
        self.waiting.popleft()
        request.slot = self._free_slots.pop()
        cache.num_published = len(cache.blocks)
        cache.num_tokens = len(cache.blocks) * self.block_size
        if request.num_preemptions == 0:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prompt_tokens += request.num_tokens
            self.prefix_cache_queries += request.num_tokens if self._reads_prefixes(request) else 0
            self.prefix_cache_hits += request.num_computed_tokens
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)
        return True

    def _share_prefix(self, request: Request, place: int) -> list[int]:
        """Blocks of the longest beginning that a group knows, with a reference on each.

        The last token is always computed: its row gives the next one.
        """
        group = self.pool.groups[place]
        if not self._reads_prefixes(request):
            return []
        blocks: list[int] = []
        num_full = self._num_sharable(request)
        for block_hash in self._block_hashes(request, num_full)[:num_full]:
            block = group.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        group.share(blocks)
        return blocks

    def _reads_prefixes(self, request: Request) -> bool:
        return self.enable_prefix_caching and not request.wants_prompt_logprobs

    def _num_sharable(self, request: Request) -> int:
        """Full blocks of the request's known tokens that it may take over."""
        return (request.num_tokens - max(1, self.hash_look_ahead)) // self.block_size

    def _is_under_way(self, request: Request, place: int) -> bool:
        """Whether a running request computes block `place` of this one's prefix: waiting for it costs a step or few,
        not waiting computes it once more. The n answers to one prompt arrive together, and so meet this."""
        known = self._hashes[request.request_id]
        if place >= self._num_sharable(request) or not self._reads_prefixes(request):
            return False
        running = (self._hashes[r.request_id] for r in self.running if not r.decoding)
        return any(hashes[place : place + 1] == [known[place]] for hashes in running)

    def _block_hashes(self, request: Request, count: int) -> list[BlockHash]:
        """At least the first `count` hashes of the request's full blocks. Each is computed once."""
        hashes = self._hashes[request.request_id]
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            tokens = request.token_ids[start : start + self.block_size + self.hash_look_ahead]
            hashes.append(hash_block(hashes[-1] if hashes else None, tokens, request.cache_salt))
        return hashes

    def _publish(self, request: Request) -> None:
        """Let others find the blocks that are full of computed tokens."""
        if not self.enable_prefix_caching:
            return
        for group, cache in zip(self.pool.groups, request.caches, strict=True):
            num_full = min(cache.num_tokens, request.num_tokens - self.hash_look_ahead) // self.block_size
            for place in range(cache.num_published, num_full):
                group.publish(cache.blocks[place], self._block_hashes(request, num_full)[place])
            cache.num_published = max(cache.num_published, num_full)

    def _release(self, request: Request) -> None:
        for group, cache in zip(self.pool.groups, request.caches, strict=True):
            _empty(group, cache)
        if request.slot >= 0:
            self._free_slots.append(request.slot)
        request.slot, request.num_in_flight = -1, 0
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

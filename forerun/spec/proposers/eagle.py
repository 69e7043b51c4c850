"""EAGLE heads draft: a layer or two that go on from the target's hidden states, as a chain, all at once, or as a tree.

The head's keys and values lie beside the target's, at the target's slots: row i is made of the target's state at
position i and the token after it, both of which are known once the target has judged a step. So `observe` fills the
rows that stand, at every step and for every request, keys and values only, and prompts in chunks, prefixes taken over
and steps without drafts leave no gap. What a draft starts from is the last row, whose state is kept.

    committed      t0 .. t(n-1)   t(n)        the target's states h0 .. h(n-1) are there
    head's row     n - 1                      (t(n), h(n-1)) -> draft 1; its keys and values stand already
                   n, n + 1 ..                (draft j, what row n + j - 2 gave) -> draft j + 1; scratch, filled again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention import AttentionBackend, QueryTile, Segment, StepLayout, lay_out
from forerun.kernels.uploads import upload
from forerun.models.decoder import Tap
from forerun.models.heads.head import Head, HeadOutput
from forerun.models.paged import new_attention
from forerun.spec import tree
from forerun.spec.proposer import UNKNOWN, Draft, DraftInputs, Grant, KnownRows, Proposer, RequestDraft
from forerun.spec.proposers.drafting import Chooser, Job
from forerun.spec.proposers.eagle_slots import SlotHead

if TYPE_CHECKING:
    from forerun.attention.slots import SlotBatch
    from forerun.engine.plan import Hidden, Plan, ScheduledRequest
    from forerun.engine.slots import Slots
    from forerun.memory.groups import GroupSpec
    from forerun.request import Request
    from forerun.spec.spec_tree import SpecTree
    from forerun.spec.verifier import RequestVerdict, Verdict


class EagleProposer(Proposer):
    """Drafts with a head on the target's hidden states.

    Args:
        head: the network.
        group: its cache, beside the target's.
        chooser: from its logits to tokens of a chain.
        block_size: tokens a block.
        kv_dtype: of its keys and values.
        num_slots: most requests at once, see `Request.slot`.
        dtype: of its states.
        spec_tree: how trees grow; None: chains, or all tokens at once where the head has a mask state.
        name: as which the drafts are counted.
        notes: lines for the start-up log.
    """

    def __init__(
        self,
        head: Head,
        group: GroupSpec,
        chooser: Chooser,
        *,
        block_size: int,
        kv_dtype: torch.dtype,
        num_slots: int,
        dtype: torch.dtype,
        spec_tree: SpecTree | None = None,
        name: str = "eagle3",
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.group: GroupSpec = group
        self.notes = notes
        self.hidden_taps = tuple(head.config.taps)
        self.block_size = block_size
        self._head = head
        self._chooser = chooser
        self._kv_dtype = kv_dtype
        self._tree = spec_tree
        # [S, H], by `Request.slot`: of each decoding request's last computed token. All rows of all steps are followed,
        # so that each has one; the last is for padding.
        self._states = torch.zeros(num_slots + 1, head.config.layers.hidden_size, dtype=dtype)

    def attach(self, place: int, memory: Tensor) -> None:
        self._place = place
        layers = self._head.config.layers
        self._attention: AttentionBackend = new_attention(layers, memory, self._kv_dtype, self.block_size)
        self._states = self._states.to(memory.device)

    # -- drafting

    @torch.inference_mode()
    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        jobs = [Job(request, length) for request in grant.requests if (length := self._length(request, grant)) > 0]
        if not jobs:
            return Draft()
        if self._tree is not None:
            return self._draft_trees(jobs, self._tree)
        if self._head.mask_state is not None:
            self._draft_at_once(jobs, self._head.mask_state)
        else:
            self._draft_one_by_one(jobs)
        return Draft({job.request.request_id: job.result(self.name) for job in jobs})

    def _length(self, request: Request, grant: Grant) -> int:
        """How many tokens to draft: what was granted, as far as slots and positions go."""
        room = min(len(self._blocks(request)) * self.block_size, self._head.max_positions)
        if self._tree is not None and room < request.most_tokens - 1 + self.group.scratch_tokens:
            return 0
        return min(grant.lengths[request.request_id], room - request.most_tokens + 2)  # the last token is not fed

    def _draft_one_by_one(self, jobs: Sequence[Job]) -> None:
        output = self._first_rows(jobs)
        active, rows = list(jobs), list(range(len(jobs)))
        while active := self._chooser.choose(active, self._head.logits(output.normed[rows])):
            place = {id(job): row for row, job in enumerate(jobs)}
            states = output.hidden[[place[id(job)] for job in active]]
            segments = [
                Segment(job.tokens[-1:], job.request.num_tokens - 2 + len(job.tokens), self._blocks(job.request))
                for job in active
            ]
            output, jobs, rows = self._forward(segments, states), active, list(range(len(active)))

    def _draft_at_once(self, jobs: Sequence[Job], mask_state: Tensor) -> None:
        mask = self._head.config.mask_token_id
        assert mask is not None
        segments, states = [], []
        for job in jobs:
            known = job.request.token_ids[-1:]
            masks = [mask] * (job.length - 1)
            segments.append(Segment(known + masks, job.request.num_tokens - 2, self._blocks(job.request)))
            states += [self._states[job.request.slot], *([mask_state] * len(masks))]
        self._chooser.choose_all(jobs, self._head.logits(self._forward(segments, torch.stack(states)).normed))

    def _first_rows(self, jobs: Sequence[Job]) -> HeadOutput:
        """The row of each job's last computed token, with the token after it."""
        segments = [
            Segment(job.request.token_ids[-1:], job.request.num_tokens - 2, self._blocks(job.request)) for job in jobs
        ]
        slots = upload([job.request.slot for job in jobs], torch.int64, self._states.device)
        return self._forward(segments, self._states[slots])

    def _forward(self, segments: Sequence[Segment], states: Tensor) -> HeadOutput:
        token_ids = [token for segment in segments for token in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions]
        layout = lay_out(segments, block_size=self.block_size, row_tile=self._attention.row_tile)
        return self._forward_rows(token_ids, states, positions, layout)

    def _forward_rows(
        self, token_ids: list[int], states: Tensor, positions: list[int], layout: StepLayout
    ) -> HeadOutput:
        self._attention.begin(layout)
        return self._head.forward(
            upload(token_ids, torch.int64, states.device),
            states,
            upload(positions, torch.int64, states.device),
            self._attention.attend,
        )

    def _blocks(self, request: Request) -> list[int]:
        return request.caches[self._place].blocks

    # -- trees

    def _draft_trees(self, jobs: Sequence[Job], spec_tree: SpecTree) -> Draft:
        output = self._first_rows(jobs)
        tokens, log_probs = self._best_children(output.normed, spec_tree.top_k)
        trees = [
            GrowingTree(job, tree.plant(best, scores))
            for job, best, scores in zip(jobs, tokens, log_probs, strict=True)
        ]
        for row, growing in enumerate(trees):
            growing.states = [output.hidden[row]] * len(growing.pool.frontier)
        for _ in range(spec_tree.depth):
            self._expand(trees, spec_tree.top_k)
        drafts = {t.job.request.request_id: tree.prune(t.pool, t.job.length, self.name) for t in trees}
        return Draft(drafts)

    def _expand(self, trees: Sequence[GrowingTree], top_k: int) -> None:
        """One pass over the frontiers of all trees, each of whose nodes sees the committed tokens and its ancestors."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tiles: list[QueryTile] = []
        for growing in trees:
            request, blocks = growing.job.request, self._blocks(growing.job.request)
            first = request.num_tokens - 1  # where the scratch begins, and the position of the root's children
            for node in growing.pool.frontier:
                place = first + len(growing.slots)
                growing.slots[node] = blocks[place // self.block_size] * self.block_size + place % self.block_size
                path = [growing.slots[ancestor] for ancestor in growing.pool.path(node)]
                position = first + len(path) - 1
                tiles.append(QueryTile([len(slots)], position, blocks, first, path))
                token_ids.append(growing.pool.tokens[node])
                positions.append(position)
                slots.append(growing.slots[node])
        layout = StepLayout(torch.tensor(slots), tiles)
        states = torch.stack([state for growing in trees for state in growing.states])
        output = self._forward_rows(token_ids, states, positions, layout)
        children, log_probs = self._best_children(output.normed, top_k)
        first_row = 0
        for growing in trees:
            rows = range(first_row, first_row := first_row + len(growing.pool.frontier))
            row_of = dict(zip(growing.pool.frontier, rows, strict=True))
            growing.pool = tree.expand(
                growing.pool, [children[row] for row in rows], [log_probs[row] for row in rows], top_k
            )
            growing.states = [output.hidden[row_of[growing.pool.parents[node]]] for node in growing.pool.frontier]

    def _best_children(self, normed: Tensor, top_k: int) -> tuple[list[list[int]], list[list[float]]]:
        """For each row its likeliest tokens, in target ids, and their log-probabilities."""
        ids, log_probs = tree.best_children(self._head.logits(normed), top_k)
        return self._head.target_ids(ids).tolist(), log_probs.tolist()

    # -- after the target has judged

    @torch.inference_mode()
    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        assert hidden is not None
        segments: list[Segment] = []
        rows: list[int] = []  # of the target's pass
        last: list[tuple[Request, int]] = []  # those that go on, and where their last row is among `rows`
        first_row = 0
        for s in plan.scheduled:
            judged = verdict.by_request.get(s.request.request_id)
            standing, next_tokens = _standing_rows(s, first_row, judged)
            room = max(0, self._head.max_positions - s.start)
            ends = judged is not None and judged.finish_reason is not None
            follows = len(standing) <= room and not ends
            standing, next_tokens = standing[:room], next_tokens[:room]
            segments.append(Segment(next_tokens, s.start, self._blocks(s.request)))
            rows += standing
            if follows:
                last.append((s.request, len(rows) - 1))
            first_row += s.num_rows
        if not rows:
            return
        states = self._head.combine([hidden.taps[tap][rows] for tap in self.hidden_taps])
        self._fill([segment for segment in segments if segment.token_ids], states)
        if last:
            slots = [request.slot for request, _ in last]
            places = upload([slots, [place for _, place in last]], torch.int64, states.device)
            self._states.index_copy_(0, places[0], states[places[1]])

    def _fill(self, segments: Sequence[Segment], states: Tensor) -> None:
        token_ids = [token for segment in segments for token in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions]
        self._attention.begin(lay_out(segments, block_size=self.block_size, row_tile=self._attention.row_tile))
        self._head.fill(
            upload(token_ids, torch.int64, states.device),
            states,
            upload(positions, torch.int64, states.device),
            self._attention.attend,
            self._attention.write,
        )

    # -- where the host has not seen what the target judged

    @property
    def serves_slots(self) -> bool:  # type: ignore[override]
        """Chains, token by token, of which nothing but the likeliest token is asked."""
        return self._tree is None and self._head.mask_state is None and self._chooser.is_plain

    def attach_slots(self, slots: Slots, shapes: Sequence[tuple[int, int]]) -> None:
        blocks = slots.blocks[self._place]
        self._on_slots = SlotHead(self._head, self._attention, slots, blocks, self._states)
        if shapes:
            self._on_slots.record(shapes)

    @torch.inference_mode()
    def draft_slots(self, slots: Slots, grant: Grant) -> Draft:
        lengths = {request: self._length(request, grant) for request in grant.requests}
        drafting = [request for request, length in lengths.items() if length > 0]
        if not drafting:
            return Draft()
        self._on_slots.draft(drafting, [lengths[request] for request in drafting])
        return Draft({r.request_id: RequestDraft([UNKNOWN] * lengths[r], self.name) for r in drafting})

    @torch.inference_mode()
    def follow_slots(self, batch: SlotBatch, positions: Tensor, verdict: Tensor, taps: Mapping[Tap, Tensor]) -> None:
        self._on_slots.follow(batch, positions, verdict, [taps[tap] for tap in self.hidden_taps])

    @torch.inference_mode()
    def follow_known(self, rows: KnownRows, verdict: Tensor | None, taps: Mapping[Tap, Tensor]) -> None:
        self._on_slots.follow_known(rows, verdict, [taps[tap] for tap in self.hidden_taps], self.block_size)


class GrowingTree:
    """A tree under way.

    Attributes:
        slots: of the nodes that had a row, in the head's cache.
        states: what each node of the frontier is fed: what the row gave that drafted it.
    """

    def __init__(self, job: Job, pool: tree.Pool) -> None:
        self.job = job
        self.pool = pool
        self.slots: dict[int, int] = {}
        self.states: list[Tensor] = []


def _standing_rows(s: ScheduledRequest, first_row: int, judged: RequestVerdict | None) -> tuple[list[int], list[int]]:
    """The rows of a request that stand, in the order of their positions, and the token after each.

    A text that ends inside an accepted draft has no token after its last row: the row is left out.
    """
    rows = list(range(first_row, first_row + s.num_tokens))
    known = s.request.token_ids
    if judged is not None:
        rows += [first_row + s.num_tokens + node for node in judged.accepted]
        known = known + judged.token_ids
    next_tokens = known[s.start + 1 : s.start + 1 + len(rows)]
    return rows[: len(next_tokens)], next_tokens

"""The block pool, driven by hypothesis: two groups of different block sizes share one pool of bytes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.engine.cache import CachePool, GroupSpec, hash_block


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and free blocks; a model of plain lists says what must be there."""

    @initialize(sizes=st.sampled_from([(64,), (64, 64), (96, 64), (64, 16), (48, 36)]), num_chunks=st.integers(1, 6))
    def start(self, sizes: tuple[int, ...], num_chunks: int) -> None:
        specs = [GroupSpec(f"group{i}", size) for i, size in enumerate(sizes)]
        chunk_bytes = CachePool(specs, 0).chunk_bytes
        self.pool = CachePool(specs, num_chunks * chunk_bytes + chunk_bytes // 2)
        self.held: list[tuple[int, list[int]]] = []  # (group, blocks of one holder)
        self.published: dict[tuple[int, bytes], int] = {}
        assert self.pool.num_chunks == num_chunks

    @rule(group=st.integers(0, 1), count=st.integers(0, 8))
    def allocate(self, group: int, count: int) -> None:
        group %= len(self.pool.groups)
        target = self.pool.groups[group]
        available = target.num_available
        blocks = target.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            assert len(set(blocks)) == count
            used = {b for g, held in self.held if g == group for b in held}
            assert not used & set(blocks), "a block was handed out twice"
            self.held.append((group, blocks))
        for (g, block_hash), block in list(self.published.items()):
            found = self.pool.groups[g].find(block_hash)
            assert found in (block, None)
            if found is None:
                assert not any(block in held for gg, held in self.held if gg == g and block not in (blocks or []))
                del self.published[g, block_hash]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        group, blocks = self.held.pop(place)
        self.pool.groups[group].free(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 3), min_size=2, max_size=2))
    def publish(self, data: st.DataObject, tokens: list[int]) -> None:
        group, blocks = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if not blocks:
            return
        block, block_hash = blocks[0], hash_block(None, tokens)
        known = block in [b for (g, _), b in self.published.items() if g == group]
        self.pool.groups[group].publish(block, block_hash)
        if not known:
            self.published.setdefault((group, block_hash), block)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def share_prefix(self, data: st.DataObject) -> None:
        (group, block_hash), block = data.draw(st.sampled_from(sorted(self.published.items())))
        assert self.pool.groups[group].find(block_hash) == block
        self.pool.groups[group].share([block])
        self.held.append((group, [block]))

    @rule()
    def drop_kept(self) -> None:
        for index, group in enumerate(self.pool.groups):
            group.drop_kept()
            held = {b for g, blocks in self.held if g == index for b in blocks}
            self.published = {k: b for k, b in self.published.items() if k[0] != index or b in held}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for index, group in enumerate(self.pool.groups):
            assert group.num_used == len({b for g, blocks in self.held if g == index for b in blocks})
        if not self.held:
            first = self.pool.groups[0]
            assert first.num_available == self.pool.num_chunks * first.blocks_per_chunk, "idle, yet blocks are missing"


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase

"""Cache memory as numbers: one byte pool, several groups, blocks, prefixes. No torch and no tensors here.

    pool of bytes = chunks        a chunk belongs to one group at a time; its size is the least common multiple of the
      |                           groups' block sizes, so every group can view the whole pool as an array of its blocks
      +-- group "target"          block id = chunk * blocks_per_chunk + place in the chunk
      +-- group "draft"           takes chunks when requests draft, gives them back when they are free

A block is *used* (one or more requests hold it), *kept* (free, but its hash is known, so that a prompt that begins
alike can have it back) or *empty*. Kept blocks are given up oldest first, when nothing else is left.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from forerun.memory.groups import GroupSpec, chunk_bytes, num_chunks

BlockHash = bytes


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], salt: str = "") -> BlockHash:
    """The identity of a full block: its tokens and everything before them. Salts keep users' prefixes apart."""
    digest = hashlib.blake2b(parent or salt.encode(), digest_size=32, person=b"block" if parent else b"root")
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    return digest.digest()


class CacheGroup:
    """The blocks of one group."""

    def __init__(self, spec: GroupSpec, pool: CachePool, chunk_bytes: int) -> None:
        self.spec = spec
        self.blocks_per_chunk = chunk_bytes // spec.block_bytes
        self._pool = pool
        self._references: dict[int, int] = {}  # used blocks
        self._empty: dict[int, None] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._hash_of: dict[int, BlockHash] = {}  # kept blocks, and used ones that are full
        self._block_of: dict[BlockHash, int] = {}
        self._used_in_chunk: dict[int, int] = {}  # used blocks of each chunk that is ours
        self._idle_chunks: dict[int, None] = {}  # those with none

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._empty) + len(self._kept) + self._pool.num_chunks_for(self) * self.blocks_per_chunk

    def num_chunks_taken(self, count: int) -> int:
        """Chunks that `allocate(count)` takes from the pool or from other groups."""
        chunks = -(-max(0, count - len(self._empty)) // self.blocks_per_chunk)
        return min(chunks, self._pool.num_chunks_for(self))

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change where there are not so many."""
        if count > self.num_available:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            if self._empty:
                block = self._empty.popitem()[0]
            elif (chunk := self._pool.take_chunk(self)) is not None:
                self._add_chunk(chunk)
                continue
            else:
                block = self._kept.popitem(last=False)[0]
                self._forget_hash(block)
            self._use(block)
            blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """The block that holds these tokens, if it is still there. `share` it before anything else is allocated."""
        return self._block_of.get(block_hash)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each."""
        for block in blocks:
            if block in self._references:
                self._references[block] += 1
            else:
                del self._kept[block]
                self._use(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference on each, tail first: the head of a prefix is kept longest."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._unuse(block)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """This used block is full: prompts with the same beginning may share it. The first of two equal blocks wins."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def drop_kept(self) -> None:
        """Forget every prefix that no request holds."""
        for block in list(self._kept):
            self._evict(block)
            self._give_back(block // self.blocks_per_chunk)

    def release_chunk(self) -> int | None:
        """Give up one chunk that no request uses, kept prefixes included; None where every chunk is in use."""
        if not self._idle_chunks:
            return None
        chunk = next(iter(self._idle_chunks))
        for block in self._blocks(chunk):
            if block in self._kept:
                self._evict(block)
        self._remove_chunk(chunk)
        return chunk

    @property
    def num_releasable_chunks(self) -> int:
        return len(self._idle_chunks)

    @property
    def chunks(self) -> list[int]:
        return list(self._used_in_chunk)

    def check_integrity(self) -> None:
        """Every block of the group is in one state, and the tables mirror each other. For tests."""
        blocks = {block for chunk in self._used_in_chunk for block in self._blocks(chunk)}
        assert {*self._references, *self._empty, *self._kept} == blocks
        assert len(blocks) == len(self._empty) + len(self._kept) + len(self._references)
        assert all(count > 0 for count in self._references.values())
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        assert set(self._kept) <= set(self._hash_of) == set(self._hash_of) - set(self._empty)
        for chunk, num_used in self._used_in_chunk.items():
            assert num_used == sum(block in self._references for block in self._blocks(chunk))
            assert (num_used == 0) == (chunk in self._idle_chunks)
            assert any(block not in self._empty for block in self._blocks(chunk)), "an empty chunk was not given back"

    def _blocks(self, chunk: int) -> range:
        return range(chunk * self.blocks_per_chunk, (chunk + 1) * self.blocks_per_chunk)

    def _use(self, block: int) -> None:
        chunk = block // self.blocks_per_chunk
        self._references[block] = 1
        self._used_in_chunk[chunk] += 1
        self._idle_chunks.pop(chunk, None)

    def _unuse(self, block: int) -> None:
        chunk = block // self.blocks_per_chunk
        del self._references[block]
        self._used_in_chunk[chunk] -= 1
        if self._used_in_chunk[chunk] == 0:
            self._idle_chunks[chunk] = None
        if block in self._hash_of:
            self._kept[block] = None
        else:
            self._empty[block] = None
            self._give_back(chunk)

    def _forget_hash(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def _evict(self, block: int) -> None:
        del self._kept[block]
        self._forget_hash(block)
        self._empty[block] = None

    def _add_chunk(self, chunk: int) -> None:
        self._used_in_chunk[chunk] = 0
        self._idle_chunks[chunk] = None
        self._empty.update(dict.fromkeys(reversed(self._blocks(chunk))))

    def _remove_chunk(self, chunk: int) -> None:
        for block in self._blocks(chunk):
            del self._empty[block]
        del self._used_in_chunk[chunk], self._idle_chunks[chunk]

    def _give_back(self, chunk: int) -> None:
        """Return a chunk to the pool once all of its blocks are empty."""
        if all(block in self._empty for block in self._blocks(chunk)):
            self._remove_chunk(chunk)
            self._pool.return_chunk(chunk)


class CachePool:
    """Hands chunks of one byte pool to the groups. The first group is the target's.

    Args:
        specs: the groups.
        total_bytes: for the pool and what lies beside it; what does not fill a chunk is left over.
        beside_bytes: of other memory that each block of the target needs.
    """

    def __init__(self, specs: Sequence[GroupSpec], total_bytes: int, beside_bytes: int = 0) -> None:
        self.chunk_bytes = chunk_bytes(specs)
        self.num_chunks = num_chunks(specs, total_bytes, beside_bytes)
        self._free_chunks = list(range(self.num_chunks - 1, -1, -1))
        self.groups = [CacheGroup(spec, self, self.chunk_bytes) for spec in specs]

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    @property
    def num_target_blocks(self) -> int:
        """Blocks of the target if it has all chunks."""
        return self.num_chunks * self.groups[0].blocks_per_chunk

    def num_chunks_for(self, group: CacheGroup) -> int:
        """Chunks that `group` could still get: free ones and those that other groups do not use."""
        return len(self._free_chunks) + sum(g.num_releasable_chunks for g in self.groups if g is not group)

    def take_chunk(self, group: CacheGroup) -> int | None:
        if self._free_chunks:
            return self._free_chunks.pop()
        for other in reversed(self.groups):  # proposers' groups are asked first
            if other is not group and (chunk := other.release_chunk()) is not None:
                return chunk
        return None

    def return_chunk(self, chunk: int) -> None:
        self._free_chunks.append(chunk)

    def check_integrity(self) -> None:
        owned = [chunk for group in self.groups for chunk in group.chunks]
        assert sorted(owned + self._free_chunks) == list(range(self.num_chunks))
        for group in self.groups:
            group.check_integrity()

"""Which request holds which block of the paged KV cache, and which blocks hold a known prefix.

A block is room for the keys and values of `block_size` tokens, in every layer. This file counts references and never
sees the arrays: block ids 0 to num_blocks - 1 index whatever the runner allocated.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from jaxis.engine.request import Request
from jaxis.errors import ConfigError


class BlockManager:
    """Reference-counted blocks with prefix caching.

    A full block is named by SHA-256 over its parent's digest and its exact token ids; the first block's parent is
    derived from the request's salt. So equal digests mean equal salt and equal tokens from position 0 on. Only full
    blocks are registered and thus shared, and nobody writes to a full block: sharing needs no copy-on-write.

    A registered block that nobody holds any more stays findable until it is reused. Free blocks are reused in this
    order: those without a registration, then the registered ones, least recently used first.

    Attributes:
      num_blocks: Blocks in the cache.
      block_size: Tokens in a block (B).
      enable_prefix_caching: Whether blocks are registered and looked up.
      prefix_cache_queries: Prompt tokens looked up, each request counted once, when first admitted.
      prefix_cache_hits: How many of those were found.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """Raises ConfigError if a size is not positive."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"the KV cache needs num_blocks={num_blocks} and block_size={block_size} of at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_digest: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, registered ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def get_cached_prefix(self, request: Request) -> list[int]:
        """The blocks that hold the longest known prefix of the request's tokens, in order.

        At least one token is left to compute, for its logits: a request found whole recomputes its last block, in a
        block of its own. A request for prompt log-probabilities needs every position's logits and finds nothing.
        """
        block_ids: list[int] = []
        if not self._uses_prefix_cache(request):
            return block_ids
        for digest in self._digests(request, (request.num_tokens - 1) // self.block_size):
            block_id = self._block_of_digest.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def allocate(self, request: Request, num_tokens: int, cached_block_ids: Sequence[int] = ()) -> bool:
        """Makes the request's block table cover its first `num_tokens` tokens, or changes nothing.

        Args:
          request: The request; it holds no blocks yet if `cached_block_ids` are given.
          num_tokens: Tokens to cover, counted from position 0, cached ones included.
          cached_block_ids: What `get_cached_prefix` just returned; they lead the table and count as computed.

        Returns:
          Whether there were blocks enough.
        """
        num_new = self.num_blocks_for(num_tokens) - len(request.block_ids) - len(cached_block_ids)
        if num_new <= 0 and not cached_block_ids:
            return True  # nearly every decode
        if num_new > len(self._free) - sum(self._ref_counts[block_id] == 0 for block_id in cached_block_ids):
            return False
        if not request.block_ids:
            self._take_cached(request, cached_block_ids)
        for _ in range(num_new):
            request.block_ids.append(self._take_free())
        return True

    def free(self, request: Request) -> None:
        """Gives the request's blocks back and marks none of its tokens as computed."""
        # Last block first: a prefix is of use without its tail, a tail without its prefix is not.
        for block_id in reversed(request.block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=self._digest_of_block[block_id] is not None)
        request.block_ids = []
        request.num_computed_tokens = 0

    def cache_full_blocks(self, request: Request) -> None:
        """Registers the request's blocks that are full of computed tokens whose values are known.

        Where an equal block is registered already (two requests computed the same prefix side by side), the first one
        stays and this one remains the request's own.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_registered_blocks:
            return
        digests = self._digests(request, num_full)
        for index in range(request.num_registered_blocks, num_full):
            block_id = request.block_ids[index]
            if self._block_of_digest.setdefault(digests[index], block_id) == block_id:
                self._digest_of_block[block_id] = digests[index]
        request.num_registered_blocks = num_full

    def forget_prefix(self, request: Request) -> None:
        """Unregisters every block with a prefix of the request's tokens: nobody is to find what it computed."""
        for digest in request.block_digests:
            block_id = self._block_of_digest.pop(digest, None)
            if block_id is not None:
                self._digest_of_block[block_id] = None

    def reset_prefix_cache(self) -> bool:
        """Forgets every registered block, as after a change of weights.

        Returns:
          Whether it was done: not while a request holds blocks, whose later ones would bring stale contents back.
        """
        if len(self._free) != self.num_blocks:
            return False
        self._block_of_digest.clear()
        self._digest_of_block = [None] * self.num_blocks
        return True

    def _uses_prefix_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """Digests of the request's first `num_blocks` blocks; each is computed once in the request's life."""
        digests = request.block_digests
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else _root_digest(request.cache_salt)
            start = index * self.block_size
            token_ids = array("q", request.token_ids(start, start + self.block_size))
            digests.append(hashlib.sha256(parent + token_ids.tobytes()).digest())
        return digests[:num_blocks]

    def _take_cached(self, request: Request, cached_block_ids: Sequence[int]) -> None:
        for block_id in cached_block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        request.block_ids = list(cached_block_ids)
        request.num_registered_blocks = len(cached_block_ids)
        request.num_computed_tokens = len(cached_block_ids) * self.block_size
        # A preempted request finds its own blocks again; that is no saving to report.
        if request.num_preemptions == 0 and self._uses_prefix_cache(request):
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_cached_tokens

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        digest = self._digest_of_block[block_id]
        if digest is not None:
            del self._block_of_digest[digest]
            self._digest_of_block[block_id] = None
        self._ref_counts[block_id] = 1
        return block_id


def _root_digest(cache_salt: str | None) -> bytes:
    """The first block's parent; no salt differs from every salt, the empty one included."""
    if cache_salt is None:
        return bytes(hashlib.sha256().digest_size)
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()

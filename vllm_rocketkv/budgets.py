# SPDX-License-Identifier: Apache-2.0
"""Numbers that follow from the options: one request's layout, bounds over all requests, and whether they fit an engine.

No torch and no vLLM.
"""

from __future__ import annotations

from functools import lru_cache

from vllm_rocketkv.fields import Options
from vllm_rocketkv.layout import BudgetSplit, PromptLayout, adaptive_split, adaptive_topr, ceil_div, max_private_blocks

_PEAK_RATIO = 2.0 ** (20 / 3)  # see Budgets.max_prompt_budget

_cached_split = lru_cache(maxsize=1 << 14)(adaptive_split)


class Budgets(Options):
    """What :class:`vllm_rocketkv.config.RocketKVConfig` says about a prompt's length and an engine's sizes."""

    # --- budgets and layout of one request ------------------------------------------------------------------------

    def _split(self, num_prompt_tokens: int) -> BudgetSplit:
        assert self.token_budget is not None
        return _cached_split(num_prompt_tokens, self.token_budget, self.max_new_tokens)

    def prompt_budget_for(self, num_prompt_tokens: int, block_size: int) -> int:
        """P in tokens for a prompt of N; when adaptive, never below W + B, which the layout needs."""
        if not self.is_adaptive:
            return self.prompt_budget
        return max(self._split(num_prompt_tokens).prompt_budget, self.window_size + block_size)

    def natural_length(self, num_prompt_tokens: int, block_size: int) -> int:
        """Tokens that lie in natural blocks before anything is evicted: those of the prompt; with decode-time eviction, of a
        prompt within the budget, as many more as the budget and one interval allow."""
        budget = self.decode_budget_for_step
        if budget is None or num_prompt_tokens > self.prompt_budget:
            return num_prompt_tokens
        return budget + self.decode_interval_for(block_size)

    def layout(self, num_prompt_tokens: int, block_size: int) -> PromptLayout:
        """Where this request's tokens live; natural (never evictable) under a policy that does not evict."""
        if not self.evicts:
            return PromptLayout(num_prompt_tokens, num_prompt_tokens, block_size)
        prompt_budget = self.prompt_budget_for(num_prompt_tokens, block_size)
        budget = self.decode_budget_for_step
        if budget is None:
            return PromptLayout(num_prompt_tokens, prompt_budget, block_size)
        length = self.natural_length(num_prompt_tokens, block_size)
        kept = prompt_budget if length == num_prompt_tokens else budget
        return PromptLayout(length, kept, block_size, budget, self.decode_interval_for(block_size))

    def is_sparse(self, num_prompt_tokens: int, block_size: int) -> bool:
        """Whether a request with this prompt ever differs from dense attention (I6): N > P, or decoded tokens are evicted,
        under a policy other than full."""
        if self.policy == "full":
            return False
        if self.decode_budget_for_step is not None:
            return True
        return num_prompt_tokens > self.prompt_budget_for(num_prompt_tokens, block_size)

    def topr_for(self, num_prompt_tokens: int, head_size: int) -> int:
        """Head dimensions that the estimation reads: ``topr``, else when adaptive int(D * page / c2), else all D."""
        if self.selection != "hsa":  # nothing else leaves any out
            return head_size
        if self.topr is not None:
            return min(self.topr, head_size)
        if not self.is_adaptive:
            return head_size
        return adaptive_topr(head_size, self.page_size, self._split(num_prompt_tokens).estimation_ratio)

    def num_selected_pages(self, num_cached_tokens: int) -> int:
        """Pages that one decode step reads for one KV head with so many tokens cached; 0 without stage 2.

        Up to ``dense_below`` tokens it reads all of them.
        """
        if not self.selects:
            return 0
        if num_cached_tokens <= self.dense_below:
            return ceil_div(num_cached_tokens, self.page_size)
        return ceil_div(self.topk_for_step, self.page_size)

    # --- bounds over every prompt length --------------------------------------------------------------------------

    def min_prompt_budget(self, block_size: int) -> int:
        """Smallest P, in tokens, of any evictable prompt.

        Adaptive: an evictable prompt has c > 1 and S > 2 max_new (else P = N), so capacity >= max(t, 2 max_new), since
        S / c**r = t c**(1 - r) grows with c from t, its value at c = 1, and never falls back to it (1 - r >= 0.2).
        """
        if self.token_budget is None:
            return self.prompt_budget
        spare = self.token_budget - self.max_new_tokens
        return max(spare, self.max_new_tokens, self.window_size + block_size)

    def max_prompt_budget(self, max_model_len: int, block_size: int) -> int:
        """Upper bound of P, in tokens, over every prompt of at most ``max_model_len`` tokens.

        With L = log2 c the adaptive capacity is t * 2**(L (0.8 - 0.06 L)) until r reaches 0.8 at L = 10, then
        t * 2**(0.2 L): it grows up to L = 20/3, falls up to L = 10 and grows again. The other terms never fall as N
        grows. So the maximum is at ``max_model_len`` or at an integer beside the peak; one token more covers the
        rounding of floats.
        """
        if self.token_budget is None:
            return self.prompt_budget
        peak = int(self.token_budget * _PEAK_RATIO) - self.max_new_tokens
        lengths = (1, peak, peak + 1, max_model_len)
        return 1 + max(self.prompt_budget_for(min(max(n, 1), max_model_len), block_size) for n in lengths)

    def max_private_blocks(self, max_model_len: int, block_size: int) -> int:
        """Upper bound of e, private blocks of one request, over every prompt length; 0 if nothing can be evicted."""
        if not self.evicts or (not self.is_adaptive and self.prompt_budget >= max_model_len):
            return 0
        budget = self.max_prompt_budget(max_model_len, block_size)
        if self.decode_budget_for_step is not None:
            budget = self.decode_budget_for_step + self.decode_interval_for(block_size)
        return max_private_blocks(budget, block_size)

    # --- start-up checks that need the engine's numbers -----------------------------------------------------------

    def check_block_size(self, block_size: int) -> None:
        """Refuse, with a ValueError of one sentence, options that do not fit the block size vLLM has resolved."""
        if self.selects and block_size % self.page_size:
            largest = block_size & -block_size
            raise ValueError(
                f"rocketkv: page_size {self.page_size} does not divide the block size {block_size}: "
                f"lower page_size to at most {largest} or start vLLM with a --block-size that is a multiple of it"
            )
        if self.evicts:
            self._check_whole_blocks(block_size)
        if self.decode_budget_for_step is not None:
            self._check_decode_interval(block_size)

    def _check_whole_blocks(self, block_size: int) -> None:
        """Up to one block less than the budget is kept: what is left must exceed what is always kept."""
        always = {"snapkv": ("window_size", self.window_size), "streaming_llm": ("sink_tokens", self.sink_tokens)}
        name, tokens = always.get(self.eviction, ("the newest token,", 1))
        least = tokens + block_size
        if self.is_adaptive or self.prompt_budget >= least:
            return
        raise ValueError(
            f"rocketkv: prompt_budget {self.prompt_budget} is less than {name} {tokens} + block size {block_size}: "
            f"raise prompt_budget to at least {least} or start vLLM with a smaller --block-size"
        )

    def _check_decode_interval(self, block_size: int) -> None:
        interval = self.decode_interval_for(block_size)
        if interval % block_size:
            raise ValueError(
                f"rocketkv: decode_interval {interval} is not a multiple of the block size {block_size}: "
                f"use {ceil_div(interval, block_size) * block_size} or start vLLM with a smaller --block-size"
            )
        if interval < self.eviction_window:
            raise ValueError(
                f"rocketkv: decode_interval {interval} is less than window_size {self.eviction_window}, whose queries all come "
                f"after the eviction before: give a decode_interval of at least "
                f"{ceil_div(self.eviction_window, block_size) * block_size} or lower window_size"
            )

    def check_window_fits(self, block_size: int, num_query_heads_per_kv_head: int, query_to_kv_bytes: int = 1) -> None:
        """Refuse, with a ValueError of one sentence, a window whose queries do not fit into the private blocks.

        While a prompt is still chunked, all but the newest query of its window may have to be parked in the K and V bytes of
        its private blocks, of which a request has at least floor(P / B). A query of all heads takes as many bytes as the K and
        V of ``group / 2`` tokens, times ``query_to_kv_bytes``, by which one of its elements is larger than one of the cache (1
        unless K and V are stored in fp8), and is never split over two blocks.

        The windows of decoded tokens get as many blocks as they need (``layout.parking_blocks``), of at least one query each.
        """
        if self.eviction != "snapkv":
            return
        queries_per_block = 2 * block_size // (num_query_heads_per_kv_head * query_to_kv_bytes)
        or_auto = " or use --kv-cache-dtype auto" if query_to_kv_bytes > 1 else ""
        if self.decode_budget_for_step is not None and not queries_per_block:
            raise ValueError(
                f"rocketkv: decode_budget parks queries of decoded tokens, and one of {num_query_heads_per_kv_head} query heads "
                f"per KV head does not fit into a block of {block_size} tokens: drop decode_budget or start vLLM with a larger "
                f"--block-size{or_auto}"
            )
        parked, offered = self.window_size - 1, self.min_prompt_budget(block_size) // block_size * queries_per_block
        if parked <= offered:
            return
        option, extra = ("token_budget", self.max_new_tokens) if self.is_adaptive else ("prompt_budget", 0)
        way_out = "start vLLM with a larger --block-size"
        if queries_per_block:
            least = ceil_div(parked, queries_per_block) * block_size + extra
            way_out = f"raise {option} to at least {least} or lower window_size"
        raise ValueError(
            f"rocketkv: window_size {self.window_size} with {num_query_heads_per_kv_head} query heads per KV head parks up to "
            f"{parked} queries, but the private blocks of {option} {getattr(self, option)} hold {offered}: {way_out}{or_auto}"
        )

    # --- what the user is told ------------------------------------------------------------------------------------

    def savings(self, max_model_len: int, block_size: int, bytes_per_block: int) -> str:
        """What eviction saves on one prompt of ``max_model_len`` tokens.

        ``bytes_per_block``: bytes of one block of the pool, summed over the layers of one worker.
        """
        layout = self.layout(max_model_len, block_size)
        if not layout.is_evictable or layout.num_prompt_tokens > max_model_len:
            return f"a prompt of {max_model_len} tokens keeps all of its {ceil_div(max_model_len, block_size)} blocks"
        freed = layout.num_dropped_blocks
        return (
            f"a prompt of {max_model_len} tokens keeps {layout.num_private_blocks} of {layout.num_natural_blocks} blocks "
            f"and frees {freed} ({freed * bytes_per_block / 2**20:.1f} MiB)"
        )

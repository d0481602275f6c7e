# SPDX-License-Identifier: Apache-2.0
"""What the engine core's side uses of vLLM: the KV cache spec, the block manager, and the scheduler that asks it."""

from __future__ import annotations

from tests.vllm_contract.checks import Calls, Entry, Exists, Has, Overrides, Says, Takes, Wraps

MANAGERS = "v1.core.single_type_kv_cache_manager"
MANAGER = f"{MANAGERS}:FullAttentionManager"
COORDINATOR = "v1.core.kv_cache_coordinator:KVCacheCoordinator"
KV_CACHE_MANAGER = "v1.core.kv_cache_manager:KVCacheManager"
SPECS = "v1.kv_cache_interface"

ENGINE_CORE: list[Entry] = [
    # --- the block manager
    Exists(MANAGER, by="RocketKVManager"),
    Exists("v1.core.kv_cache_utils:KVCacheBlock", by="RocketKVManager"),
    Exists("v1.request:Request", by="RocketKVManager.cache_blocks"),
    Exists(f"{SPECS}:KVCacheSpec", by="RocketKVManager.__init__"),
    Calls("logger:init_logger", "(name)", by="logger"),
    Calls(f"{SPECS}:iter_layer_specs", "(kv_cache_spec)", by="RocketKVManager.__init__"),
    Overrides(
        f"{MANAGER}.__init__",
        "(self, kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, scheduler_block_size, ...)",
        by="RocketKVManager.__init__: the spec comes first, all else by keyword",
    ),
    Says(
        f"{MANAGERS}:get_manager_for_kv_cache_spec",
        "manager_class(kv_cache_spec, **kwargs)",
        by="RocketKVManager.__init__: the spec comes first, all else by keyword",
    ),
    Overrides(
        f"{MANAGER}.has_positionally_stable_blocks",
        "@property (self)",
        by="RocketKVManager.has_positionally_stable_blocks",
    ),
    Overrides(
        f"{MANAGER}.get_num_blocks_to_allocate",
        "(self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, "
        "num_tokens_main_model, apply_admission_cap=False, prefill_end=0)",
        by="RocketKVManager.get_num_blocks_to_allocate",
    ),
    Overrides(
        f"{MANAGER}.allocate_new_blocks",
        "(self, request_id, num_tokens, num_tokens_main_model)",
        by="RocketKVManager.allocate_new_blocks",
    ),
    Overrides(
        f"{MANAGER}.remove_skipped_blocks",
        "(self, request_id, processed_computed_tokens, num_prompt_tokens=None)",
        by="RocketKVManager.remove_skipped_blocks",
    ),
    Overrides(
        f"{MANAGER}.cache_blocks",
        "(self, request, num_tokens, retention_interval=None, *, replay_boundaries)",
        by="RocketKVManager.cache_blocks",
    ),
    Takes(
        f"{MANAGERS}:SingleTypeKVCacheManager.cache_blocks",
        "(self, request, num_tokens, retention_interval=None, *, replay_boundaries)",
        by="RocketKVManager.cache_blocks: it skips FullAttentionManager, which hashes a prompt's partial tail",
    ),
    Says(
        f"{MANAGERS}:FullAttentionManager",
        "class FullAttentionManager(SingleTypeKVCacheManager)",
        by="RocketKVManager.cache_blocks: super(FullAttentionManager, self) must be that class",
    ),
    Overrides(f"{MANAGER}.pop_blocks_for_free", "(self, request_id)", by="RocketKVManager.pop_blocks_for_free"),
    Says(
        f"{MANAGER}.pop_blocks_for_free",
        {"0.32": "return req_blocks", "0.33": "return trim_null_head(req_blocks)"},
        by="RocketKVManager._compact: null blocks before private ones must be free to drop",
    ),
    Says(
        f"{MANAGER}.supports_fine_grained_hash_lookup",
        "ClassVar[bool]",
        by="RocketKVManager.supports_fine_grained_hash_lookup",
    ),
    Has(MANAGER, ("block_pool", "block_size", "req_to_blocks", "_null_block"), by="RocketKVManager._compact"),
    Calls("v1.core.block_pool:BlockPool.free_blocks", "(ordered_blocks)", by="RocketKVManager._compact"),
    Has("v1.request:Request", ("request_id", "num_prompt_tokens"), by="RocketKVManager.cache_blocks"),
    Says(
        f"{KV_CACHE_MANAGER}.allocate_slots",
        "remove_skipped_blocks(request.request_id, max(0, total_computed_tokens - request.num_in_flight_tokens), "
        "num_prompt_tokens=request.num_prompt_tokens)",
        by="RocketKVManager.remove_skipped_blocks: only processed tokens count, or a step in flight reads freed blocks",
    ),
    Says(
        f"{COORDINATOR}.remove_skipped_blocks",
        "manager.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)",
        by="RocketKVManager.remove_skipped_blocks",
    ),
    Overrides(
        f"{MANAGER}.allocate_external_computed_blocks",
        "(self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=True)",
        by="RocketKVManager.allocate_external_computed_blocks",
    ),
    # --- pinned blocks
    Exists("v1.core.block_pool:BlockPool", by="PinnedBlocks.__init__"),
    Exists("v1.core.kv_cache_utils:BlockHashWithGroupId", by="PinnedBlocks.__init__"),
    Has("v1.core.block_pool:BlockPool", ("blocks", "free_block_queue"), by="PinnedBlocks.protect"),
    Says(
        "v1.core.block_pool:BlockPool.__init__",
        "self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)",
        by="PinnedBlocks.protect: blocks are found by their id, and handed out from the head of this queue",
    ),
    Has(
        "v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        ("fake_free_list_head", "num_free_blocks"),
        by="PinnedBlocks.protect",
    ),
    Calls("v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove", "(block)", by="PinnedBlocks.protect"),
    Calls("v1.core.kv_cache_utils:FreeKVCacheBlockQueue.append", "(block)", by="PinnedBlocks.protect"),
    Has(
        "v1.core.kv_cache_utils:KVCacheBlock",
        ("block_hash", "block_id", "next_free_block", "ref_cnt"),
        by="PinnedBlocks.protect",
    ),
    # --- the KV cache spec
    Calls("utils.math_utils:round_up", "(x, y)", by="RocketKVSpec.kt_offset_bytes"),
    Exists(f"{SPECS}:KVCacheSpec", by="RocketKVSpec.merge"),
    Says(
        f"{SPECS}:FullAttentionSpec",
        "@dataclass(frozen=True, kw_only=True)",
        by="RocketKVSpec: ours is one as well, and rocketkv_spec copies its fields",
    ),
    Has(
        f"{SPECS}:FullAttentionSpec",
        (
            "block_size",
            "copy_with_new_block_size",
            "head_size",
            "num_kv_heads",
            "page_size_bytes",
            "page_size_padded",
            "unpadded_page_size_bytes",
        ),
        by="RocketKVSpec",
    ),
    Says(f"{SPECS}:FullAttentionSpec.page_size_padded", "int | None = None", by="RocketKVSpec.__post_init__"),
    Overrides(f"{SPECS}:FullAttentionSpec.__post_init__", "(self)", by="RocketKVSpec.__post_init__"),
    Takes(f"{SPECS}:FullAttentionSpec.unpadded_page_size_bytes", "@property (self)", by="RocketKVSpec.kt_offset_bytes"),
    Takes(f"{SPECS}:FullAttentionSpec.page_size_bytes", "@property (self)", by="RocketKVSpec.max_memory_usage_bytes"),
    Overrides(
        f"{SPECS}:FullAttentionSpec.copy_with_new_block_size",
        "(self, block_size)",
        by="RocketKVSpec.copy_with_new_block_size",
    ),
    Overrides(
        f"{SPECS}:FullAttentionSpec.max_num_blocks_per_req",
        "(self, vllm_config, max_len)",
        by="RocketKVSpec.max_num_blocks_per_req",
    ),
    Overrides(
        f"{SPECS}:FullAttentionSpec.max_memory_usage_bytes",
        "(self, vllm_config)",
        by="RocketKVSpec.max_memory_usage_bytes",
    ),
    Overrides(f"{SPECS}:FullAttentionSpec.merge", "@classmethod (cls, specs)", by="RocketKVSpec.merge"),
    Takes(f"{SPECS}:KVCacheSpec.merge", "@classmethod (cls, specs)", by="RocketKVSpec.merge: it calls merge.__func__"),
    Says(f"{SPECS}:KVCacheSpec.merge", "copy.deepcopy(specs[0])", by="RocketKVSpec.merge: it keeps our class"),
    Has("config:VllmConfig", ("model_config",), by="RocketKVSpec.max_memory_usage_bytes"),
    Has("config:ModelConfig", ("max_model_len",), by="RocketKVSpec.max_memory_usage_bytes"),
    Calls("v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered", "()", by="_register"),
    Calls(
        "v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        "(kvcache_spec_cls, manager_class=_, uniform_type_base_spec=_)",
        by="_register",
    ),
    # --- KV cache groups
    Says(
        f"{SPECS}:KVCacheSpec.is_uniform_with_collection",
        "isinstance(spec, uniform_type_base_spec) for spec in kv_cache_specs.values()",
        by="DenseLayerSpec: a plain FullAttentionSpec would take in ours",
    ),
    Says(
        "v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
        "if not isinstance(group.spec, FullAttentionSpec): continue",
        by="DenseLayerSpec: the hits of both kinds are cut to the shortest",
    ),
    # --- hooks
    # keep_window_out_of_prefix_hits
    Wraps(
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        {"0.32": "(self, request)", "0.33": "(self, request, max_cache_hit_length=None)"},
        by="keep_window_out_of_prefix_hits",
    ),
    Says(
        f"{KV_CACHE_MANAGER}.get_computed_blocks",
        "self.coordinator.find_longest_cache_hit(request.block_hashes, max_cache_hit_length)",
        by="keep_window_out_of_prefix_hits: it bounds the second argument of this call",
    ),
    Calls(
        f"{COORDINATOR}.find_longest_cache_hit",
        "(block_hashes, max_cache_hit_length)",
        by="keep_window_out_of_prefix_hits",
    ),
    Has("v1.request:Request", ("sampling_params",), by="keep_window_out_of_prefix_hits"),
    Has("sampling_params:SamplingParams", ("extra_args",), by="keep_window_out_of_prefix_hits"),
    Has(KV_CACHE_MANAGER, ("coordinator",), by="keep_window_out_of_prefix_hits"),
    Has(COORDINATOR, ("single_type_managers",), by="keep_window_out_of_prefix_hits"),
    Says(
        "v1.core.sched.scheduler:Scheduler",
        {
            "0.32": "self.kv_cache_manager.get_computed_blocks(request)",
            "0.33": "self.kv_cache_manager.get_computed_blocks(request, max_cache_hit_length)",
        },
        by="keep_window_out_of_prefix_hits: every request is looked up before it is allocated",
    ),
    # publish_engine_stats
    Wraps("v1.core.sched.scheduler:Scheduler.make_stats", "(self, ...)", by="publish_engine_stats"),
    Says(
        "v1.core.sched.scheduler:Scheduler.make_stats",
        "num_kv_fetch_reqs_by_stage=self._kv_fetch_counts.copy()",
        by="publish_engine_stats: ours are added to this dict, which must not be the scheduler's own",
    ),
    Has("v1.core.sched.scheduler:Scheduler", ("kv_cache_manager",), by="publish_engine_stats"),
]

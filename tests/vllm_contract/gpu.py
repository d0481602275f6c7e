# SPDX-License-Identifier: Apache-2.0
"""What the GPU path uses of vLLM: its backends for a step's dense part, CUDA graphs, the V2 runner's batch.

The backends' modules do not import without a GPU; nothing here imports them.

vLLM 0.32 has no ``get_kv_cache_shape`` and no ``get_kv_cache_stride_order`` any more: a layer's cache is always
``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, and ``supported_kv_cache_layouts`` lists the orders of its strides.
"""

from __future__ import annotations

from tests.vllm_contract.checks import Calls, Entry, Exists, Has, Overrides, Says, Takes, Wraps
from tests.vllm_contract.worker import BACKEND, FORWARD

FLASH = "v1.attention.backends.flash_attn:FlashAttention"
TRITON = "v1.attention.backends.triton_attn:TritonAttention"
BUILDER = f"{BACKEND}:AttentionMetadataBuilder"
RUNNER = "v1.worker.gpu.model_runner"
SPECS = "v1.kv_cache_interface"


def _dense_backend(prefix: str) -> list[Entry]:
    """What both dense backends must have in the same form."""
    backend, impl, builder = f"{prefix}Backend", f"{prefix}Impl", f"{prefix}MetadataBuilder"
    return [
        Exists(backend, by="dense_backend"),
        Calls(f"{backend}.get_impl_cls", "()", by="implementation"),
        Calls(f"{backend}.get_builder_cls", "()", by="builder"),
        Says(
            f"{backend}.forward_includes_kv_cache_update",
            "bool = False",
            by="RocketKVImplBase.forward: their forward must not write, since only our slots are right",
        ),
        Overrides(
            f"{impl}.__init__",
            "(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
            "logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None, ...)",
            by="RocketKVImplBase.__init__",
        ),
        Overrides(f"{impl}.forward", FORWARD, by="RocketKVImplBase.forward"),
        Calls(
            f"{impl}.do_kv_cache_update",
            "(layer, key, value, kv_cache, slot_mapping)",
            by="RocketKVImplBase._write_and_evict",
        ),
        Takes(
            f"{impl}.fused_rope_kvcache_supported",
            "(self)",
            by="RocketKVGPUImpl: a fused write would use the runner's slots",
        ),
        Has(
            impl,
            ("kv_cache_dtype", "kv_sharing_target_layer_name", "logits_soft_cap", "num_heads", "num_kv_heads", "scale"),
            by="RocketKVGPUImpl",
        ),
        Calls(
            f"{builder}.__init__",
            "(kv_cache_spec, layer_names, vllm_config, device)",
            by="RocketKVGPUMetadataBuilder.__init__",
        ),
        Calls(f"{builder}.build", "(common_prefix_len, common_attn_metadata)", by="RocketKVGPUMetadataBuilder.build"),
        Says(
            f"{builder}.build",
            "self.rswa_window is not None and",
            by="give_requests_to_builders_v2: no R-SWA model, no look at rswa_prefix_lens, which we keep on the host",
        ),
        Calls(
            f"{builder}.build_for_cudagraph_capture",
            "(common_attn_metadata)",
            by="RocketKVGPUMetadataBuilder.build_for_cudagraph_capture",
        ),
        Calls(
            f"{builder}.get_cudagraph_support",
            "(vllm_config, kv_cache_spec)",
            by="RocketKVGPUMetadataBuilder.get_cudagraph_support",
        ),
        Has(
            f"{prefix}Metadata",
            (
                "block_table",
                "max_query_len",
                "max_seq_len",
                "num_actual_tokens",
                "query_start_loc",
                "seq_lens",
                "slot_mapping",
            ),
            by="RocketKVGPUMetadataBuilder: our steps differ from theirs in these",
        ),
    ]


GPU: list[Entry] = [
    *_dense_backend(FLASH),
    *_dense_backend(TRITON),
    # --- the backend
    Says(
        "platforms.cuda:CudaPlatformBase.get_attn_backend_cls",
        "backend_class.validate_configuration(device_capability=device_capability, **attn_selector_config._asdict())",
        by="RocketKVGPUBackend: CUDA honours the selected backend, so no hook of ours is needed there",
    ),
    Exists(f"{BACKEND}:AttentionBackend", by="RocketKVGPUBackend"),
    Exists("platforms:current_platform", by="dense_backend"),
    *(Calls(f"platforms.interface:Platform.{name}", "()", by="dense_backend") for name in ("is_cuda", "is_rocm")),
    Calls("config:get_current_vllm_config", "()", by="dense_backend"),
    Calls("v1.attention.backends.fa_utils:is_flash_attn_varlen_func_available", "()", by="dense_backend"),
    Calls(f"{FLASH}Backend.supports_dtype", "(dtype)", by="dense_backend"),
    Has("config:ModelConfig", ("dtype",), by="dense_backend"),
    Says(
        "model_executor.layers.attention.attention:Attention.forward",
        "supports_quant_query_input",
        by="RocketKVGPUImpl: queries stay the model's own",
    ),
    Exists("config.cache:CacheDType", by="RocketKVGPUBackend"),
    *(
        Says("config.cache:CacheDType", f"'{name}'", by="RocketKVGPUBackend.supported_kv_cache_dtypes")
        for name in ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    ),
    *(
        Overrides(f"{BACKEND}:AttentionBackend.{name}", signature, by=f"RocketKVGPUBackend.{name}")
        for name, signature in {
            "get_impl_cls": "@staticmethod ()",
            "get_builder_cls": "@staticmethod ()",
            "get_supported_kernel_block_sizes": "@staticmethod (kv_cache_spec=None)",
            "get_preferred_block_size": "@classmethod (cls, default_block_size)",
            "supported_kv_cache_layouts": "@classmethod (cls)",
            "supports_compute_capability": "@classmethod (cls, capability)",
            "supports_head_size": "@classmethod (cls, head_size)",
        }.items()
    ),
    *(
        Overrides(f"{BACKEND}:AttentionBackend.{name}", signature, by=f"RocketKVBackendBase.{name}")
        for name, signature in {
            "customize_spec": "@classmethod (cls, spec)",
            "get_name": "@staticmethod ()",
            "supports_attn_type": "@classmethod (cls, attn_type)",
            "supports_kv_connector": "@classmethod (cls)",
            "supports_non_causal": "@classmethod (cls)",
        }.items()
    ),
    *(
        Has(f"{BACKEND}:AttentionBackend", (name,), by=f"RocketKVGPUBackend.{name}")
        for name in ("supported_dtypes", "supported_kv_cache_dtypes")
    ),
    Calls(f"{BACKEND}:MultipleOf", "(base)", by="RocketKVGPUBackend.get_supported_kernel_block_sizes"),
    Says(
        f"{SPECS}:KVCacheLayout.LBHNC",
        "(0, 1, 2, 3, 4)",
        by="RocketKVGPUBackend.supported_kv_cache_layouts: layers, blocks, heads, tokens, content",
    ),
    Has("platforms.interface:DeviceCapability", ("major",), by="RocketKVGPUBackend.supports_compute_capability"),
    # --- one layer's step
    # In both versions; vllm.utils.torch_utils has it in 0.32 alone.
    Calls(f"{SPECS}:is_quantized_kv_cache", "(kv_cache_dtype)", by="RocketKVGPUImpl._wrap"),
    Calls(f"{BACKEND}:max_decode_query_len", "(vllm_config)", by="RocketKVGPUMetadataBuilder.__init__"),
    Has("config:VllmConfig", ("compilation_config",), by="RocketKVGPUMetadataBuilder.__init__"),
    Has("config:CompilationConfig", ("max_cudagraph_capture_size",), by="RocketKVGPUMetadataBuilder.__init__"),
    # --- the metadata of a step
    Calls("utils.torch_utils:async_tensor_h2d", "(data, device, out=_)", by="RocketKVGPUMetadataBuilder._sparse"),
    Has(
        f"{BACKEND}:CommonAttentionMetadata",
        ("seq_lens_cpu_upper_bound",),
        by="Step: lengths without a copy from the device",
    ),
    Says(f"{BACKEND}:CommonAttentionMetadata.seq_lens_cpu_upper_bound", "torch.Tensor | None", by="Step"),
    Calls(
        f"{BUILDER}._init_reorder_batch_threshold",
        "(reorder_batch_threshold, supports_spec_as_decode=_)",
        by="RocketKVGPUMetadataBuilder.__init__",
    ),
    *(
        Says(
            f"{BACKEND}:AttentionCGSupport.{name}",
            f"{name} = {value}",
            by="RocketKVGPUMetadataBuilder.get_cudagraph_support",
        )
        for name, value in {
            "ALWAYS": 3,
            "UNIFORM_BATCH": 2,
            "UNIFORM_SINGLE_TOKEN_DECODE": 1,
            "NEVER": 0,
        }.items()
    ),
    Says(
        f"{FLASH}MetadataBuilder._cudagraph_support",
        {
            "0.32": "AttentionCGSupport.ALWAYS if get_flash_attn_version() == 3 else AttentionCGSupport.UNIFORM_BATCH",
            "0.33": "AttentionCGSupport.ALWAYS if get_flash_attn_version() in (3, 4) or current_platform.is_xpu() "
            "else AttentionCGSupport.UNIFORM_BATCH",
        },
        by="RocketKVGPUMetadataBuilder.get_cudagraph_support: never less than uniform batches",
    ),
    Says(
        f"{TRITON}MetadataBuilder._cudagraph_support",
        "AttentionCGSupport.ALWAYS",
        by="RocketKVGPUMetadataBuilder.get_cudagraph_support: never less than uniform batches",
    ),
    Says(
        f"{BUILDER}._cudagraph_support",
        "ClassVar[AttentionCGSupport]",
        by="RocketKVGPUMetadataBuilder._cudagraph_support",
    ),
    Overrides(
        f"{BUILDER}.build_for_cudagraph_capture",
        "(self, common_attn_metadata)",
        by="RocketKVGPUMetadataBuilder.build_for_cudagraph_capture",
    ),
    Overrides(
        f"{BUILDER}.get_cudagraph_support",
        "@classmethod (cls, vllm_config, kv_cache_spec)",
        by="RocketKVGPUMetadataBuilder.get_cudagraph_support",
    ),
    Says(
        f"{BUILDER}.supports_update_block_table",
        "bool = False",
        by="RocketKVGPUMetadataBuilder: metadata is built for every step, never patched",
    ),
    # --- the V2 runner
    Wraps(f"{RUNNER}:GPUModelRunner.gather_batch_req_state", "(self, ...)", by="choose_steps_for_cuda_graphs"),
    Says(
        f"{RUNNER}:GPUModelRunner.gather_batch_req_state",
        "return (batch_state, get_uniform_decode_token_count(num_reqs, num_toks, max_query_len, decode_graph_eligible))",
        by="choose_steps_for_cuda_graphs: a state, or None for dummy runs, and the uniform count",
    ),
    Says(f"{RUNNER}:BatchReqState", "class BatchReqState(NamedTuple)", by="choose_steps_for_cuda_graphs"),
    Has(
        f"{RUNNER}:BatchReqState",
        (
            "decode_graph_eligible",
            "idx_mapping_np",
            "num_computed_prefill_tokens_np",
            "num_scheduled_tokens",
        ),
        by="_needs_more_than_the_graph",
    ),
    Has(f"{RUNNER}:GPUModelRunner", ("req_states", "vllm_config"), by="_needs_more_than_the_graph"),
    Has("config:VllmConfig", ("cache_config", "model_config"), by="_needs_more_than_the_graph"),
    Has("config:CacheConfig", ("block_size",), by="_needs_more_than_the_graph"),
    Has("config:ModelConfig", ("max_model_len",), by="_needs_more_than_the_graph"),
]

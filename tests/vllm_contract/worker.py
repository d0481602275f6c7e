# SPDX-License-Identifier: Apache-2.0
"""What the worker's side uses of vLLM on CPUs and in both model runners: backend, builder, layer, and the runners."""

from __future__ import annotations

from tests.vllm_contract.checks import Calls, Entry, Exists, Has, Overrides, Says, Takes, Wraps

BACKEND = "v1.attention.backend"
CPU = "v1.attention.backends.cpu_attn"
ATTENTION = "model_executor.layers.attention.attention:Attention"
RUNNER_V1 = "v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "v1.worker.gpu.model_runner:GPUModelRunner"
BATCH_V1 = "v1.worker.gpu_input_batch:InputBatch"
SCHEDULED = "v1.core.sched.output"
FORWARD = (
    "(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None)"
)

WORKER: list[Entry] = [
    # --- the backend
    Exists(f"{CPU}:CPUAttentionBackend", by="RocketKVCPUBackend"),
    Exists(f"{BACKEND}:AttentionType", by="RocketKVBackendBase.supports_attn_type"),
    Exists("v1.kv_cache_interface:AttentionSpec", by="RocketKVBackendBase.customize_spec"),
    Exists("v1.kv_cache_interface:FullAttentionSpec", by="RocketKVBackendBase.customize_spec"),
    Says("config.cache:CacheDType", "'auto'", by="RocketKVCPUBackend.supported_kv_cache_dtypes"),
    Calls("config:get_current_vllm_config_or_none", "()", by="current_config"),
    Has("v1.kv_cache_interface:FullAttentionSpec", ("non_causal",), by="RocketKVBackendBase.customize_spec"),
    Has(f"{BACKEND}:AttentionType", ("DECODER",), by="RocketKVBackendBase.supports_attn_type"),
    Says(
        f"{CPU}:CPUAttentionBackend.forward_includes_kv_cache_update",
        "bool = False",
        by="RocketKVBackendBase.forward_includes_kv_cache_update: the CPU backend's forward must not write, ours does",
    ),
    Says(
        "model_executor.layers.attention.attention:Attention.forward",
        "not self.attn_backend.forward_includes_kv_cache_update",
        by="RocketKVBackendBase.forward_includes_kv_cache_update: the runner's slots are wrong beyond an evicted prompt",
    ),
    Says(
        f"{CPU}:CPUAttentionBackend.supported_kv_cache_dtypes",
        "ClassVar[list['CacheDType']]",
        by="RocketKVCPUBackend.supported_kv_cache_dtypes",
    ),
    Says(
        f"{CPU}:CPUAttentionBackend.supported_kv_cache_layouts",
        "return (KVCacheLayout.LBHNC,)",
        by="RocketKVCPUBackend: pages are [heads, tokens, 2 * head_size], one run of bytes for each layer and block",
    ),
    Says(
        f"{CPU}:CPUAttentionBackend.get_supported_kernel_block_sizes",
        "return [MultipleOf(32)]",
        by="RocketKVCPUBackend: blocks are multiples of 32 and never split",
    ),
    *(
        Overrides(f"{CPU}:CPUAttentionBackend.{name}", "@staticmethod ()", by=f"{ours}.{name}")
        for name, ours in {
            "get_name": "RocketKVBackendBase",
            "get_impl_cls": "RocketKVCPUBackend",
            "get_builder_cls": "RocketKVCPUBackend",
        }.items()
    ),
    *(
        Overrides(f"{CPU}:CPUAttentionBackend.{name}", "@classmethod (cls)", by=f"RocketKVBackendBase.{name}")
        for name in ("supports_non_causal", "supports_kv_connector")
    ),
    Overrides(
        f"{CPU}:CPUAttentionBackend.supports_attn_type",
        "@classmethod (cls, attn_type)",
        by="RocketKVBackendBase.supports_attn_type",
    ),
    Overrides(
        f"{CPU}:CPUAttentionBackend.customize_spec",
        "@classmethod (cls, spec)",
        by="RocketKVBackendBase.customize_spec",
    ),
    Says(
        "v1.worker.utils:customize_attention_spec",
        "backend.customize_spec(spec)",
        by="RocketKVBackendBase.customize_spec: it is asked for every layer of a group",
    ),
    # --- one layer's step
    Exists(f"{BACKEND}:AttentionLayer", by="RocketKVImplBase.forward"),
    Has(f"{BACKEND}:AttentionLayer", ("_k_scale_float", "_v_scale_float"), by="RocketKVImpl._wrap"),
    Exists(f"{CPU}:CPUAttentionMetadata", by="RocketKVImplBase._dense"),
    Overrides(f"{CPU}:CPUAttentionBackendImpl.__init__", "(self, ...)", by="RocketKVImplBase.__init__"),
    Overrides(f"{CPU}:CPUAttentionBackendImpl.forward", FORWARD, by="RocketKVImplBase.forward"),
    Calls(
        f"{CPU}:CPUAttentionBackendImpl.do_kv_cache_update",
        "(layer, key, value, kv_cache, slot_mapping)",
        by="RocketKVImplBase._write_and_evict",
    ),
    Has(
        f"{CPU}:CPUAttentionBackendImpl",
        (
            "is_fp8_kv_cache",
            "kv_cache_dtype",
            "kv_sharing_target_layer_name",
            "logits_soft_cap",
            "num_heads",
            "scale",
        ),
        by="RocketKVImpl",
    ),
    Says(f"{CPU}:CPUAttentionMetadataBuilder._set_isa_to_layers", "layer.isa = self.isa", by="RocketKVImpl._wrap"),
    Says(f"{CPU}:CPUAttentionMetadataBuilder.__init__", "self._set_isa_to_layers(", by="RocketKVImpl._wrap"),
    # --- the metadata of a step
    Exists(f"{CPU}:CPUAttentionMetadata", by="RocketKVMetadata.dense"),
    Exists("config:VllmConfig", by="RocketKVMetadataBuilder.__init__"),
    Overrides(
        f"{BACKEND}:AttentionMetadataBuilder.__init__",
        "(self, kv_cache_spec, layer_names, vllm_config, device)",
        by="RocketKVMetadataBuilder.__init__",
    ),
    Overrides(
        f"{BACKEND}:AttentionMetadataBuilder.build",
        "(self, common_prefix_len, common_attn_metadata, fast_build=False)",
        by="RocketKVMetadataBuilder.build",
    ),
    Calls(
        f"{CPU}:CPUAttentionMetadataBuilder.__init__",
        "(kv_cache_spec, layer_names, vllm_config, device)",
        by="RocketKVMetadataBuilder.__init__",
    ),
    Calls(
        f"{CPU}:CPUAttentionMetadataBuilder.build",
        "(common_prefix_len, common_attn_metadata)",
        by="RocketKVMetadataBuilder._plain",
    ),
    Calls(f"{BACKEND}:CommonAttentionMetadata.replace", "(num_reqs=_)", by="RocketKVMetadataBuilder._dense"),
    Has(
        f"{BACKEND}:CommonAttentionMetadata",
        (
            "block_table_tensor",
            "max_query_len",
            "max_seq_len",
            "num_actual_tokens",
            "num_reqs",
            "query_start_loc",
            "query_start_loc_cpu",
            "replace",
            "seq_lens",
            "slot_mapping",
        ),
        by="StepPlanner.plan",
    ),
    Has("v1.kv_cache_interface:AttentionSpec", ("block_size", "head_size"), by="RocketKVMetadataBuilder.__init__"),
    Has("config:VllmConfig", ("model_config", "scheduler_config"), by="RocketKVMetadataBuilder.__init__"),
    Has("config:ModelConfig", ("max_model_len",), by="RocketKVMetadataBuilder.__init__"),
    Has(
        "config:SchedulerConfig",
        ("max_num_batched_tokens", "max_num_seqs"),
        by="RocketKVMetadataBuilder.__init__",
    ),
    # --- the layer's cache
    Calls(
        "_custom_ops:cpu_attn_reshape_and_cache",
        "(key, value, key_cache, value_cache, slot_mapping, isa, kv_cache_dtype=_)",
        by="_probe",
    ),
    # --- hooks
    # keep_layers_dense
    Wraps(f"{ATTENTION}.get_kv_cache_spec", "(self, vllm_config)", by="keep_layers_dense"),
    Has(ATTENTION, ("attn_backend", "layer_name"), by="keep_layers_dense"),
    Says(
        f"{ATTENTION}.__init__",
        "extract_layer_index(prefix)",
        by="keep_layers_dense: vLLM itself numbers layers like that, for --kv-cache-dtype-skip-layers",
    ),
    Calls("model_executor.models.utils:extract_layer_index", "(layer_name)", by="keep_layers_dense"),
    Says(
        "v1.worker.utils:customize_attention_spec",
        "(backend: type[AttentionBackend], spec: AttentionSpec)",
        by="keep_layers_dense: may go once the layer's name is given, too",
    ),
    # keep_request_options
    Wraps(f"{RUNNER_V1}._update_states", "(self, scheduler_output)", by="keep_request_options"),
    Wraps(f"{RUNNER_V2}.add_requests", "(self, scheduler_output)", by="keep_request_options"),
    Says(
        f"{RUNNER_V1}.execute_model",
        "self._update_states(scheduler_output)",
        by="keep_request_options: every step comes there, before its attention metadata is built",
    ),
    Says(
        f"{RUNNER_V2}.execute_model",
        "self.add_requests(scheduler_output)",
        by="keep_request_options: every step comes there, before its attention metadata is built",
    ),
    Exists(f"{SCHEDULED}:SchedulerOutput", by="keep_request_options"),
    Has(f"{SCHEDULED}:SchedulerOutput", ("finished_req_ids", "scheduled_new_reqs"), by="_note_options"),
    Has(f"{SCHEDULED}:NewRequestData", ("req_id", "sampling_params"), by="_note_options"),
    Has("sampling_params:SamplingParams", ("extra_args",), by="_note_options"),
    Has(RUNNER_V1, ("vllm_config",), by="_note_options"),
    Has(RUNNER_V2, ("vllm_config",), by="_note_options"),
    # give_requests_to_builders_v1
    Wraps(f"{RUNNER_V1}._build_attention_metadata", "(self, ...)", by="give_requests_to_builders_v1"),
    Has(RUNNER_V1, ("input_batch",), by="give_requests_to_builders_v1"),
    Has(BATCH_V1, ("num_prompt_tokens_cpu_tensor", "num_reqs", "req_ids"), by="give_requests_to_builders_v1"),
    Takes(f"{BATCH_V1}.req_ids", "@property (self)", by="give_requests_to_builders_v1"),
    Takes(f"{BATCH_V1}.num_reqs", "@property (self)", by="give_requests_to_builders_v1"),
    # give_requests_to_builders_v2
    Wraps(f"{RUNNER_V2}.prepare_inputs", "(self, ...)", by="give_requests_to_builders_v2"),
    Says(
        RUNNER_V2,
        "self.prepare_inputs(scheduler_output, batch_req_state, batch_desc, num_active_loras)",
        by="give_requests_to_builders_v2: every batch that is not a dummy comes from there",
    ),
    Has(RUNNER_V2, ("req_states",), by="give_requests_to_builders_v2"),
    Says("v1.worker.gpu.states:RequestState.prompt_len", "UvaBackedTensor(", by="give_requests_to_builders_v2"),
    Has("v1.worker.gpu.buffer_utils:UvaBackedTensor", ("np",), by="give_requests_to_builders_v2"),
    Has(
        "v1.worker.gpu.input_batch:InputBatch",
        ("idx_mapping_np", "prompt_lens", "req_ids"),
        by="give_requests_to_builders_v2",
    ),
    Says(
        "v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        "rswa_prefix_lens=input_batch.prompt_lens",
        by="give_requests_to_builders_v2: the way from the batch to the builder",
    ),
    Says(
        "v1.worker.gpu.attn_utils:build_attn_metadata",
        "rswa_prefix_lens=rswa_prefix_lens",
        by="give_requests_to_builders_v2: the way from the batch to the builder",
    ),
    # prompt_lens, request_configs
    Exists(f"{BACKEND}:CommonAttentionMetadata", by="prompt_lens"),
    Has(f"{BACKEND}:CommonAttentionMetadata", ("num_reqs", "rswa_prefix_lens"), by="prompt_lens"),
    # take_back_discarded_samples_on_cpu
    Wraps(f"{RUNNER_V1}._sample", "(self, ...)", by="take_back_discarded_samples_on_cpu"),
    Wraps(f"{RUNNER_V1}._bookkeeping_sync", "(self, ...)", by="take_back_discarded_samples_on_cpu"),
    Says(
        f"{RUNNER_V1}._bookkeeping_sync",
        "gen.set_offset(gen.get_offset() - 4)",
        by="take_back_discarded_samples_on_cpu: once this line is gone, so may our function be",
    ),
    Has(RUNNER_V1, ("discard_request_mask", "input_batch"), by="take_back_discarded_samples_on_cpu"),
    Has("v1.utils:CpuGpuBuffer", ("np",), by="take_back_discarded_samples_on_cpu"),
    Has(BATCH_V1, ("generators",), by="take_back_discarded_samples_on_cpu"),
]

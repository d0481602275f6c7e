# SPDX-License-Identifier: Apache-2.0
"""What start-up, options, refusals and metrics use of vLLM: every process, and the API process."""

from __future__ import annotations

from tests.vllm_contract.checks import Calls, Entry, Exists, Has, Pins, Says, Takes, TakesFieldsOf, Wraps

REGISTRY = "v1.attention.backends.registry"
CPU = "platforms.cpu:CpuPlatform"

START_UP: list[Entry] = [
    # --- the entry point
    Says("plugins:DEFAULT_PLUGINS_GROUP", "'vllm.general_plugins'", by="register: the entry point of pyproject.toml"),
    # --- hooks
    # register_backend_name
    Exists(f"{REGISTRY}:AttentionBackendEnum", by="register_backend_name"),
    Calls(f"{REGISTRY}:register_backend", "(backend, class_path)", by="register_backend_name"),
    Has(f"{REGISTRY}:AttentionBackendEnum", ("CUSTOM", "get_path", "is_overridden"), by="register_backend_name"),
    Calls(f"{REGISTRY}:AttentionBackendEnum.get_path", "()", by="is_selected"),
    Calls(f"{REGISTRY}:AttentionBackendEnum.is_overridden", "()", by="register_backend_name"),
    # check_configuration_at_startup
    Exists("platforms:current_platform", by="check_configuration_at_startup"),
    Wraps(f"{CPU}.check_and_update_config", "@classmethod (cls, vllm_config)", by="check_configuration_at_startup"),
    Wraps(
        "platforms.cuda:CudaPlatformBase.check_and_update_config",
        "@classmethod (cls, vllm_config)",
        by="check_configuration_at_startup",
    ),
    Says(
        "config:VllmConfig",
        "current_platform.check_and_update_config(self)",
        by="check_configuration_at_startup: a refusal must come while the VllmConfig is built",
    ),
    Has("config:VllmConfig", ("attention_config",), by="check_configuration_at_startup"),
    Has("config:AttentionConfig", ("backend", "backend_per_kind"), by="check_configuration_at_startup"),
    Says(
        "config:AttentionConfig.backend_per_kind",
        "dict[str, AttentionBackendEnum]",
        by="check_configuration_at_startup",
    ),
    # let_cpu_platform_select_us
    Calls("platforms.interface:Platform.is_cpu", "()", by="let_cpu_platform_select_us"),
    Wraps(
        f"{CPU}.get_attn_backend_cls",
        "@classmethod (cls, selected_backend, attn_selector_config, num_heads=None)",
        by="let_cpu_platform_select_us",
    ),
    Has(
        "v1.attention.selector:AttentionSelectorConfig",
        ("use_mla", "attn_type", "head_size"),
        by="let_cpu_platform_select_us",
    ),
    Says(
        "v1.attention.selector:AttentionSelectorConfig",
        "class AttentionSelectorConfig(NamedTuple)",
        by="let_cpu_platform_select_us: _asdict()",
    ),
    TakesFieldsOf(
        "v1.attention.backend:AttentionBackend.validate_configuration",
        "v1.attention.selector:AttentionSelectorConfig",
        also=("device_capability",),
        by="let_cpu_platform_select_us",
    ),
    Says("v1.attention.backend:AttentionType.DECODER", "'decoder'", by="let_cpu_platform_select_us"),
    # collect_engine_stats
    Wraps(
        "v1.metrics.loggers:StatLoggerManager.record",
        "(self, scheduler_stats, ..., engine_idx=None)",
        by="collect_engine_stats",
    ),
    Wraps("v1.metrics.loggers:StatLoggerManager.log_engine_initialized", "(self, ...)", by="collect_engine_stats"),
    Has("v1.metrics.loggers:StatLoggerManager", ("engine_indexes",), by="collect_engine_stats"),
    Has("v1.metrics.stats:SchedulerStats", ("num_kv_fetch_reqs_by_stage",), by="collect_engine_stats"),
    Says(
        "v1.metrics.stats:SchedulerStats.num_kv_fetch_reqs_by_stage",
        "dict[str, int]",
        by="publish_engine_stats: it crosses processes as the one free-form field",
    ),
    Says(
        "v1.engine.async_llm:AsyncLLM",
        "record(engine_idx=outputs.engine_index, scheduler_stats=outputs.scheduler_stats",
        by="collect_engine_stats: engine_idx must be a keyword",
    ),
    # refuse_streaming_input
    Wraps(
        "v1.engine.input_processor:InputProcessor.process_inputs",
        "(self, ..., resumable=False, ...)",
        by="refuse_streaming_input",
    ),
    Says(
        "v1.engine.async_llm:AsyncLLM",
        "resumable=True",
        by="refuse_streaming_input: resumable must be passed as a keyword",
    ),
    # check_request_options
    Wraps(
        "v1.engine.input_processor:InputProcessor._validate_params",
        "(self, params, supported_tasks)",
        by="check_request_options",
    ),
    Says(
        "v1.engine.input_processor:InputProcessor.process_inputs",
        "self._validate_params(params, supported_tasks)",
        by="check_request_options: every request is checked before it is sent to the engine core",
    ),
    Has("v1.engine.input_processor:InputProcessor", ("vllm_config",), by="check_request_options"),
    Has("sampling_params:SamplingParams", ("extra_args",), by="check_request_options"),
    Says("sampling_params:SamplingParams.extra_args", "dict[str, Any] | None", by="check_request_options"),
    *(
        Says(
            f"entrypoints.openai.{module}:{request}.to_sampling_params",
            "self.vllm_xargs if self.vllm_xargs else {}",
            by="check_request_options: what an HTTP body's vllm_xargs become",
        )
        for module, request in (
            ("completion.protocol", "CompletionRequest"),
            ("chat_completion.protocol", "ChatCompletionRequest"),
        )
    ),
    # check_request_options_before_a_stream
    Wraps(
        "v1.engine.async_llm:AsyncLLM.generate",
        "(self, prompt, sampling_params, request_id, ...)",
        by="check_request_options_before_a_stream",
    ),
    Has("v1.engine.async_llm:AsyncLLM", ("vllm_config",), by="check_request_options_before_a_stream"),
    *(
        Says(
            f"entrypoints.openai.{module}",
            "self.engine_client.generate(engine_input, sampling_params, ",
            by="check_request_options_before_a_stream: the call is made before the reply begins",
        )
        for module in (
            "completion.serving:OpenAIServingCompletion._create_completion",
            "chat_completion.serving:OpenAIServingChat._create_chat_completion",
        )
    ),
    # refuse_request_options_of_beam_search
    *(
        entry
        for name in ("chat_completion.protocol:ChatCompletionRequest", "completion.protocol:CompletionRequest")
        for entry in (
            Wraps(
                f"entrypoints.openai.{name}.to_beam_search_params",
                "(self, ...)",
                by="refuse_request_options_of_beam_search",
            ),
            Has(f"entrypoints.openai.{name}", ("vllm_xargs",), by="refuse_request_options_of_beam_search"),
        )
    ),
    Calls("config:ModelConfig.get_num_attention_heads", "(parallel_config)", by="_engine_of"),
    Calls("config:ModelConfig.get_num_kv_heads", "(parallel_config)", by="_engine_of"),
    Has("config:ModelConfig", ("dtype", "max_model_len"), by="_engine_of"),
    Has("config:VllmConfig", ("model_config", "parallel_config", "speculative_config"), by="_engine_of"),
    # --- options, refusals and what is logged
    Calls("logger:init_logger", "(name)", by="logger"),
    Says("logger:_VllmLogger", "def info_once(", by="_log_effective"),
    Has(
        "config:VllmConfig",
        (
            "additional_config",
            "cache_config",
            "kv_transfer_config",
            "model_config",
            "parallel_config",
            "quant_config",
            "speculative_config",
        ),
        by="check_vllm_config",
    ),
    Says("config:VllmConfig.additional_config", "additional_config: dict", by="config_of"),
    Has(
        "config:CacheConfig",
        (
            "block_size",
            "cache_dtype",
            "enable_prefix_caching",
            "kv_cache_dtype_skip_layers",
            "kv_offloading_size",
            "kv_sharing_fast_prefill",
            "user_specified_block_size",
        ),
        by="_refused_options",
    ),
    Has(
        "config:ParallelConfig",
        (
            "decode_context_parallel_size",
            "enable_dbo",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
        ),
        by="_refused_options",
    ),
    Has("config:SpeculativeConfig", ("method",), by="_refused_options"),
    Has("config:SchedulerConfig", ("disable_hybrid_kv_cache_manager",), by="_refused_skip_layers"),
    Calls("platforms.interface:Platform.support_hybrid_kv_cache", "()", by="_refused_skip_layers"),
    Calls("config:ModelConfig.get_total_num_hidden_layers", "()", by="_refused_skip_layers"),
    Says("config.speculative:SpeculativeMethod", "'ngram'", by="_refused_options"),
    Exists("envs:VLLM_BATCH_INVARIANT", by="_refused_options"),
    Exists("platforms:current_platform", by="_refused_options"),
    Has("platforms.interface:Platform", ("device_name",), by="_refused_options"),
    Calls("platforms.interface:Platform.is_cuda_alike", "()", by="_refused_options"),
    Takes(
        "config:VllmConfig.use_v2_model_runner",
        "@property (self)",
        by="_refused_options: a method would always be true",
    ),
    Has(
        "config:ModelConfig",
        (
            "hf_text_config",
            "is_attention_free",
            "is_encoder_decoder",
            "is_hybrid",
            "is_mm_prefix_lm",
            "dtype",
            "max_model_len",
            "runner_type",
            "use_mla",
            "uses_alibi",
        ),
        by="_refused_models",
    ),
    *(
        Takes(f"config:ModelConfig.{name}", "@property (self)", by="_refused_models: a method would always be true")
        for name in ("is_attention_free", "is_hybrid", "use_mla", "uses_alibi")
    ),
    *(
        Takes(
            f"config:ModelConfig.{name}",
            "@cached_property (self)",
            by="_refused_models: a method would always be true",
        )
        for name in ("is_encoder_decoder", "is_mm_prefix_lm")
    ),
    Says("config.scheduler:RunnerType", "'generate'", by="_refused_models"),
    Calls("config:ModelConfig.get_head_size", "()", by="_refused_models"),
    Calls("config:ModelConfig.get_sliding_window", "()", by="_refused_models"),
    Calls("config:ModelConfig.get_num_attention_heads", "(parallel_config)", by="check_vllm_config"),
    Calls("config:ModelConfig.get_num_kv_heads", "(parallel_config)", by="check_vllm_config"),
    Calls("config:ModelConfig.get_num_layers", "(parallel_config)", by="_log_effective"),
    Calls("v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes", "()", by="_refused_models"),
    Says(
        "v1.attention.backends.cpu_attn:CPUAttentionBackend.supported_kv_cache_dtypes",
        "['auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2']",
        by="_refused_kv_cache_dtypes",
    ),
    Calls(
        "v1.attention.backends.cpu_attn:_get_attn_isa",
        "(dtype, block_size, head_size, kv_cache_dtype)",
        by="_refused_kv_cache_dtypes",
    ),
    Says(
        "v1.attention.backends.cpu_attn:_get_attn_isa",
        "raise NotImplementedError(",
        by="_refused_kv_cache_dtypes: how it says that a processor cannot",
    ),
    Says(
        "model_executor.layers.attention.attention:Attention.__init__",
        "kv_cache_scheme is not None and kv_cache_dtype == 'auto'",
        by="kv_dtype_name: a checkpoint may ask for fp8",
    ),
    Calls("utils.torch_utils:kv_cache_dtype_str_to_dtype", "(kv_cache_dtype, model_config)", by="cache_dtype"),
    Calls(
        "v1.kv_cache_interface:FullAttentionSpec",
        "(block_size=_, num_kv_heads=_, head_size=_, dtype=_)",
        by="_log_effective",
    ),
    # --- kernels
    Pins(
        "torch",
        {"0.32": "2.13.0", "0.33": "2.14.0"},
        by="ops: the C++ library is linked against this torch, and Triton comes with it",
    ),
]

"""Entries of the ledger: each symbol of SGLang that this package builds on, the file of ours that does, and why.

The ledger has symbols that we replace, subclass, change or read by a private name, and symbols that our code must
follow exactly. It leaves out public functions that we only call. An entry is a function, a class with all its methods,
a constant, or an attribute: a field of a class or an assignment to `self` in its methods. Its path starts with the
module that defines it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

_SCHEDULE_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_OVERLAP = "sglang.srt.managers.overlap_utils"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GRAPHS = "sglang.srt.model_executor.runner"
_QUANTIZATION = "sglang.srt.layers.quantization"
_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_ATTENTION = "sglang.srt.layers.attention"
_FA3 = f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend"
_FLASHINFER = f"{_ATTENTION}.flashinfer_backend"
_TRTLLM_MHA = f"{_ATTENTION}.trtllm_mha_backend.TRTLLMHAAttnBackend"
_TRTLLM_MLA = f"{_ATTENTION}.trtllm_mla_backend.TRTLLMMLABackend"
_TRITON = f"{_ATTENTION}.triton_backend.TritonAttnBackend"
_TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator"
_LOGITS_OUTPUT = "sglang.srt.layers.logits_processor.LogitsProcessorOutput"
_RESULT = "sglang.srt.managers.utils.GenerationBatchResult"
_MAMBA_POOL = "sglang.srt.mem_cache.memory_pool.MambaPool"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_PARAMS = "sglang.srt.sampling.sampling_params"
_PENALTIES = "sglang.srt.sampling.penaltylib"
_RELOADS = "sglang.srt.managers.io_struct"
_CAPTURE = "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig"


@dataclass(frozen=True)
class Use:
    """One use of SGLang by a file of ours.

    Attributes:
        user: path of the file in the package.
        why: what the file does with the symbols. `user` is the subject of the sentence.
        symbols: dotted paths.
    """

    user: str
    why: str
    symbols: tuple[str, ...]


USES = (
    # --- arguments ----------------------------------------------------------------------------------------------------
    Use(
        "server_args/arguments.py",
        "writes and reads arguments while SGLang resolves them",
        (
            "sglang.srt.arg_groups.overrides.declare_resolution",
            "sglang.srt.arg_groups.model_override_base.resolving_view",
            "sglang.srt.arg_groups.model_override_base.resolved_view",
        ),
    ),
    Use(
        "server_args/arguments.py",
        "relies on it to keep the largest draft length in `_max_speculative_num_draft_tokens`",
        ("sglang.srt.arg_groups.overrides.max_speculative_num_draft_tokens",),
    ),
    Use(
        "engine/backends.py",
        "overrides the configuration while attention backends are built",
        ("sglang.srt.runtime_context.RuntimeContext.override",),
    ),
    Use(
        "draft/runner.py",
        "overrides the configuration while the drafter is built",
        ("sglang.srt.runtime_context._ConfigBag.override",),
    ),
    Use("hook_table.py", "registers the drafter's model class", ("sglang.srt.models.registry._ModelRegistry",)),
    # --- the worker and its cycle -----------------------------------------------------------------------------------
    Use(
        "engine/worker.py",
        "subclasses it: the interface that the scheduler calls",
        ("sglang.srt.speculative.base_spec_worker.BaseSpecWorker",),
    ),
    Use(
        "engine/worker.py",
        "relies on the order in which the scheduler sets up a worker, and on what it passes",
        (f"{_SCHEDULER}.maybe_init_draft_worker", f"{_SCHEDULER}.init_model_worker"),
    ),
    Use(
        "engine/worker.py",
        "relies on who restores the batch that a cycle overwrites, and on when results are relayed",
        (
            f"{_SCHEDULER}.run_batch",
            f"{_SCHEDULER}._forward_isolation",
            f"{_SCHEDULE_BATCH}.input_ids",
            f"{_SCHEDULE_BATCH}.out_cache_loc",
            f"{_SCHEDULE_BATCH}.forward_mode",
            f"{_SCHEDULE_BATCH}.seq_lens_cpu",
            f"{_SCHEDULE_BATCH}.seq_lens_sum",
            f"{_SCHEDULE_BATCH}.spec_info",
        ),
    ),
    Use(
        "engine/worker.py",
        "makes results as the scheduler reads them: tokens, lengths, and input of the next cycle",
        (
            _RESULT,
            f"{_LOGITS_OUTPUT}.hidden_states",
            f"{_RESULTS}._resolve_spec_v2_tokens",
            f"{_RESULTS}.process_batch_result_decode",
            f"{_RESULTS}.process_batch_result_prefill",
            f"{_RESULTS}._append_decode_hidden_states",
            f"{_RESULTS}.advance_grammar_fsm",
        ),
    ),
    Use(
        "engine/worker.py",
        "makes TARGET_VERIFY batches of blocks with it",
        (f"{_FORWARD_BATCH}.init_new",),
    ),
    Use(
        "engine/worker.py",
        "relies on which backends make the scheduler wait for exact lengths on the CPU",
        (f"{_OVERLAP}.decide_needs_cpu_seq_lens",),
    ),
    Use(
        "engine/cycle.py",
        "copies the target's batch for the drafter, with other lengths",
        (f"{_FORWARD_BATCH}.seq_lens", "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan"),
    ),
    Use(
        "draft/runner.py",
        "builds the drafter's worker from these, with its own configuration",
        (
            "sglang.srt.managers.tp_worker.TpModelWorker",
            "sglang.srt.managers.tp_worker.BaseTpWorker",
            "sglang.srt.configs.model_config.ModelConfig.from_server_args",
            "sglang.srt.configs.model_config.ModelConfig.dtype",
            "sglang.srt.layers.moe.utils.draft_model_build_scope",
        ),
    ),
    Use(
        "engine/relay.py",
        "subclasses them for the inputs that travel with a batch",
        (
            "sglang.srt.speculative.spec_info.SpecInput",
            "sglang.srt.speculative.spec_info.SpecInputType",
        ),
    ),
    Use(
        "attention/verify_input.py",
        "subclasses it for the drafts that the target verifies",
        ("sglang.srt.speculative.dflash_info.DFlashVerifyInput",),
    ),
    Use(
        "engine/relay.py",
        "makes the draft input that the scheduler, batches and the overlap relay read and write",
        (
            f"{_OVERLAP}.FutureMap",
            f"{_OVERLAP}.RelayPayload",
            f"{_OVERLAP}.resolve_forward_inputs",
            f"{_SCHEDULER}._relay_forward_payload",
            "sglang.srt.speculative.spec_utils.spec_prepare_for_decode",
            f"{_SCHEDULE_BATCH}.prepare_for_decode",
            f"{_SCHEDULE_BATCH}.filter_batch",
            f"{_SCHEDULE_BATCH}.merge_batch",
        ),
    ),
    Use(
        "memory/reservation.py",
        "reserves KV slots of a block as SGLang counts them",
        (
            f"{_SCHEDULE_BATCH}._new_tokens_required_next_decode_spec_v2",
            f"{_SCHEDULE_BATCH}.maybe_evict_swa",
            f"{_REQ}.decode_batch_idx",
            "sglang.srt.mem_cache.allocation.alloc_for_spec_decode",
            "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
            "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
        ),
    ),
    Use(
        "memory/pool_sizing.py",
        "sets which layers SGLang captures, and the drafter for whose KV it makes room",
        (
            f"{_CAPTURE}.dflash_use_aux_hidden_state",
            f"{_CAPTURE}.dflash_target_layer_ids",
            f"{_CAPTURE}.dflash_draft_num_layers",
            f"{_CAPTURE}.draft_model_config",
            f"{_CAPTURE}.draft_kv_num_layers",
        ),
    ),
    Use(
        "memory/pool_sizing.py",
        "adds the memory of cycles to what SGLang keeps free next to its pools",
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
            "sglang.srt.arg_groups.memory_hook.reserve_for_graph_mb",
        ),
    ),
    Use(
        "memory/limits.py",
        "sets token limits of a request after the scheduler has accepted it",
        (
            f"{_PARAMS}.SamplingParams.max_new_tokens",
            f"{_PARAMS}.SamplingParams.min_new_tokens",
        ),
    ),
    Use(
        "memory/limits.py",
        "relies on which tokens of a turn keep their KV for the next turn of a session",
        (
            "sglang.srt.managers.schedule_batch.ReqKvInfo.kv_committed_len",
            "sglang.srt.session.streaming_session.SessionSlot.kv",
            "sglang.srt.session.streaming_session.StreamingSession.try_match_prefix",
        ),
    ),
    Use(
        "memory/pool_sizing.py",
        "limits the batch sizes of graphs to the requests that may run",
        (f"{_GRAPHS}.base_cuda_graph_runner.get_batch_sizes_to_capture",),
    ),
    # --- graphs and attention ---------------------------------------------------------------------------------------
    Use(
        "engine/graphs.py",
        "relies on a replay returning the tensors of the capture, and keeping no others alive",
        ("sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one",),
    ),
    Use(
        "engine/graphs.py",
        "subclasses them for graphs of whole cycles: capture, replay and buffers",
        (
            f"{_GRAPHS}.decode_cuda_graph_runner.DecodeCudaGraphRunner",
            f"{_GRAPHS}.base_cuda_graph_runner.BaseCudaGraphRunner",
            f"{_GRAPHS}.base_runner.BaseRunner",
        ),
    ),
    Use(
        "engine/graphs.py",
        "replaces it, so that SGLang captures with our runner",
        (f"{_RUNNER}._decode_cuda_graph_runner_cls",),
    ),
    Use(
        "engine/graphs.py",
        "replaces it, so that the buffer has one row per request instead of one per verified token",
        (f"{_RUNNER}.max_shared_logits_buffer_rows", "sglang.srt.model_executor.graph_shared_output.GraphSharedOutput"),
    ),
    Use(
        "engine/backends.py",
        "builds attention backends for other draft lengths with it",
        (f"{_RUNNER}._get_attention_backend",),
    ),
    Use(
        "engine/graphs.py",
        "exchanges them while other draft lengths are verified",
        (f"{_RUNNER}.attn_backend", f"{_RUNNER}.decode_cuda_graph_runner"),
    ),
    Use(
        "engine/graphs.py",
        "relies on when a replay has read the tensors that the scheduler may change",
        (f"{_ATTENTION}.base_attn_backend.SharedReadEnds", f"{_SCHEDULER}._apply_war_barrier"),
    ),
    Use(
        "attention/plan.py",
        "relies on FA3's backend to prepare blocks on the GPU alone, so that a graph can hold it",
        (
            f"{_FA3}.init_forward_metadata_out_graph",
            f"{_FA3}.init_forward_metadata_in_graph",
            f"{_FA3}._init_full_cg_decode_metadata",
            f"{_FA3}._bind_metadata_buffers",
            f"{_FA3}._apply_cuda_graph_metadata",
            f"{_FA3}._set_decode_page_metadata",
            f"{_FA3}._get_swa_write_locations",
            f"{_FA3}._spec_read_seq_len_delta",
            "sglang.kernels.ops.attention.metadata.normal_decode_set_metadata",
        ),
    ),
    Use(
        "attention/plan.py",
        "widens a graph's page table for blocks that extend past the context length",
        (
            f"{_FA3}.max_context_len",
            f"{_FA3}.max_num_pages",
            f"{_FA3}.init_cuda_graph_state",
            f"{_TRTLLM_MHA}.max_context_len",
            f"{_TRTLLM_MHA}.max_num_pages",
            f"{_TRTLLM_MHA}.init_cuda_graph_state",
            f"{_TRTLLM_MHA}.init_forward_metadata",
            f"{_TRTLLM_MLA}._calc_padded_blocks",
            f"{_TRTLLM_MLA}.init_cuda_graph_state",
        ),
    ),
    Use(
        "attention/plan.py",
        "TRT-LLM's backends lay out blocks on the GPU alone, one of them where SGLang's runner records it in the graph",
        (
            f"{_TRTLLM_MHA}.init_forward_metadata_out_graph",
            f"{_TRTLLM_MHA}.init_forward_metadata_in_graph",
            f"{_TRTLLM_MHA}._build_cuda_graph_metadata",
            f"{_TRTLLM_MHA}._apply_cuda_graph_metadata",
            f"{_TRTLLM_MLA}.init_forward_metadata_out_graph",
            f"{_TRTLLM_MLA}._init_cuda_graph_metadata",
            f"{_TRTLLM_MLA}._apply_cuda_graph_metadata",
            f"{_GRAPHS}.decode_cuda_graph_runner.DecodeCudaGraphRunner._run_in_graph_metadata_prep",
            "sglang.kernels.ops.attention.trtllm_mha_graph_metadata.update_trtllm_mha_graph_metadata_kernel",
            "sglang.kernels.ops.attention.kv_indices.create_flashmla_kv_indices_triton",
        ),
    ),
    Use(
        "attention/plan.py",
        "relies on Triton's backend to prepare blocks on the GPU alone, so that a graph can hold it",
        (
            f"{_TRITON}.init_forward_metadata_out_graph",
            f"{_TRITON}._init_forward_metadata_out_graph",
            f"{_TRITON}._build_cuda_graph_forward_metadata",
            f"{_TRITON}._apply_cuda_graph_metadata",
            f"{_TRITON}._update_target_verify_buffers",
            f"{_TRITON}._target_verify_num_tokens_per_req",
            f"{_TRITON}._fill_kv_indptr_and_indices",
            f"{_TRITON}._fill_cuda_graph_swa_out_cache_loc",
            f"{_ATTENTION}.triton_backend.update_sliding_window_buffer",
            "sglang.kernels.ops.attention.kv_indices.create_flashinfer_kv_indices_triton",
        ),
    ),
    Use(
        "attention/plan.py",
        "replaces them, so that lists of KV slots have room for chains only, one list for all draft lengths",
        (
            f"{_FLASHINFER}.FlashInferAttnBackend.init_cuda_graph_state",
            f"{_FLASHINFER}.FlashInferAttnBackend.cuda_graph_kv_indices",
            f"{_FLASHINFER}.FlashInferAttnBackend.cuda_graph_custom_mask",
            f"{_TRITON}.init_cuda_graph_state",
            f"{_TRITON}.cuda_graph_kv_indices",
        ),
    ),
    Use(
        "attention/plan.py",
        "relies on the backend of linear attention to find state slots on the GPU alone, so that a graph can hold it",
        (
            f"{_ATTENTION}.hybrid_linear_attn_backend.HybridLinearAttnBackend.attn_backend_list",
            f"{_ATTENTION}.hybrid_linear_attn_backend.MambaAttnBackendBase.init_forward_metadata_out_graph",
            f"{_ATTENTION}.hybrid_linear_attn_backend.MambaAttnBackendBase._replay_metadata",
            f"{_ATTENTION}.hybrid_linear_attn_backend.MambaAttnBackendBase.init_cuda_graph_state",
            f"{_ATTENTION}.linear.gdn_backend.GDNAttnBackend.init_forward_metadata_out_graph",
            "sglang.kernels.ops.mamba.mamba_state_indices_triton.fused_replay_state_indices",
        ),
    ),
    Use(
        "attention/plan.py",
        "translates KV slots of a batch in a graph's buffers with it, and keeps them in its plan",
        (
            f"{_TRANSLATOR}.bind_runner_slots",
            f"{_TRANSLATOR}.own_plan",
            f"{_TRANSLATOR}.write_ids",
            f"{_TRANSLATOR}.is_translating",
            "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan",
        ),
    ),
    Use(
        "attention/fa3.py",
        "follows it in attention of blocks and prefills: where KV is written, arguments of FA3, where output goes",
        (
            f"{_FA3}.__init__",
            f"{_FA3}.get_paged_mha_kv_cache",
            f"{_FA3}.prepare_paged_mha_query",
            f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata",
            "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
            "sglang.srt.layers.radix_attention.RadixAttention",
            "sglang.srt.layers.radix_attention.AttentionType",
            f"{_FORWARD_BATCH}._attn_output",
        ),
    ),
    Use(
        "attention/fa3.py",
        "computes a schedule with it, unless it is switched off",
        (
            f"{_FA3}._get_scheduler_metadata",
            f"{_FA3}._disable_scheduler_metadata_precompute",
            f"{_FA3}._compute_scheduler_metadata",
        ),
    ),
    Use(
        "attention/fa3_prefill.py",
        "captures graphs for fewer requests in this class, and takes one of them by the requests of the replayed batch",
        (
            "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend",
            "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend",
            f"{_GRAPHS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner._capture_req_slots",
            f"{_GRAPHS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.load_batch",
            f"{_GRAPHS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture_one_shape",
            f"{_GRAPHS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
            f"{_GRAPHS}.shape_key.ShapeKey",
        ),
    ),
    Use(
        "attention/fa3_prefill.py",
        "has attention read the first requests of metadata that has a fixed number of them",
        (f"{_FA3}._init_full_cg_prefill_metadata",),
    ),
    Use(
        "attention/flashinfer_plan.py",
        "makes a block's plan in the graph, in this backend's buffers, as the backend does on the host",
        (
            f"{_FLASHINFER}.FlashInferAttnBackend.init_cuda_graph_state",
            f"{_FLASHINFER}.FlashInferAttnBackend.init_forward_metadata_out_graph",
            f"{_FLASHINFER}.FlashInferAttnBackend._prepare_cuda_graph_metadata",
            f"{_FLASHINFER}.FlashInferAttnBackend._create_prefill_wrappers",
            f"{_FLASHINFER}.FlashInferAttnBackend.forward_extend",
            f"{_FLASHINFER}.FlashInferAttnBackend._swa_kv_pool",
            f"{_FLASHINFER}.FlashInferAttnBackend._resolve_swa_kv_pool",
            f"{_FLASHINFER}.FlashInferIndicesUpdaterPrefill",
            f"{_FLASHINFER}.WrapperDispatch",
            "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.full_to_swa_index_mapping",
            "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa",
        ),
    ),
    Use(
        "attention/flashinfer_window.py",
        "adds the window and the split size, which this leaves out of a block's plan",
        (f"{_FLASHINFER}.FlashInferIndicesUpdaterPrefill.update_sliding_window",),
    ),
    # --- models and layers ------------------------------------------------------------------------------------------
    Use(
        "engine/hidden_states.py",
        "sets the captured layers of a dense Qwen3-VL as its method does, where its language model reads them",
        (
            "sglang.srt.models.qwen3_vl.Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture",
            "sglang.srt.models.qwen3_vl.Qwen3VLForConditionalGeneration.capture_aux_hidden_states",
            "sglang.srt.models.qwen3_vl.Qwen3LLMModel.forward",
            "sglang.srt.models.qwen2.Qwen2Model.layers_to_capture",
        ),
    ),
    Use(
        "draft/model.py",
        "subclasses them for the drafter's layers, with another attention",
        (
            "sglang.srt.models.qwen3.Qwen3DecoderLayer",
            "sglang.srt.models.qwen3.Qwen3Attention",
        ),
    ),
    Use(
        "checkpoint/quantization.py",
        "writes the configs that these read, with the names of layers that are not quantised",
        (
            "sglang.srt.model_loader.weight_utils.get_quant_config",
            f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig.from_config",
            f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig.get_quant_method",
            f"{_QUANTIZATION}.compressed_tensors.utils.should_ignore_layer",
            f"{_QUANTIZATION}.fp8.Fp8Config.from_config",
            f"{_QUANTIZATION}.fp8.Fp8Config.get_quant_method",
            f"{_QUANTIZATION}.utils.is_layer_skipped",
        ),
    ),
    Use(
        "draft/float8.py",
        "loads weights and scales into the parameters that these make",
        (
            f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8.create_weights",
            f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a16_fp8.CompressedTensorsW8A16Fp8.create_weights",
            f"{_QUANTIZATION}.fp8.Fp8LinearMethod.create_fp8_weight_",
        ),
    ),
    Use(
        "attention/qwen3.py",
        "computes norms, RoPE and KV write of a block as these do",
        (
            "sglang.srt.models.utils.apply_qk_norm",
            "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda",
            "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
            "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        ),
    ),
    Use(
        "ops/small_m_linear.py",
        "exchanges the method of unquantised layers for a subclass",
        (
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
            "sglang.srt.layers.quantization.base_config.LinearMethodBase",
            "sglang.srt.layers.quantization.base_config.QuantizeMethodBase",
            "sglang.srt.layers.linear.LinearBase",
            "sglang.srt.layers.linear.ColumnParallelLinear.forward",
            "sglang.srt.layers.linear.RowParallelLinear.forward",
            "sglang.srt.layers.quantization.unquant.initialize_bf16_gemm_config",
        ),
    ),
    Use(
        "ops/add_norm.py",
        "exchanges the dispatch of norms for calls with a residual",
        (
            "sglang.srt.layers.layernorm.RMSNorm.__init__",
            "sglang.srt.layers.layernorm._fp8_static_input_scale",
            "sglang.srt.layers.layernorm.RMSNorm._quant_linear",
            "sglang.srt.layers.layernorm.RMSNorm.fuse_input_quant",
            "sglang.srt.layers.layernorm.RMSNorm.forward_cuda",
            "sglang.srt.layers.layernorm.GemmaRMSNorm.__init__",
            "sglang.srt.layers.layernorm.GemmaRMSNorm.forward_cuda",
            "sglang.kernels.fused_op.BaseFusedOp",
        ),
    ),
    Use(
        "draft/int8.py",
        "exchanges the method of the drafter's unquantised layers for a subclass",
        (
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
            "sglang.srt.layers.linear.LinearBase",
        ),
    ),
    Use(
        "vocab/copied.py",
        "reads the weights of an lm_head whose method only multiplies by them",
        (
            "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod",
            "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding",
        ),
    ),
    Use(
        "sglang_dflash_cpu/packed_linear.py",
        "exchanges the methods of unquantised layers and lm_heads for subclasses",
        (
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod",
            "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod",
            "sglang.srt.layers.logits_processor.should_apply_lm_head_quant_method",
        ),
    ),
    Use(
        "attention/trees.py",
        "computes attention in place of the target's backend, and writes and moves its KV",
        (
            "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
            "sglang.srt.layers.radix_attention.RadixAttention",
            "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
            "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
            "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
            "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
        ),
    ),
    Use(
        "engine/verification.py",
        "adds the depths of nodes to the positions that SGLang computes from the roots",
        (
            f"{_FORWARD_BATCH}.compute_spec_mrope_positions",
            f"{_FORWARD_BATCH}.mrope_positions",
        ),
    ),
    Use(
        "ops/small_m_linear.py",
        "exchanges the activation of MLPs that only activate gate_up_proj's result",
        (
            "sglang.srt.models.llama.LlamaMLP",
            "sglang.srt.models.qwen2.Qwen2MLP",
            "sglang.srt.layers.activation.SiluAndMul",
            "sglang.srt.layers.dual_gemm.DualGemm.can_run",
            "sglang.srt.layers.quantization.fp8_activation.DenseSiluAndMulQuant.forward_decode",
        ),
    ),
    Use(
        "draft/context.py",
        "writes the drafter's keys and values into the pool's buffers",
        ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",),
    ),
    Use(
        "verify/logits.py",
        "switches off what an argmax of its logits does not need, and names what changes logits",
        (
            "sglang.srt.layers.logits_processor.LogitsProcessor.do_tensor_parallel_all_gather",
            "sglang.srt.layers.logits_processor.LogitsProcessor.logit_scale",
            "sglang.srt.layers.logits_processor.LogitsProcessor.use_fp32_lm_head",
            "sglang.srt.layers.logits_processor.LogitsProcessor.use_fp32_lm_head_output",
            "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits",
        ),
    ),
    # --- sampling -----------------------------------------------------------------------------------------------------
    Use(
        "verify/sampler.py",
        "samples the tokens of a block with SGLang's sampler and the steps before it",
        (
            "sglang.srt.layers.sampler.Sampler",
            f"{_RUNNER}.sample",
            _SAMPLING,
            f"{_PARAMS}.TOP_K_ALL",
            "sglang.srt.speculative.spec_utils.GrammarTree",
            "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
        ),
    ),
    Use(
        "verify/sampler.py",
        "fills them for every token of a block if the request asks for log probabilities",
        (
            f"{_RESULTS}._apply_decode_logprobs",
            f"{_RESULTS}._normalize_decode_outputs",
            f"{_RESULT}.copy_to_cpu",
            f"{_LOGITS_OUTPUT}.next_token_logprobs",
            f"{_LOGITS_OUTPUT}.next_token_top_logprobs_val",
            f"{_LOGITS_OUTPUT}.next_token_top_logprobs_idx",
            f"{_LOGITS_OUTPUT}.next_token_token_ids_logprobs_val",
            f"{_LOGITS_OUTPUT}.next_token_token_ids_logprobs_idx",
        ),
    ),
    Use(
        "requests/answer_tokens.py",
        "lowered by the tokens that answers have not gained",
        ("sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.num_generated_tokens",),
    ),
    Use(
        "verify/failures.py",
        "applies custom logit processors as these do",
        (
            "sglang.srt.layers.sampler.apply_custom_logit_processor",
            f"{_SAMPLING.rpartition('.')[0]}.ProcessorEntry",
        ),
    ),
    Use(
        "requests/failing.py",
        "ends a failing request as these do",
        (
            f"{_RESULT}.extra_keep_alive_refs",
            f"{_RESULTS}.process_batch_result_decode",
            f"{_REQ}.discard_output_reason",
        ),
    ),
    Use(
        "requests/finishing.py",
        "checks accepted tokens as these check one token, and cuts the output where it ends",
        (
            f"{_REQ}.update_finish_state",
            f"{_REQ}._check_token_based_finish",
            f"{_REQ}._cap_finished_len_at_max_new_tokens",
            f"{_REQ}.to_finish",
            f"{_REQ}.grammar",
            f"{_REQ}.output_ids",
            f"{_REQ}.output_ids_through_stop",
        ),
    ),
    Use(
        "requests/finishing.py",
        "counts reasoning tokens as these do, for several accepted tokens at once",
        (
            f"{_REQ}.reasoning_tokens",
            f"{_REQ}._think_start_match_len",
            f"{_REQ}.update_reasoning_tokens",
            f"{_REQ}.update_self_opened_reasoning_tokens",
        ),
    ),
    Use(
        "requests/stop_regex.py",
        "decides whether and where a stop_regex ends a request as these do",
        (
            f"{_REQ}._locate_str_stop_finished_len",
            f"{_REQ}._stop_match_tail_len",
            f"{_REQ}.finished_reason",
            f"{_REQ}.finished_len",
        ),
    ),
    Use(
        "verify/penalties.py",
        "rebuilds them for a retracted request, and applies them to blocks as these define them",
        (
            f"{_SAMPLING}.acc_additive_penalties",
            f"{_SAMPLING}.acc_scaling_penalties",
            f"{_PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer",
            f"{_PENALTIES}.presence_penalty.BatchedPresencePenalizer",
            f"{_PENALTIES}.repetition_penalty.BatchedRepetitionPenalizer",
            f"{_PENALTIES}.min_new_tokens.BatchedMinNewTokensPenalizer",
        ),
    ),
    Use(
        "requests/received.py",
        "checks and resets its fields, and has SGLang make a request that it then refuses",
        (
            f"{_RELOADS}.TokenizedGenerateReqInput",
            f"{_SCHEDULER}._handle_generate_request",
            f"{_PARAMS}.SamplingParams.normalize",
            f"{_PARAMS}.SamplingParams.verify",
        ),
    ),
    Use(
        "requests/received.py",
        "changes them in a refused request",
        (
            f"{_REQ}.return_routed_experts",
            f"{_REQ}.return_indexer_topk",
            f"{_REQ}.return_sampling_mask",
            f"{_REQ}.custom_logit_processor",
            f"{_REQ}.sampling_params",
        ),
    ),
    Use(
        "requests/validate.py",
        "classifies every field of it as supported or refused",
        (f"{_PARAMS}.SamplingParams",),
    ),
    Use(
        "requests/update_weights.py",
        "sets it to the target if the request does not choose",
        (
            f"{_RELOADS}.BeginWeightUpdateReqInput.selector",
            f"{_RELOADS}.UpdateWeightsFromTensorReqInput.selector",
            f"{_RELOADS}.UpdateWeightsFromDistributedReqInput.selector",
        ),
    ),
    Use(
        "requests/admin.py",
        "exchanges handlers in its table",
        (f"{_SCHEDULER}._request_dispatcher", "sglang.utils.TypeBasedDispatcher"),
    ),
    Use(
        "requests/admin.py",
        "puts the message in rid if the answer has no field for it; checks and completes tags",
        (
            f"{_RELOADS}.BaseReq.rid",
            f"{_RELOADS}.ReleaseMemoryOccupationReqInput.tags",
            f"{_RELOADS}.ResumeMemoryOccupationReqInput.tags",
        ),
    ),
    Use(
        "requests/update_weights.py",
        "copies the updater without the drafter, for an update of the target",
        ("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.draft_worker",),
    ),
    Use(
        "requests/update_weights.py",
        "times updates of the drafter with it",
        ("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._observe_weight_load",),
    ),
    # --- recurrent targets ------------------------------------------------------------------------------------------
    Use(
        "recurrent/pool.py",
        "stores the inputs of verified tokens where it stores states, in another layout",
        (
            f"{_MAMBA_POOL}.SpeculativeState",
            f"{_MAMBA_POOL}.State",
            f"{_MAMBA_POOL}.mamba_cache",
            f"{_MAMBA_POOL}.mem_usage",
            "sglang.srt.configs.mamba_utils.Mamba2StateShape",
        ),
    ),
    Use(
        "recurrent/verify.py",
        "relies on how a layer calls its backend, and on where the slots and the inputs of its requests are",
        (
            f"{_ATTENTION}.linear.gdn_backend.GDNAttnBackend._init_target_verify_qkv_routing",
            f"{_ATTENTION}.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward_extend",
            f"{_ATTENTION}.hybrid_linear_attn_backend.MambaAttnBackendBase._forward_metadata",
            "sglang.srt.layers.radix_linear_attention.RadixLinearAttention",
        ),
    ),
    Use(
        "ops/reference/convolve_nodes.py",
        "rounds as convolutions of decoding requests do",
        (
            "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
            "sglang.kernels.ops.mamba.causal_conv1d_triton._causal_conv1d_update_kernel",
        ),
    ),
    Use(
        "ops/reference/delta_rule.py",
        "rounds states as decoding does",
        (
            "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
            "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel",
        ),
    ),
    Use(
        "recurrent/state.py",
        "relies on the state slots of a request, and on the slot in which the scheduler expects each boundary's state",
        (
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.req_index_to_mamba_index_mapping",
            "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.req_index_to_mamba_ping_pong_track_buffer_mapping",
            f"{_SCHEDULE_BATCH}._mamba_radix_cache_v2_req_prepare_for_extend",
            f"{_RESULTS}._mamba_check_track_boundary",
            f"{_RESULTS}._mamba_prefix_cache_update",
            "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent._select_finished_checkpoint",
            "sglang.srt.runtime_context.mamba_track_grid",
        ),
    ),
    Use(
        "recurrent/prefix_cache.py",
        "reads how many tokens of a finished request are kept, and how many of them a result has committed",
        (f"{_REQ}.owned_kv_len", f"{_RESULTS}._resolve_spec_v2_tokens"),
    ),
    Use(
        "recurrent/prefix_cache.py",
        "leaves them out of the batch of a cycle",
        tuple(f"{_SCHEDULE_BATCH}.mamba_track_{name}" for name in ("indices", "mask", "seqlens")),
    ),
    Use(
        "recurrent/pool.py",
        "asks it for the state slots per request, and hides the algorithm while it divides memory",
        (
            f"{_CONFIGURATOR}._calculate_mamba_ratio",
            f"{_CONFIGURATOR}.spec_algorithm",
        ),
    ),
    # --- a machine without a GPU ------------------------------------------------------------------------------------
    Use(
        "sglang_dflash_cpu/torch_native.py",
        "subclasses them for our backend",
        (
            f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend",
            f"{_ATTENTION}.base_attn_backend.AttentionBackend",
        ),
    ),
    Use(
        "sglang_dflash_cpu/host_pool.py",
        "changes how much host memory is left, and how page numbers of KV that travels are read",
        (
            "sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES",
            "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices",
        ),
    ),
    Use(
        "sglang_dflash_cpu/plugin.py",
        "replaces SGLang's backend, and adds ours to the deterministic ones",
        (
            f"{_ATTENTION}.attention_registry.register_attention_backend",
            "sglang.srt.arg_groups.choices.add_deterministic_attention_backend_choices",
        ),
    ),
    Use(
        "sglang_dflash_cpu/platform.py",
        "reads the same environment variable",
        ("sglang.srt.platforms._is_cpu_available",),
    ),
    Use(
        "server_args/tokenizer_workers.py",
        "names the application that tokenizer workers import, and relies on what it does there",
        (
            "sglang.srt.environ.Envs.SGLANG_HTTP_SERVER_APP_PATH",
            "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
            "sglang.srt.entrypoints.http_server.init_multi_tokenizer",
        ),
    ),
    # --- the plugin -------------------------------------------------------------------------------------------------
    Use(
        "plugin.py",
        "hooked: every DFLASH server calls it",
        (
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
            f"{_SCHEDULER}.__init__",
        ),
    ),
    Use(
        "plugin.py",
        "relies on when plugins are loaded, and on how their errors and those of hooks are handled",
        (
            "sglang.srt.plugins.load_plugins",
            "sglang.srt.plugins.hook_registry.HookRegistry",
            "sglang.srt.plugins.hook_registry._wrap_fn",
        ),
    ),
    Use(
        "hooks.py",
        "replaces the search for other names of hooked methods",
        ("sglang.srt.plugins.hook_registry._propagate_patch",),
    ),
)


def manifest(hooked: tuple[Use, ...]) -> dict[str, list[Use]]:
    """Return the uses of each symbol: those of `USES` and of the given hooks."""
    by_symbol: dict[str, list[Use]] = defaultdict(list)
    for use in (*hooked, *USES):
        for symbol in use.symbols:
            by_symbol[symbol].append(use)
    return dict(sorted(by_symbol.items()))

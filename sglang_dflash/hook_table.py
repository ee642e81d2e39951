"""The hooks into SGLang, why each one exists, and what upstream change makes it unnecessary."""

from __future__ import annotations

import logging

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils.common import is_cuda, is_flashinfer_available

from sglang_dflash import hooks
from sglang_dflash.attention import fa3, fa3_prefill, qwen3
from sglang_dflash.attention.flashinfer_window import FLASHINFER_HOOKS
from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import ARCHITECTURE
from sglang_dflash.engine import hidden_states, transfer
from sglang_dflash.hooks import CREATE_WORKER, Hook
from sglang_dflash.memory import limits, pool_sizing, stored_kv
from sglang_dflash.recurrent import pool as recurrent_pool
from sglang_dflash.recurrent import prefix_cache
from sglang_dflash.recurrent import verify as recurrent_verify
from sglang_dflash.requests import (
    admin,
    answer_tokens,
    failing,
    finishing,
    received,
    stop_regex,
    tool_calls,
    update_weights,
    validate,
)
from sglang_dflash.server_args import arguments
from sglang_dflash.verify import failures, logits, sampler
from sglang_dflash.version import __version__

logger = logging.getLogger(__name__)


def create_worker(original, algorithm, server_args):
    """AROUND `SpeculativeAlgorithm.create_worker`: DFLASH is served by :class:`DFlashWorker`."""
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    hooks.verify()
    # Imported here: only a scheduler process needs SGLang's models, and importing them all takes seconds.
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.draft.model import DFlashDraftModel
    from sglang_dflash.engine.worker import DFlashWorker

    ModelRegistry.models[ARCHITECTURE] = DFlashDraftModel
    logger.info("DFLASH is served by sglang-dflash %s (%s).", __version__, DFlashWorker.__qualname__)
    return DFlashWorker


def report_worker(result, scheduler, recv_req):
    """AFTER `Scheduler.get_internal_state`: `/server_info` says which worker serves DFLASH."""
    if scheduler.spec_algorithm.is_dflash():
        result.internal_state["sglang_dflash"] = scheduler.draft_worker.describe()
    return result


_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RESULTS = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
_WEIGHT_UPDATER = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
_WEIGHT_LOADER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

HOOKS = [
    Hook(
        target=CREATE_WORKER,
        kind=HookType.AROUND,
        function=create_worker,
        why="SGLang has no registry for the worker of a built-in algorithm",
        until="SpeculativeAlgorithm.register accepts DFLASH",
    ),
    Hook(
        target="sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse",
        kind=HookType.AROUND,
        function=formats.parse_drafter,
        why="transformers cannot read the speculators format, and drops windows that a config leaves implicit",
        until="SGLang reads DFlash drafters of every format itself",
    ),
    Hook(
        target="sglang.srt.arg_groups.validation_hook.handle_aux_hidden_state_capture",
        kind=HookType.AFTER,
        function=arguments.begin_resolution,
        why="--speculative-eagle-topk, also with its default, moves target and drafter to another attention backend",
        until="is_no_spec_infer_or_topk_one asks for the algorithm, too",
    ),
    Hook(
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        kind=HookType.AROUND,
        function=arguments.resolve_speculative_arguments,
        why="a drafter path that does not exist fails inside transformers, and the error does not name the flag",
        until="SGLang checks --speculative-draft-model-path itself",
    ),
    Hook(
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        kind=HookType.AFTER,
        function=validate.check_preferred_params,
        why="SGLang adds --preferred-sampling-params to requests that have been checked",
        until="SGLang checks the sampling parameters of a request after it has added these",
    ),
    Hook(
        target="sglang.srt.arg_groups.speculative_hook._handle_dflash",
        kind=HookType.REPLACE,
        function=arguments.handle_dflash,
        why="the in-tree checks refuse the CPU, rewrite the drafter's backend and only warn of a wrong block size",
        until="SGLang lets the worker class check its own arguments",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"
        "._resolve_dflash_aux_hidden_state",
        kind=HookType.AROUND,
        function=pool_sizing.resolve_target_capture,
        why="the target layers to capture are read once, from the checkpoint's config, by this package",
        until="SGLang lets the worker name the layers to capture",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        kind=HookType.AROUND,
        function=pool_sizing.leave_memory_for_cycles,
        why="the KV pools would take the memory that the logits of whole blocks and the sampler need",
        until="SGLang lets the worker say how much memory it needs outside the pools",
    ),
    Hook(
        target="sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
        kind=HookType.AROUND,
        function=recurrent_pool.allocate_states,
        why="keeping the state after each verified token takes a hundred times the memory of keeping its inputs",
        until="SGLang keeps the inputs of verified tokens for DFLASH with Gated DeltaNet",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        kind=HookType.AROUND,
        function=recurrent_pool.leave_memory_for_inputs,
        why="it reserves memory for the state after each verified token, which is not kept here",
        until="it reserves what the pool of recurrent states really allocates",
    ),
    Hook(
        target="sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        kind=HookType.AROUND,
        function=recurrent_verify.verify_nodes,
        why="its verification changes states, keeps a state or an input for every slot of the pool, and does not round "
        "as decoding does",
        until="it verifies trees without a state per node, keeps inputs for running requests only, and rounds as "
        "decoding does",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._mamba_can_cache_finished_req",
        kind=HookType.AROUND,
        function=prefix_cache.can_cache_finished_request,
        why="without overlap scheduling, a block that runs past the end of an answer or a grammar may overwrite the "
        "state that the prefix cache keeps, or keep it from caching the answer",
        until="it compares the retained tokens with the accepted ones for every kind of kept state",
    ),
    Hook(
        target=f"{_RESULTS}.process_batch_result_decode",
        kind=HookType.AFTER,
        function=prefix_cache.commit_after_result,
        why="recurrent states must not go further than answers that end inside a block",
        until="a worker is told of the requests that a result has ended",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        kind=HookType.AROUND,
        function=limits.req_to_token_headroom,
        why="with page size 1, the slots reserved for a request at the context limit exceed its row of req_to_token",
        until="get_req_to_token_extra_context_len covers get_alloc_reserve_per_decode for every page size",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind=HookType.AFTER,
        function=limits.leave_room_for_blocks,
        why="a request as large as the KV pool would fail with a 500 once its next block does not fit",
        until="init_req_max_new_tokens subtracts get_alloc_reserve_per_decode",
    ),
    Hook(
        target="sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind=HookType.AFTER,
        function=limits.leave_last_token_out,
        why="the next turn of a streaming session would read a rejected draft's KV as the last token's",
        until="SGLang does not count KV for the last token of a finished request",
    ),
    Hook(
        target="sglang.srt.managers.cache_controller.storage_model_name",
        kind=HookType.AROUND,
        function=stored_kv.storage_model_name,
        why="KV in storage is named after the target, and another drafter's would be taken for this one's",
        until="names of stored KV have the drafter, too",
    ),
    Hook(
        target="sglang.srt.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input",
        kind=HookType.AROUND,
        function=transfer.build_draft_input,
        why="requests that arrive from a prefill server would get the input of SGLang's own worker",
        until="SGLang asks the worker for it",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_new_prebuilt_batch",
        kind=HookType.AFTER,
        function=transfer.begin_transferred,
        why="requests that arrive from a prefill server would have the penalties, bigrams and texts of others",
        until="SGLang tells the worker of requests that it has not prefilled",
    ),
    Hook(
        target="sglang.srt.disaggregation.utils.get_pd_kv_layout",
        kind=HookType.AROUND,
        function=transfer.describe_drafter,
        why="prefill and decode server must have the same drafter",
        until="SGLang compares the drafters of both servers",
    ),
    Hook(
        target="sglang.srt.disaggregation.common.conn.CommonKVManager._resolve_rank_mapping",
        kind=HookType.AROUND,
        function=transfer.check_prefill_server,
        why="a prefill server without the drafter is accepted, and its KV is missing",
        until="SGLang compares the drafters of both servers",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.process_batch_result_disagg_prefill",
        kind=HookType.BEFORE,
        function=failing.fail_prefilled,
        why="a request without a first token to choose must end with an error",
        until="SGLang ends only the request concerned, with an error",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        kind=HookType.AROUND,
        function=validate.generate_request,
        why="a sampling parameter of a wrong type and a huge n get a 500 or end the server",
        until="SGLang checks the types and ranges of request fields when it reads them",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        kind=HookType.AROUND,
        function=received.handle_generate_request,
        why="requests of other front ends, whose values nothing has checked, end the server",
        until="SGLang checks values where the scheduler receives them",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_utils.validate_dflash_request",
        kind=HookType.REPLACE,
        function=received.refuse_request,
        why="the in-tree check accepts parameters that its worker then ignores",
        until="SGLang asks the worker which requests it supports",
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        kind=HookType.AROUND,
        function=validate.keep_embeddings_apart,
        why="a prefill batch with both embeddings and tokens as prompts ends the server",
        until="SGLang embeds the tokens of such a batch, or never builds one",
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        kind=HookType.AROUND,
        function=logits.skip_widening,
        why="copying the logits of all verified tokens to float32 costs more than the argmax that follows",
        until="LogitsProcessor can leave TARGET_VERIFY logits in the model's dtype",
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        kind=HookType.AROUND,
        function=logits.skip_lm_head,
        why="an argmax by bounds of the logits needs hidden states in their place",
        until="LogitsProcessor can leave the lm_head to the caller",
    ),
    Hook(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store",
        kind=HookType.AROUND,
        function=hidden_states.append_last_hidden_states,
        why="SGLang captures either the drafter's features or the output of return_hidden_states, not both",
        until="LogitsProcessorOutput has one field for each",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner_components.attention_backend_setup"
        ".configure_aux_hidden_state_capture",
        kind=HookType.AROUND,
        function=hidden_states.capture_layers,
        why="Qwen3-VL calls set_dflash_layers_to_capture on its language model, which lacks it",
        until="Qwen3LLMModel has set_dflash_layers_to_capture",
    ),
    Hook(
        target="sglang.srt.models.qwen3.Qwen3Attention.forward",
        kind=HookType.AROUND,
        function=qwen3.forward,
        why="norms, RoPE and KV write of a block are three kernel launches per layer; one is enough",
        until="Qwen3Attention fuses them on CUDA, as it does on ROCm",
    ),
    Hook(
        target=f"{_WEIGHT_UPDATER}.update_weights_from_disk",
        kind=HookType.AROUND,
        function=update_weights.update_weights_from_disk,
        why="the checkpoint of the request would be loaded into both target and drafter",
        until="the request says whose weights it updates",
    ),
    Hook(
        target=f"{_WEIGHT_UPDATER}.update_weights_from_ipc",
        kind=HookType.AROUND,
        function=update_weights.update_weights_from_ipc,
        why="the target's tensors would be loaded into the drafter too",
        until="the request says whose weights it updates",
    ),
    *(
        Hook(
            target=f"{_WEIGHT_UPDATER}.{method}",
            kind=HookType.AROUND,
            function=update_weights.update_weights_by_tensors,
            why="by default each tensor would be loaded into both target and drafter",
            until="selector=all loads each tensor into the model that it belongs to",
        )
        for method in ("begin_weight_update", "update_weights_from_tensor", "update_weights_from_distributed")
    ),
    Hook(
        target=f"{_WEIGHT_UPDATER}.end_weight_update",
        kind=HookType.AROUND,
        function=update_weights.end_weight_update,
        why="copies of weights (float8, int8, packed for a CPU) are stale after another process writes the weights",
        until="SGLang tells every model that its weights have changed, as post_load_weights does for some",
    ),
    *(
        Hook(
            target=target,
            kind=HookType.AROUND,
            function=update_weights.receive_on_all_ranks,
            why="tensors that one rank cannot read would end the server, or be missing on that rank only",
            until="SGLang answers a failed weight update with an error, the same on all ranks",
        )
        for target in (
            "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank",
            f"{_WEIGHT_LOADER}.receive_weights_from_distributed",
        )
    ),
    *(
        Hook(
            target=f"{_WEIGHT_LOADER}.{method}",
            kind=HookType.AROUND,
            function=update_weights.load_on_all_ranks,
            why="weights that one rank cannot load would end the server, or be updated on some ranks only",
            until="SGLang answers a failed weight update with an error, the same on all ranks",
        )
        for method in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "load_weights_from_distributed",
            "update_weights_from_ipc",
        )
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._update_model_path_info",
        kind=HookType.AROUND,
        function=update_weights.update_model_path_info,
        why="after an update of the drafter, the server would report the drafter's path as its model",
        until="the request says whose weights it updates",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        kind=HookType.AFTER,
        function=admin.answer_errors,
        why="an administrative request that fails ends the scheduler",
        until="SGLang answers a request whose handler raises with an error",
    ),
    Hook(
        target="sglang.srt.managers.communicator.FanOutCommunicator.queueing_call",
        kind=HookType.AROUND,
        function=admin.raise_errors,
        why="the answers of some administrative requests have no field for an error",
        until="these answers have a field for an error",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.configure_logging",
        kind=HookType.AROUND,
        function=admin.configure_logging,
        why="an unknown log level gets a 500 without a message",
        until="SGLang answers an unknown log level with a 400",
    ),
    Hook(
        target=f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.set_internal_state",
        kind=HookType.AROUND,
        function=admin.set_internal_state,
        why="acceptance thresholds would be accepted, shown and ignored",
        until="SGLang asks the worker which settings it supports",
    ),
    *(
        Hook(
            target=f"{_WEIGHT_UPDATER}.{method}",
            kind=HookType.AROUND,
            function=admin.check_memory_tags,
            why="releasing or resuming memory twice ends the server",
            until="SGLang checks the tags before it releases or resumes anything",
        )
        for method in ("release_memory_occupation", "resume_memory_occupation")
    ),
    Hook(
        target=f"{_COMPONENTS}.profiler_manager.SchedulerProfilerManager._profile",
        kind=HookType.AROUND,
        function=admin.profile,
        why="a profile that cannot be written ends the server later, in a step",
        until="SGLang checks the fields of a profile request when it arrives",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        kind=HookType.AFTER,
        function=sampler.needs_the_last_result,
        why="custom logit processors, and grammars in mixed batches, need the request's last tokens, which overlap "
        "scheduling does not have yet",
        until="SGLang passes output tokens to custom logit processors, and mixed batches wait for grammars",
    ),
    Hook(
        target="sglang.srt.layers.sampler.Sampler._sample_from_probs",
        kind=HookType.AROUND,
        function=sampler.sample_by_row,
        why="a prefill draws by other noise than decode cycles, and the tokens of a request with a seed depend on the "
        "filters of other requests in its batch",
        until="a worker can bring a draw of its own, and the sampler chooses the order of its filters per request",
    ),
    Hook(
        target="sglang.srt.layers.sampler.Sampler._preprocess_logits",
        kind=HookType.AROUND,
        function=failures.preprocess_logits,
        why="logits without a token to choose, or a custom logit processor that raises, end the server",
        until="SGLang ends only the request concerned, with an error",
    ),
    Hook(
        target=f"{_RESULTS}.process_batch_result_prefill",
        kind=HookType.BEFORE,
        function=failing.fail_prefilled,
        why="a request without a first token to choose must end with an error",
        until="SGLang ends only the request concerned, with an error",
    ),
    Hook(
        target=f"{_RESULTS}._resolve_spec_v2_tokens",
        kind=HookType.AFTER,
        function=failing.fail_decoded,
        why="a request without a next token to choose must end with an error",
        until="SGLang ends only the request concerned, with an error",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        kind=HookType.AFTER,
        function=received.make_harmless,
        why="a refused request is still prefilled, and what is wrong with it fails there again",
        until="SGLang answers a refused request without running it",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        kind=HookType.AROUND,
        function=finishing.update_finish_state,
        why="among the tokens of one cycle, SGLang may miss the first that ends the request, and it counts tokens "
        "after the end as reasoning",
        until="SGLang ends a request at the first token that ends it, and counts none after it",
    ),
    Hook(
        target="sglang.srt.session.session_controller.Session._concat_token_arrays",
        kind=HookType.AROUND,
        function=finishing.leave_out_what_follows,
        why="the next turn of a session would get the tokens that a cycle accepted after the end of the answer",
        until="a session's next turn gets a request's output up to `finished_len`",
    ),
    Hook(
        target="sglang.srt.function_call.function_call_parser.FunctionCallParser.__init__",
        kind=HookType.AFTER,
        function=tool_calls.keep_tokenizer,
        why="`parse_stream_chunk` needs the tokenizer",
        until="the next hook ends",
    ),
    Hook(
        target="sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
        kind=HookType.AROUND,
        function=tool_calls.parse_stream_chunk,
        why="parsers of streamed tool calls lose text and arguments where a chunk has several tokens",
        until="every parser takes chunks of several tokens",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        kind=HookType.AROUND,
        function=stop_regex.check_str_based_finish,
        why="a stop_regex with exponential backtracking blocks the scheduler",
        until="SGLang limits the time of a search",
    ),
    Hook(
        target=f"{_RESULTS}.process_batch_result_decode",
        kind=HookType.AROUND,
        function=answer_tokens.process_decode_result,
        why="the reported tokens of a cycle include those that no client sees",
        until="SGLang reports the tokens that it appends to answers",
    ),
    Hook(
        target=f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        kind=HookType.AROUND,
        function=answer_tokens.report_decode_stats,
        why="the reported tokens of a cycle include those that no client sees",
        until="SGLang reports the tokens that it appends to answers",
    ),
    Hook(
        target=f"{_COMPONENTS}.logprob_result_processor.SchedulerLogprobResultProcessor.add_logprob_return_values",
        kind=HookType.AFTER,
        function=answer_tokens.drop_logprobs_of_no_token,
        why="a request for no token gets the log probability of one",
        until="Req.is_prefill_only holds with speculation too",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind=HookType.AFTER,
        function=report_worker,
        why="/server_info must tell users and benchmarks which DFLASH worker serves",
        until="BaseSpecWorker can describe itself in /server_info",
    ),
]

# FA3 needs a CUDA GPU.
FA3_HOOKS = [
    Hook(
        target="sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend",
        kind=HookType.AROUND,
        function=fa3.attend,
        why="each layer of a verified block or of a prefill copies its queries and schedules its attention anew",
        until="FlashAttentionBackend schedules attention once per forward, as it does for plain decoding",
    ),
    Hook(
        target="sglang.srt.model_executor.runner_backend.utils.resolve_prefill_backend",
        kind=HookType.AROUND,
        function=fa3_prefill.resolve_prefill_backend,
        why="a prefill of few tokens in one CUDA graph launches attention for as many requests as may run",
        until="SGLang captures graphs of whole prefills for several numbers of requests",
    ),
]


def register() -> None:
    hooks.skip_search_for_methods()
    hooks.register(HOOKS)
    if is_cuda():
        hooks.register(FA3_HOOKS)
    if is_flashinfer_available():
        hooks.register(FLASHINFER_HOOKS)

"""State of the worker, as SGLang's scheduler sets it up: one frozen object per call.

__init__                 LoadedModels   weights, and memory of running requests that SGLang must not give to pools
alloc_memory_pool        Pools          KV pools of target and drafter, recurrent states
init_attention_backends  BuiltCycle     chains or trees, and the decode cycle
init_cuda_graphs         Serving        CUDA graphs, and the draft length of each cycle
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_observability,
    get_parallel,
    get_schedule,
    get_spec,
    max_speculative_num_draft_tokens,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import log_info_on_rank0

from sglang_dflash import cpu_support
from sglang_dflash.attention.plan import chain_attention, prepare_chains
from sglang_dflash.attention.trees import TreeAttentionBackend, memory_obstacle, tree_obstacle
from sglang_dflash.checkpoint.mask_embedding import read_mask_embedding
from sglang_dflash.draft import int8
from sglang_dflash.draft.bigrams import Bigrams
from sglang_dflash.draft.head import DraftHead
from sglang_dflash.draft.texts import Texts
from sglang_dflash.draft.window import DraftWindow
from sglang_dflash.engine.adaptive.controller import (
    CYCLES_PER_CHOICE,
    CpuController,
    DraftLengthController,
    FixedLength,
    GpuController,
)
from sglang_dflash.engine.cycle import DecodeCycle
from sglang_dflash.engine.graphs import CycleGraphRunner, CycleGraphs
from sglang_dflash.engine.hidden_states import capture_last_hidden_states
from sglang_dflash.engine.metrics import CycleMetrics, TreeCounts
from sglang_dflash.engine.simulate import RecordedHead, Simulation, simulation
from sglang_dflash.engine.verification import ChainVerification, TreeVerification, Verification
from sglang_dflash.errors import ConfigError
from sglang_dflash.memory.limits import check_pool, check_window_pool
from sglang_dflash.memory.pool_sizing import CycleMemory, KVMemory
from sglang_dflash.ops import add_norm, small_m_linear
from sglang_dflash.recurrent.state import RecurrentState
from sglang_dflash.server_args.adaptive import asks_for_adaptive, log_fixed
from sglang_dflash.server_args.arguments import runs_cycles
from sglang_dflash.server_args.trees import asks_for_trees, num_candidates, verifies_trees
from sglang_dflash.verify.logits import VerifyLogits
from sglang_dflash.verify.request_keys import RequestKeys, key_generator
from sglang_dflash.verify.sampler import FallbackSampler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModels:
    """State without pools, made before SGLang sizes them by the memory that is left.

    Attributes:
        block_size: B.
        mask_token_id: of the drafter's checkpoint.
        verifies_trees: trees are verified, unless the target has none.
        asks_for_trees: the user asked for trees, so that an obstacle is an error.
        asks_for_adaptive: the same of an adaptive draft length.
        head: the drafter's lm_head.
        sampler: chooses tokens for requests that need SGLang's sampler.
        bigrams: pairs of tokens in the texts of all running requests; None for a server without cycles.
        texts: of all running requests; None for chains.
        metrics: acceptance and stage times.
        keys: of the running requests' noise.
        logits: the target's.
    """

    block_size: int
    mask_token_id: int
    verifies_trees: bool
    asks_for_trees: bool
    asks_for_adaptive: bool
    head: DraftHead
    sampler: FallbackSampler
    bigrams: Bigrams | None
    texts: Texts | None
    metrics: CycleMetrics
    keys: RequestKeys
    logits: VerifyLogits

    @classmethod
    def prepare(cls, server_args: ServerArgs, target_worker: TpModelWorker, draft_runner: ModelRunner) -> LoadedModels:
        """Connect the two models, and install the kernels that replace single layers."""
        target_runner, device = target_worker.model_runner, target_worker.device
        target_model, draft_model = target_runner.model, draft_runner.model
        mask_embedding = read_mask_embedding(draft_model.dflash_config, get_spec().speculative_draft_model_revision)
        # Adapters are the target's alone.
        embedding = unwrap_lora_layer(target_model.get_input_embeddings())
        draft_model.use_target_embedding(embedding, mask_embedding)
        for model in (target_model, draft_model):
            if device == "cpu":
                cpu_support.install_layers(model)
            else:
                is_adapted = model is target_model and target_runner.lora_manager is not None
                add_norm.install(model, follows_few_rows=small_m_linear.install(model) > 0 and not is_adapted)
        int8.install(draft_model.layers)
        if get_exec().features.enable_return_hidden_states:
            capture_last_hidden_states(target_model)
        tp_group, block_size = get_parallel().tp_group, get_spec().speculative_dflash_block_size
        # A server without cycles has the chains' part of their state, which is the smallest.
        lm_head, for_trees = unwrap_lora_layer(target_model.lm_head), runs_cycles() and verifies_trees(server_args)
        # SGLang gives out at most as many request slots as requests may run or arrive, and one for padding.
        num_slots = get_schedule().max_running_requests + 1
        if get_disagg().disaggregation_mode == "decode":
            num_slots += get_disagg().disaggregation_decode_extra_slots
        keys = RequestKeys(num_slots, device, key_generator(target_worker.random_seed, get_parallel().dp_rank))
        return cls(
            block_size=block_size,
            mask_token_id=draft_model.dflash_config.mask_token_id,
            verifies_trees=for_trees,
            asks_for_trees=for_trees and asks_for_trees(server_args),
            asks_for_adaptive=asks_for_adaptive(server_args),
            head=DraftHead.of(draft_model, lm_head, tp_group, num_candidates(server_args), for_trees),
            sampler=FallbackSampler(target_runner, num_slots, tp_group, keys),
            bigrams=Bigrams(num_slots, device) if runs_cycles() else None,
            texts=Texts(num_slots, target_runner.model_config.vocab_size, device) if for_trees else None,
            metrics=CycleMetrics(block_size, device),
            keys=keys,
            logits=VerifyLogits(target_model, tp_group),
        )


@dataclass(frozen=True)
class Pools:
    """State with the pools of target and drafter.

    Attributes:
        kv_memory: bytes of a token in the pools.
        cycle_memory: bytes of cycles beside the pools.
        states: of the target's recurrent layers; None: it has none.
        window: the part of the context that the drafter sees; None: all of it.
    """

    kv_memory: KVMemory
    cycle_memory: CycleMemory
    states: RecurrentState | None
    window: DraftWindow | None

    @staticmethod
    def draft_window(block_size: int, page_size: int, req_to_token_pool: ReqToTokenPool) -> DraftWindow | None:
        """Return the drafter's window, which decides over which pool it runs; None: it sees the whole context."""
        size = get_spec().speculative_draft_window_size
        if size is None or not runs_cycles():
            return None
        return DraftWindow(size, page_size, block_size, req_to_token_pool)

    @classmethod
    def measure(
        cls,
        loaded: LoadedModels,
        target_runner: ModelRunner,
        draft_runner: ModelRunner,
        config: MemoryPoolConfig,
        window: DraftWindow | None,
    ) -> Pools:
        """Check and describe pools that have been allocated.

        Raises:
            ConfigError: a pool is too small for one request, or recurrent states do not fit the block size.
        """
        assert len(target_runner.req_to_token_pool.req_to_token) <= loaded.sampler.num_slots
        check_pool(config, target_runner.page_size)
        check_window_pool(config, target_runner.sliding_window_size, target_runner.page_size)
        disagg = get_disagg()
        if disagg.disaggregation_mode == "decode" and disagg.disaggregation_decode_retraction_backup != "host_pool":
            raise ConfigError(
                "--disaggregation-mode decode is not supported with DFLASH for this target: SGLang keeps KV of "
                f"retracted requests as {disagg.disaggregation_decode_retraction_backup}, without the drafter's."
            )
        kv_memory = KVMemory.measure(target_runner.token_to_kv_pool, draft_runner.token_to_kv_pool)
        logger.info("%s", kv_memory)
        cycle_memory = CycleMemory.of(target_runner.kv_cache_configurator)
        return cls(kv_memory, cycle_memory, RecurrentState.of(target_runner, loaded.block_size), window)


@dataclass(frozen=True)
class BuiltCycle:
    """State with attention backends.

    Attributes:
        cycle: chains or trees.
        head: the drafter's lm_head, for chains or for trees.
        texts: see :class:`LoadedModels`.
        simulation: the one of `cycle`.
        has_trees: trees are verified, not chains.
    """

    cycle: DecodeCycle
    head: DraftHead | RecordedHead
    texts: Texts | None
    simulation: Simulation
    has_trees: bool

    @classmethod
    def build(
        cls, loaded: LoadedModels, pools: Pools, target_runner: ModelRunner, draft_runner: ModelRunner
    ) -> BuiltCycle:
        """Choose chains or trees, and make the cycle.

        Raises:
            ConfigError: the user asked for trees of a target that has none.
        """
        has_trees, head, texts = loaded.verifies_trees, loaded.head, loaded.texts
        obstacle = _default_tree_obstacle(loaded, target_runner)
        if obstacle is not None:
            log_info_on_rank0(logger, f"Drafts are verified in chains, not in trees: {obstacle}.")
            has_trees, texts = False, None
            head.draft_chains_only()
        simulated = simulation(len(draft_runner.req_to_token_pool.req_to_token), draft_runner.device)
        has_pairs = draft_runner.model.dflash_config.pairs is not None
        num_drafts, vocab_size = loaded.block_size - 1, target_runner.model_config.vocab_size
        simulated.check(vocab_size, num_drafts, head.num_candidates, has_pairs)
        if get_spec().speculative_adaptive:
            simulated.note_adaptive()
        head = simulated.head(head)
        verification: Verification
        if not has_trees:
            prepare_chains(target_runner.attn_backend)
            attention = chain_attention(target_runner, loaded.block_size)
            verification = ChainVerification(target_runner, loaded.block_size, simulated, loaded.bigrams, attention)
        else:
            # It refuses targets that have none, before the memory of their layers is looked at.
            attention = TreeAttentionBackend(target_runner)
            num_nodes, max_nodes = _tree_sizes(target_runner)
            if not loaded.asks_for_trees:
                _log_default_trees(num_nodes, max_nodes)
            verification = TreeVerification(
                target_runner,
                num_nodes,
                max_nodes,
                loaded.block_size,
                simulated,
                loaded.bigrams,
                attention=attention,
                num_candidates=head.num_candidates,
                texts=texts,
                counts_accepted=get_spec().speculative_adaptive or loaded.metrics.are_exported,
            )
        cycle = DecodeCycle(
            draft_runner=draft_runner,
            logits=loaded.logits,
            head=head,
            block_size=loaded.block_size,
            verification=verification,
            window=pools.window,
            states=pools.states,
            simulation=simulated,
            clock=loaded.metrics.clock,
        )
        return cls(cycle, head, texts, simulated, has_trees)


def _default_tree_obstacle(loaded: LoadedModels, target_runner: ModelRunner) -> str | None:
    """Return why a target gets chains where trees are the default; None: it gets what was asked for, or trees."""
    if not loaded.verifies_trees or loaded.asks_for_trees:
        return None
    return tree_obstacle(target_runner)


def _log_default_trees(num_nodes: int, max_nodes: int) -> None:
    sizes = f"up to {num_nodes} nodes" + (f", or {max_nodes} in small batches" if max_nodes > num_nodes else "")
    log_info_on_rank0(logger, f"Drafts are verified in trees of {sizes}; --speculative-eagle-topk 1 verifies chains.")


def _tree_sizes(target_runner: ModelRunner) -> tuple[int, int]:
    """Return the largest number of nodes of batches of any size, and of small batches."""
    num_nodes, max_nodes = get_spec().speculative_num_draft_tokens, max_speculative_num_draft_tokens()
    # `tree_obstacle` has seen that trees of `num_nodes` fit.
    is_known_to_fit = max_nodes == num_nodes or target_runner.device == "cpu"
    if not is_known_to_fit and memory_obstacle(target_runner, max_nodes) is not None:
        max_nodes = num_nodes
    return num_nodes, max_nodes


@dataclass(frozen=True)
class Serving:
    """State with CUDA graphs, ready to serve.

    Attributes:
        graphs: of every draft length; None: cycles run eagerly.
        draft_length: chooses the draft length of each cycle.
        tree_counts: brings accepted nodes of trees to the host.
    """

    graphs: CycleGraphs | None
    draft_length: DraftLengthController
    tree_counts: TreeCounts

    @classmethod
    def start(cls, loaded: LoadedModels, built: BuiltCycle, pools: Pools, target_runner: ModelRunner) -> Serving:
        """Capture graphs of other draft lengths. The target's own runner has those of the common one.

        Raises:
            ConfigError: SGLang captured other graphs than the cycle's, or none that `--speculative-adaptive` needs.
        """
        runner = target_runner.decode_cuda_graph_runner
        common = runner if isinstance(runner, CycleGraphRunner) else None
        if common is None and isinstance(runner, DecodeCudaGraphRunner):
            raise ConfigError(f"SGLang captured the target's forward in a {type(runner).__name__}, not DFLASH's cycle.")
        is_adaptive = get_spec().speculative_adaptive and runs_cycles()
        if is_adaptive and common is None and target_runner.device != "cpu":
            # Flags have been checked (`server_args.adaptive`), but SGLang leaves graphs out for other reasons too.
            obstacle = "SGLang captured no CUDA graphs of the target"
            if loaded.asks_for_adaptive:
                raise ConfigError(f"--speculative-adaptive verifies in CUDA graphs: {obstacle}.")
            log_fixed(obstacle)
            is_adaptive = False
        cycles_per_choice = 1 if common is None else CYCLES_PER_CHOICE
        # Exported metrics are exact. One rank exports, but all of them must learn the same at the same time.
        counted_every = 1 if get_observability().enable_metrics else cycles_per_choice
        tree_counts = TreeCounts(built.head.num_candidates, counted_every)
        verification = built.cycle.verification
        if not is_adaptive:
            graphs = None if common is None else CycleGraphs(common, ())
            return cls(graphs, FixedLength(verification.num_tokens), tree_counts)
        acceptance = verification.acceptance_model(cycles_per_choice)
        if common is None:
            return cls(None, CpuController(acceptance.lengths, acceptance), tree_counts)
        others = tuple(length for length in acceptance.lengths if length != common.num_tokens)
        graphs = CycleGraphs(common, others)
        kv_bytes = pools.kv_memory.target_bytes_per_token + pools.kv_memory.drafter_bytes_per_token
        return cls(graphs, GpuController(graphs, acceptance, kv_bytes), tree_counts)


def describe(
    loaded: LoadedModels, pools: Pools, built: BuiltCycle, serving: Serving, draft_runner: ModelRunner
) -> dict:
    """Return the part of `/server_info` that is about the server and its cycles."""
    return {
        "block_size": loaded.block_size,
        "verified_as": "trees" if built.has_trees else "chains",
        "verified_rows": built.cycle.verification.num_tokens,
        "candidates_per_position": built.head.num_candidates,
        "draft_attention_backend": draft_runner.decode_attention_backend_str,
        "draft_window_size": get_spec().speculative_draft_window_size,
        # The present size: SGLang may shrink the pools once CUDA graphs have taken their memory.
        "kv_capacity_tokens": draft_runner.token_to_kv_pool.size,
        "kv_bytes_per_token": {
            "target": pools.kv_memory.target_bytes_per_token,
            "drafter": pools.kv_memory.drafter_bytes_per_token,
        },
        "cycle_bytes": asdict(pools.cycle_memory)
        | {
            "penalties": loaded.sampler.penalty_bytes,
            "bigrams": 0 if loaded.bigrams is None else loaded.bigrams.nbytes,
            "texts": 0 if built.texts is None else built.texts.nbytes,
        },
        "adaptive_graphs": _describe_graphs(serving.graphs),
        "recurrent_states": None if pools.states is None else pools.states.describe(),
        **loaded.metrics.snapshot(),
    }


def _describe_graphs(graphs: CycleGraphs | None) -> dict | None:
    """Return what `/server_info` says of graphs of several draft lengths; None: the draft length is fixed."""
    if graphs is None or graphs.cost_of_others is None:
        return None
    return {"batch_sizes_by_verified_rows": graphs.sizes, "others": asdict(graphs.cost_of_others)}

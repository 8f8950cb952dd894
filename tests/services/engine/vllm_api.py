"""Writes the signatures of vLLM that `services/privmix/engine` uses: `python -m tests.services.engine.vllm_api`.

It reads vLLM's source and imports none of it, so it reads the files that only a GPU runs too, and the source of another
build: `python -m tests.services.engine.vllm_api DIRECTORY` prints the names whose signatures differ there. After an
upgrade, review each difference against `services/privmix/engine`, then write the table again.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")

USED: Mapping[str, Sequence[str]] = {
    "config/attention.py": ["AttentionConfig.use_non_causal"],
    "config/lora.py": ["LoRAConfig.specialize_active_lora", "LoRAConfig.max_loras"],
    "config/model.py": [
        "ModelConfig.head_dtype",
        "ModelConfig.is_moe",
        "ModelConfig.use_mla",
    ],
    "config/parallel.py": ["ParallelConfig.rank", "ParallelConfig.tensor_parallel_size"],
    "config/vllm.py": ["VllmConfig.parallel_config"],
    "distributed/parallel_state.py": ["cleanup_dist_env_and_memory"],
    "engine/arg_utils.py": [
        f"EngineArgs.{field}"
        for field in (
            "additional_config",
            "attention_config",
            "async_scheduling",
            "distributed_executor_backend",
            "dtype",
            "enable_lora",
            "enforce_eager",
            "gpu_memory_utilization",
            "hf_overrides",
            "load_format",
            "lora_target_modules",
            "max_cpu_loras",
            "max_lora_rank",
            "max_loras",
            "max_model_len",
            "max_num_active_seqs",
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "max_num_seqs",
            "tensor_parallel_size",
            "worker_cls",
        )
    ],
    "forward_context.py": ["ForwardContext.slot_mapping", "get_forward_context", "set_forward_context"],
    "ir/op.py": ["IrOp.impls", "IrOp.register_impl", "IrOp.set_default"],
    "ir/ops/layernorm.py": ["fused_add_rms_norm", "rms_norm"],
    "lora/layers/base_linear.py": ["BaseLinearLayerWithLoRA.apply", "BaseLinearLayerWithLoRA.create_lora_weights"],
    "lora/layers/utils.py": ["LoRAMapping.index_mapping", "LoRAMapping.prompt_mapping", "LoRAMapping.is_prefill"],
    "lora/lora_model.py": ["LoRAModel.__init__", "LoRAModel.clone"],
    "lora/lora_weights.py": ["LoRALayerWeights.__init__", "PackedLoRALayerWeights.__init__"],
    "lora/model_manager.py": [
        "LoRAModelManager.add_adapter",
        "LRUCacheLoRAModelManager.activate_adapter",
        "LoRAModelManager.deactivate_adapter",
        "LoRAModelManager.lora_slots",
        "LoRAModelManager.modules",
        "LoRAModelManager.packed_modules",
        "LoRAModelManager.punica_wrapper_mapping",
    ],
    "lora/punica_wrapper/punica_cpu.py": ["PunicaWrapperCPU.add_lora_linear"],
    "lora/punica_wrapper/punica_base.py": ["PunicaWrapperBase.update_metadata"],
    "lora/punica_wrapper/punica_gpu.py": [
        "PunicaWrapperGPU.update_metadata",
        "PunicaWrapperGPU.add_lora_linear",
        "PunicaWrapperGPU.max_loras",
    ],
    "lora/request.py": ["LoRARequest.lora_name", "LoRARequest.lora_int_id", "LoRARequest.lora_path"],
    "lora/worker_manager.py": [
        "WorkerLoRAManager._load_adapter",
        "WorkerLoRAManager.set_active_adapters",
        "LRUCacheWorkerLoRAManager._adapter_manager",
    ],
    "model_executor/layers/logits_processor.py": ["LogitsProcessor.head_dtype", "LogitsProcessor._apply_head"],
    "model_executor/models/interfaces.py": [
        "EagleModelMixin._set_aux_hidden_state_layers",
        "SupportsEagle3.set_aux_hidden_state_layers",
    ],
    "model_executor/models/registry.py": [
        "_BaseRegisteredModel.load_model_cls",
        "_ModelRegistry.models",
        "_ModelRegistry.register_model",
    ],
    "platforms/interface.py": [
        "Platform.is_cpu",
        "Platform.get_punica_wrapper",
        "Platform.get_device_total_memory",
        "Platform.is_device_capability_family",
        "Platform.update_block_size_for_backend",
        "Platform.use_all_gather",
    ],
    "renderers/base.py": ["BaseRenderer.__init__", "BaseRenderer.render_messages"],
    "sampling_params.py": [f"SamplingParams.{name}" for name in ("max_tokens", "ignore_eos", "detokenize")],
    "utils/network_utils.py": ["get_file_store_init_method"],
    "utils/torch_utils.py": ["weak_ref_tensor"],
    "v1/attention/backend.py": [
        *(
            f"CommonAttentionMetadata.{field}"
            for field in (
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "num_reqs",
                "num_actual_tokens",
                "max_query_len",
                "max_seq_len",
                "block_table_tensor",
                "slot_mapping",
                "causal",
                "is_prefilling",
                "positions",
            )
        ),
        "AttentionBackend.get_name",
        "AttentionBackend.supports_non_causal",
    ],
    "v1/core/sched/output.py": [
        "CachedRequestData.num_computed_tokens",
        "CachedRequestData.req_ids",
        "NewRequestData.num_computed_tokens",
        "NewRequestData.prompt_token_ids",
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.scheduled_cached_reqs",
        "SchedulerOutput.scheduled_new_reqs",
        "SchedulerOutput.total_num_scheduled_tokens",
    ],
    "v1/core/sched/scheduler.py": ["Scheduler.requests"],
    "v1/engine/core.py": ["EngineCore.scheduler"],
    "v1/engine/__init__.py": [
        f"EngineCoreRequest.{field}"
        for field in (
            "request_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "arrival_time",
            "lora_request",
            "cache_salt",
            "data_parallel_rank",
        )
    ],
    "v1/engine/core_client.py": [
        f"InprocClient.{name}"
        for name in ("engine_core", "get_output", "add_request", "abort_requests", "collective_rpc", "shutdown")
    ],
    "v1/engine/llm_engine.py": ["LLMEngine.from_engine_args", "LLMEngine.engine_core", "LLMEngine.vllm_config"],
    "v1/executor/uniproc_executor.py": [
        f"UniProcExecutor.{name}"
        for name in (
            "_init_executor",
            "_distributed_args",
            "collective_rpc",
            "execute_model",
            "sample_tokens",
            "shutdown",
        )
    ],
    "v1/outputs.py": ["ModelRunnerOutput.req_id_to_index", "ModelRunnerOutput.req_ids"],
    "v1/request.py": [
        "Request.append_output_token_ids",
        "Request.num_computed_tokens",
        "Request.num_tokens",
        "Request.request_id",
    ],
    "v1/serial_utils.py": ["run_method"],
    "v1/worker/block_table.py": [
        "BlockTable.block_table",
        "BlockTable.block_size",
        "MultiGroupBlockTable.commit_block_table",
        "MultiGroupBlockTable.block_tables",
    ],
    "v1/worker/cpu_model_runner.py": ["CPUModelRunner.__init__", "CPUModelRunner.load_model"],
    "v1/worker/cpu_worker.py": ["CPUWorker.init_device"],
    "v1/worker/gpu_input_batch.py": [
        *(
            f"InputBatch.{name}"
            for name in (
                "block_table",
                "is_token_ids",
                "num_computed_tokens_cpu",
                "num_reqs",
                "num_tokens_no_spec",
                "req_id_to_index",
                "req_ids",
                "request_lora_mapping",
                "token_ids_cpu",
            )
        ),
        "CachedRequestState.num_tokens",
        "CachedRequestState.output_token_ids",
    ],
    "v1/worker/gpu_model_runner.py": [
        *(
            f"GPUModelRunner.{name}"
            for name in (
                "__init__",
                "load_model",
                "get_model",
                "execute_model",
                "sample_tokens",
                "profile_run",
                "max_model_len",
                "_update_states",
                "_prepare_inputs",
                "_prepare_padding_mask",
                "_preprocess",
                "_model_forward",
                "query_start_loc",
                "seq_lens",
                "optimistic_seq_lens_cpu",
                "positions",
                "use_aux_hidden_state_outputs",
                "kv_cache_config",
                "attn_groups",
                "requests",
                "input_batch",
            )
        ),
        "ExecuteModelState.logits",
    ],
    "v1/worker/gpu_worker.py": ["Worker.__init__", "Worker._make_model_runner"],
    "v1/worker/lora_model_runner_mixin.py": ["LoRAModelRunnerMixin.set_active_loras"],
    "v1/worker/worker_base.py": [
        f"WorkerWrapperBase.{name}"
        for name in ("__init__", "init_worker", "init_device", "initialize_from_config", "execute_model", "shutdown")
    ],
    "v1/worker/utils.py": [
        "AttentionGroup.build_metadata",
        "AttentionGroup.layer_names",
        "AttentionGroup.backend",
    ],
}
"""Names by file: functions, methods, fields of classes, and attributes that a class assigns to `self`."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def signatures(package: Path, used: Mapping[str, Sequence[str]] = USED) -> dict[str, dict[str, str | None]]:
    """Returns the signature of each used name by file, as source text; None for a name that is not there.

    Args:
        package: the directory of the package.
    """
    table: dict[str, dict[str, str | None]] = {}
    for file, names in used.items():
        path = package / file
        found = dict(_definitions(ast.parse(path.read_text(encoding="utf-8")))) if path.exists() else {}
        table[file] = {name: found.get(name) for name in sorted(names)}
    return table


def installed() -> Path:
    """Returns the directory of the installed vLLM, without importing it."""
    specification = find_spec("vllm")
    if specification is None or specification.origin is None:
        raise ImportError("vllm is not installed")
    return Path(specification.origin).parent


def differences(package: Path) -> list[str]:
    """Returns the used names whose signatures in a package's source differ from the table, with both."""
    table = json.loads(TABLE.read_bytes())
    return [
        f"{file}: {name}: {signature}, reviewed as {table.get(file, {}).get(name)}"
        for file, names in signatures(package).items()
        for name, signature in names.items()
        if signature is None or signature != table.get(file, {}).get(name)
    ]


def _definitions(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields names and signatures; the first assignment of an attribute counts."""
    seen: set[str] = set()
    for node in module.body:
        found = _members(node) if isinstance(node, ast.ClassDef) else _own(node)
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for name, signature in found:
            if prefix + name not in seen:
                seen.add(prefix + name)
                yield prefix + name, signature


def _own(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, Definition):
        yield node.name, _signature(node)


def _members(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in owner.body:
        yield from _own(node)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node)
    for inner in ast.walk(owner):
        targets = inner.targets if isinstance(inner, ast.Assign) else []
        for target in [inner.target] if isinstance(inner, ast.AnnAssign) else targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, ast.unparse(inner)


def _signature(node: Definition) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    return f"{decorators}({ast.unparse(node.args)}){returns}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("\n".join(differences(Path(sys.argv[1]))))
    else:
        TABLE.write_text(json.dumps(signatures(installed()), indent=2) + "\n")

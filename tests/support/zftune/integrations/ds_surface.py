"""What DeepSpeed's optimizers and engine offer, beside what a script finds with the backend zenflow; run as a process.

    python -m tests.support.zftune.integrations.ds_surface OUT.json STAGE...

The tables are for the pinned and the newest release of DeepSpeed: a public name of another one that is in none of them
fails `test_deepspeed_surface.py`, and wants to be thought of.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAME = {
    *("backward", "cur_scale", "destroy", "get_lr", "load_state_dict", "loss_scale", "loss_scaler", "module"),
    *("overflow", "param_groups", "set_lr", "state", "state_dict", "step", "zero_grad"),
}
"""Public names of DeepSpeed's optimizers that do the same with ours."""
STAND_INS = {"offload_states", "reload_states", "refresh_fp32_params", "parameter_offload"}
"""Those that do no harm, and nothing."""
OF_ANOTHER_MEANING = {"device"}
"""DeepSpeed has the device's name there, zenflow its own object."""
REFUSED = frozenset(
    re.findall(
        r"\w+",
        """
    accumulated_grads_in_cpu all2all_process_group all_grad_tensors all_reduce_print allgather_bucket_size
    allreduce_and_copy allreduce_and_copy_with_multiple_ranks allreduce_and_scatter allreduce_bucket
    allreduce_no_retain async_accumulate_grad_in_cpu_via_gpu async_inplace_copy_grad_to_fp32_buffer_from_gpu
    autoep_folding_spec autoep_folding_tp_group average_tensor averaged_gradients backup_optimizer
    backward_epilogue backward_prologue bf16_master_weights_and_gradients bf16_optimizer_states bit16_groups
    bit16_groups_flat buffered_reduce_fallback callback_queued check_grad_overflow check_overflow
    checkpoint_event_epilogue checkpoint_event_prologue clear_backward_seen_flag clear_grad_attribute clip_grad
    communication_data_type complete_grad_norm_calculation_for_cpu_offload compute_grad_norm
    configure_autoep_folding_tp_gradient_reduction contiguous_gradients copy_grad_stream copy_grads_in_partition
    cpu_offload cpu_offload_pin_memory create_gradient_handling_hooks create_reduce_and_remove_grad_hooks
    create_zenflow_hooks custom_loss_scaler debug_fp16_grads deepspeed_adam_offload dp_process_group dtype
    dump_post_step_gradients dump_pre_step_gradients dynamic_loss_scale elastic_checkpoint empty_partition_cache
    enable_sanity_checks enter_backward ep_process_group exit_backward expert_dp_process_group
    external_loss_scale extra_large_param_to_reduce fill_grad_accum_attribute
    finalize_gradient_accumulation_boundary first_offset first_param_index_in_partition flatten
    flatten_and_print flatten_dense_tensors_aligned fp16_groups fp16_master_weights_and_gradients
    fp16_partitioned_groups fp16_partitioned_groups_flat fp16_partitioned_groups_flat_id
    fp16_partitioned_groups_flat_numel fp32_partitioned_groups_flat free_grad_in_param_list get_all_grad_tensors
    get_bit16_param_group get_data_parallel_partitions get_ep_ranks get_first_param_index get_flat_partition
    get_fp32_grad_for_param get_fp32_grad_partitions get_full_hp_param get_grad_norm_direct get_grad_position
    get_gradient_for_reduction get_grads_to_reduce get_groups_without_padding get_hp_param_device
    get_lean_optimizer_state get_local_fp32_grad_for_param get_local_fp32_param get_param_comm_dtype
    get_param_gradient_attribute get_param_id get_partition_info grad_partition_insertion_offset
    grad_partitions_flat_buffer grad_position grad_start_offset gradient_accumulation_dtype
    gradient_accumulation_steps gradient_average gradient_predivide_factor gradient_reduction_w_predivide
    grads_in_partition grads_in_partition_offset groups_lacking_loss_scale groups_padding has_moe_layers
    has_overflow has_overflow_partitioned_grads_serial has_overflow_serial hp_params_pin_buffers
    ignore_unused_parameters independent_gradient_partition_epilogue inf_or_nan_tracker initialize_ds_offload
    initialize_gradient_partition initialize_gradient_partitioning_data_structures initialize_optimizer_states
    invalidate_secondary_tensor ipg_buckets is_grad_computed is_gradient_accumulation_boundary is_moe_group
    is_moe_param_group is_param_in_current_partition is_partition_reduced leaf_parameters
    load_hp_checkpoint_state load_hp_checkpoint_state_from_checkpoint_dir
    load_hp_checkpoint_state_from_checkpoint_dir_stage3 load_module_checkpoint_state_from_checkpoint_dir_stage3
    local_overflow low_precision_master_weights_and_grads lp_grad_partitions_flat_pin_buffers lp_param_buffer
    lp_param_contiguous_pin_buffer lp_params_pin_buffers master_weights_and_grads_dtype max_param_reduce_events
    max_params_in_cpu micro_step_id model_parallel_group model_parallel_rank model_parallel_world_size mpu
    muon_beta muon_momentum_buffer_partitioned_groups_flat muon_ns_method n_caching_allocator_flushes
    nccl_start_alignment_factor needs_scaler next_swappable_fp32_partitioned_groups norm_for_param_grads
    offload_gradient_dict offload_optimizer offload_optimizer_fast_init offload_optimizer_pin_memory
    offload_param offload_param_pin_memory offloaded_states optimizer optimizer_swapper overlap_comm
    overlapping_partition_gradients_reduce_epilogue override_loss_scale parallel_partitioned_bit16_groups
    param_buffer_of_bit16_for_cpu_offload_groups param_dict param_groups_fp16_flat_cpu_memory param_id
    param_names param_reduce_events param_to_partition_ids parameter_alignment params_already_reduced
    params_in_nvme_and_cpu params_in_partition params_not_in_partition partial_offload partition_count
    partition_gradients partition_grads partition_size persistent_parameters postscale_gradients
    prefetch_elements previous_reduced_grads print_rank_0 process_gradients quantize_nontrainable_params
    queue_post_backward_callback ready_for_gradients real_dp_process_group reduce_and_partition_stream
    reduce_bucket_size reduce_gradients reduce_independent_p_g_buckets_and_remove_grads reduce_ipg_grads
    reduce_ready_partitions_and_remove_grads reduce_scatter reduction_stream reenter_backward_if_needed
    register_grad_acc_post_hook remaining_grads_in_partition report_ipg_memory_usage reset_cpu_buffers
    reset_partition_gradient_structures reset_swap_buffers round_robin_bit16_groups round_robin_bit16_indices
    round_robin_bit16_meta round_robin_bit16_offsets round_robin_bit16_padding round_robin_gradients
    run_grad_acc_post_hooks save_muon_momentum_buffer_in_memory scale_if_loss scaled_global_norm
    sequence_parallel_size sequential_execution set_fp32_grad_for_param set_full_hp_param set_grad_positions
    set_gradient_accumulation_boundary set_local_grad_for_param set_local_hp_param set_none_gradients_to_zero
    set_norm_for_param_grad set_norm_for_param_grad_in_gpu setup_buckets should_refresh_expected_hook_count
    single_partition_of_fp32_groups sub_group_partition_counts sub_group_process_groups sub_group_size
    sub_group_to_group_id sub_groups_lacking_loss_scale sub_groups_using_muon subgroup_to_device swap_optimizer
    temp_grad_buffer_for_cpu_offload temp_grad_buffer_for_gpu_offload timers torch_autocast_gradscaler
    total_grads_in_partition trainable_param_groups unflatten unregister_grad_acc_post_hooks
    unscale_and_clip_grads update_fp32_grad_for_param_vectorized update_hook_state_and_maybe_run_epilogue
    update_lp_params update_offload_overflow_tracker update_offload_overflow_tracker_for_param_grad
    use_grad_accum_attribute use_multi_rank_bucket_allreduce use_muon use_separate_grad_accum zenflow
    zero_hpz_partition_size zero_quantized_nontrainable_weights zero_reduced_gradients zero_stage_string
    zeropp_loco_param
""",
    )
)
"""Those that end with one sentence: parts of ZeRO's own, which are not there."""
ANSWERS = {
    *("basic_optimizer", "client_optimizer", "optimizer", "optimizer_name", "optimizer_params"),
    *("cpuadam_cores_perc", "gradient_clipping", "is_first_weights_partition_group", "save_zero_checkpoint"),
    *("zero_cpu_offload", "zero_offload_optimizer", "zero_optimization", "zero_optimization_partition_gradients"),
    *("zero_optimization_partition_weights", "zero_optimization_stage", "zero_overlap_comm", "zero_use_cpu_optimizer"),
}
"""Where DeepSpeed's engine answers otherwise than with its own optimizer: it has none of ZeRO's, and does not clip."""


def public_of(kinds: Iterable[type]) -> set[str]:
    """Names of classes and of what their methods assign to `self`, without those of torch's modules."""
    found: set[str] = set()
    for kind in kinds:
        found |= {name for name in dir(kind) if not name.startswith("_")}
        for base in kind.__mro__:
            if base.__module__.startswith("deepspeed"):
                found |= {*re.findall(r"self\.([a-zA-Z]\w*)\s*(?::[^=\n]+)?=(?!=)", inspect.getsource(base))}
    return found


def engine_of(stage: int, ours: bool, optimizer: Any = None) -> Any:
    import deepspeed

    import zftune.integrations.deepspeed as zftune_deepspeed

    zftune_deepspeed.disable()
    if ours:
        zftune_deepspeed.enable()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    made = None if optimizer is None else optimizer(model)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=made, config=config)[0]


def train(engine: Any, steps: int = 3, *, sleeps: bool = False) -> list[float]:
    """Losses; between steps it sleeps as trainers do that generate elsewhere."""
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if sleeps:
            engine.offload_states()
            engine.empty_partition_cache()
            engine.reload_states()
    return losses


def plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else f"a {type(value).__name__}"


def is_a_question(function: Any) -> bool:
    """Whether a method, as its class has it, takes nothing and only returns something."""
    if not inspect.isfunction(function) or len(inspect.signature(function).parameters) != 1:
        return False
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(made, ast.FunctionDef)
    statements = [one for one in made.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    return len(statements) == 1 and isinstance(statements[0], ast.Return)


def answers_of(engine: Any) -> dict[str, Any]:
    found = {}
    for name in dir(engine):
        if not name.startswith("_") and not hasattr(nn.Module, name):
            value = getattr(engine, name)
            if is_a_question(getattr(type(engine), name, None)):
                try:
                    value = value()
                except Exception as error:  # noqa: BLE001 - to be compared
                    value = repr(error)
            found[name] = plain(value) if not inspect.isroutine(value) else "a method"
    return found


def found_in(optimizer: Any, names: Iterable[str]) -> dict[str, str | None]:
    """What is said of a name; None: it is there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            getattr(optimizer, name)
            found[name] = None
        except AttributeError as error:
            found[name] = str(error)
    return found


def hooked(stage: int, ours: bool) -> list[list[Any]]:
    """What step hooks of the script's own optimizer see: one is registered before `initialize` and one after."""
    seen: list[list[Any]] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made.register_step_pre_hook(lambda it, *_: seen.append(["before", it.param_groups[0]["lr"]]))
        optimizers.append(made)
        return made

    optimizers: list[torch.optim.Optimizer] = []
    engine = engine_of(stage, ours, make)
    handle = optimizers[0].register_step_post_hook(lambda it, *_: seen.append(["after", it.param_groups[0]["lr"]]))
    train(engine, 2)
    handle.remove()
    optimizers[0].param_groups[0]["lr"] = 0.25
    train(engine, 1)
    engine.destroy()
    return seen


def looked_at(stage: int) -> dict[str, Any]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    theirs, ours = (engine_of(stage, one) for one in (False, True))
    losses = [train(theirs), train(ours, sleeps=True)]  # theirs sleeps only with what this machine has not
    names = sorted(public_of([DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3]))
    answers = [answers_of(one) for one in (theirs, ours)]
    seen = {"losses": losses, "answers": answers, "optimizer": found_in(ours.optimizer, names)}
    theirs.destroy()
    ours.destroy()
    return seen | {"hooks": [hooked(stage, one) for one in (False, True)]}


def main() -> None:
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    out, *stages = sys.argv[1:]
    Path(out).write_text(json.dumps({stage: looked_at(int(stage)) for stage in stages}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

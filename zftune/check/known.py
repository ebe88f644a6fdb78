"""The settings that DeepSpeed takes, in the sections that it reads strictly."""

from __future__ import annotations

from zftune.check.subject import OFFLOAD, ZENFLOW, ZERO


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAST_KNOWN = (0, 19, 8)
KNOWN_VERSIONS = ("0.19.6", "0.19.7", "0.19.8")
OWN_KNOBS = _names("deferred_update apply_lag pipeline skip_nonfinite host_threads")
"""Which the runtime of `zftune run` takes beside, in the section of ZenFlow."""

# What DeepSpeed 0.19.6 takes; it refuses everything else in these sections.
KNOWN: dict[str, frozenset[str]] = {
    ZERO: _names(
        """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param
        offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
        prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold
        stage3_param_persistence_threshold model_persistence_threshold stage3_model_persistence_threshold
        max_live_parameters stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance
        gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save module_granularity_threshold
        stage3_module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params
        allgather_sequential stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        """
    ),
    OFFLOAD: _names(
        """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
        """
    ),
    f"{ZERO}.offload_param": _names("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    ZENFLOW: _names(
        """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
        pt_reserved_cores_perc steps_per_epoch
        """
    ),
    "bf16": _names(
        """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """
    ),
    "fp16": _names(
        """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
        """
    ),
}

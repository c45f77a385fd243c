"""What becomes of each field of megatron-core's dataclasses: handed on, part of the model, refused, or without a flag.

A field that is nowhere here is refused: one that a newer megatron-core adds may change the model in a way that neither
the engines nor the export of weights know.
"""

# Fields of TransformerConfig that are handed on as they are, with what their flags mean.
USED = {
    "tensor_model_parallel_size": "Ranks that each layer is split over.",
    "pipeline_model_parallel_size": "Stages that the layers are split into.",
    "context_parallel_size": "Ranks that a pack's rows are split over; attention's heads, while it computes.",
    "sequence_parallel": "Split norms and residuals over the tensor-parallel ranks too, by tokens.",
    "expert_model_parallel_size": "Ranks that experts are spread over.",
    "expert_tensor_parallel_size": "Ranks that each expert is split over; the tensor-parallel size if not given.",
    "microbatch_group_size_per_vp_stage": "Micro-batches that a virtual stage takes in turn.",
    "overlap_p2p_comm_warmup_flush": "Overlap pipeline communication at the start and end of the schedule too.",
    "account_for_embedding_in_pipeline_split": "Count the embedding as a layer when splitting into stages.",
    "account_for_loss_in_pipeline_split": "Count the output layer as a layer when splitting into stages.",
    "deterministic_mode": "Choose kernels that give the same bits each time.",
    "disable_bf16_reduced_precision_matmul": "Do not let matrix products of bfloat16 accumulate in bfloat16.",
    "use_te_activation_func": "Take TransformerEngine's activation.",
    "transformer_impl": "Whose layers the model is built of; local where TransformerEngine is not installed.",
    "clone_scatter_output_in_embedding": "Keep the embedding's output whole in memory with sequence parallelism.",
    "recompute_granularity": "Compute activations anew in the backward pass: of whole layers, or of chosen modules.",
    "recompute_method": "Whether all layers are computed anew in groups, or some of each stage.",
    "recompute_num_layers": "Layers in a group (uniform), or layers of a stage (block).",
    "recompute_modules": "The modules of `--recompute-granularity selective`.",
    "distribute_saved_activations": "Split saved activations over tensor-parallel ranks.",
    "moe_router_dtype": "The dtype of the router's scores.",
    "moe_grouped_gemm": "Compute the experts of a rank in one call, where there is a kernel for it.",
    "moe_z_loss_coeff": "The weight of the router's z-loss.",
    "moe_token_dispatcher_type": "How tokens reach their experts.",
    "moe_layer_recompute": "The older spelling of `--recompute-granularity selective --recompute-modules moe`.",
    "moe_permute_fusion": "Permute tokens with one kernel, where there is one.",
    "moe_router_fusion": "Route with one kernel, where there is one.",
    "hidden_dropout": "Dropout after attention and MLP.",
    "attention_dropout": "Dropout of attention's weights.",
    "config_logger_dir": "The folder that megatron-core writes its configurations to.",
}

# Fields that describe the model: their flags set this field of the architecture, or must agree with it.
ARCHITECTURE = {
    "num_layers": ("num_layers", "Layers."),
    "hidden_size": ("hidden_size", "The width of the residual stream."),
    "ffn_hidden_size": ("ffn_hidden_size", "The width of the MLP; 8/3 of the hidden size in whole 64s if not given."),
    "num_attention_heads": ("num_attention_heads", "Heads of the queries."),
    "num_query_groups": ("num_query_groups", "Heads of keys and values, with `--group-query-attention`."),
    "kv_channels": ("kv_channels", "The width of a head; the hidden size over the heads if not given."),
    "layernorm_epsilon": ("norm_epsilon", "What is added to the variance in norms; 1e-5 if not given."),
    "add_bias_linear": ("linear_bias", "The linear layers have no bias."),
    "add_qkv_bias": ("qkv_bias", "Queries, keys and values have a bias, where other layers have none."),
    "qk_layernorm": ("qk_layernorm", "Queries and keys are normalized."),
    "moe_router_topk": ("experts.num_active", "Experts that a token goes to; 2 if not given."),
    "moe_ffn_hidden_size": ("experts.ffn_hidden_size", "The width of an expert; that of the MLP if not given."),
    "moe_router_pre_softmax": ("experts.normalize_weights", "The weights of a token's experts do not sum to one."),
}
# Of these, the switches whose presence makes the architecture's field false.
SWITCHED_OFF = ("add_bias_linear", "moe_router_pre_softmax")

# Fields of OptimizerConfig that have a flag of the same name.
OPTIMIZER = {
    "optimizer": "The optimizer.",
    "lr": "The learning rate after the warm-up.",
    "min_lr": "The learning rate after the decay.",
    "decoupled_lr": "The learning rate of embedding and output layer, if it is to be another.",
    "decoupled_min_lr": "The learning rate of embedding and output layer after the decay.",
    "weight_decay": "Weight decay.",
    "apply_wd_to_qk_layernorm": "Decay the norms of queries and keys too.",
    "clip_grad": "The greatest norm of the gradient; a greater one is scaled down to it.",
    "adam_beta1": "Adam's decay of the first moment.",
    "adam_beta2": "Adam's decay of the second moment.",
    "adam_eps": "What Adam adds to the root of the second moment.",
    "sgd_momentum": "The momentum of SGD.",
    "loss_scale": "The scale of the loss with `--fp16`; it adapts itself if not given.",
    "initial_loss_scale": "The scale that adaptation starts from.",
    "min_loss_scale": "The scale that adaptation does not go below.",
    "loss_scale_window": "Updates without overflow after which the scale is doubled.",
    "hysteresis": "Overflows after which the scale is halved.",
    "use_precision_aware_optimizer": "Keep the optimizer's state in other dtypes than float32.",
    "optimizer_cpu_offload": "Keep the optimizer's state on the host.",
    "optimizer_offload_fraction": "The part of the optimizer's state that is kept on the host.",
    "use_torch_optimizer_for_cpu_offload": "Take torch's Adam on the host.",
    "overlap_cpu_optimizer_d2h_h2d": "Overlap the update on the host with copies.",
    "log_num_zeros_in_grad": "Count the zeros of the gradient: `gradient_zeros` of the metrics.",
}

# What holds without the flag, where that is neither the field's own default nor that of Megatron's scripts: dropout is
# off, and packs vary in length.
OWN_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
DEFAULTS = {
    **OWN_DEFAULTS,
    "min_lr": 0.0,
    "optimizer_offload_fraction": 1.0,
}

# Fields that have no flag in Megatron's scripts, or one that is not the field's own and stands in `spelled`.
_WITHOUT_FLAG = """
    timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
    grad_sync_func param_sync_func _cpu_offloading_context init_method output_layer_init_method embedding_init_method
    activation_func experimental_attention_variant_loss_scale_func virtual_pipeline_model_parallel_size params_dtype
    enable_autocast autocast_dtype num_microbatches_with_partial_activation_checkpoints tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 pipeline_dtype variable_seq_lengths batch_p2p_comm batch_p2p_sync
    deallocate_pipeline_outputs cpu_offloading cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage softmax_scale
    gated_linear_unit bias_activation_fusion activation_func_fp8_input_store memory_efficient_layer_norm
    fused_single_qkv_rope fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red use_kitchen
    moe_token_dropping cuda_graph_use_single_mempool cuda_graph_retain_backward_graph disable_parameter_transpose_cache
    inference_sampling_seed use_inference_optimized_layers heterogeneous_block_specs hetereogenous_dist_checkpoint
    quant_recipe tp_comm_atomic_ag tp_comm_atomic_rs moe_router_topk_limited_devices use_te_rng_tracker
    num_moe_experts fp8_param fp4_param overlap_p2p_comm gtp_weight_remat_size expert_gtp_weight_remat_size
    gradient_accumulation_fusion attention_softmax_in_fp32 masked_softmax_fusion persist_layer_norm test_mode
    bias_dropout_fusion apply_rope_fusion fp16 bf16 pipeline_model_parallel_layout cuda_graph_modules
    mamba_training_ssm_states_dtype inference_rng_tracker
"""
WITHOUT_FLAG = frozenset(_WITHOUT_FLAG.split())

_NO_MODEL = "no supported model has it, and engines and weight export would not know it; drop the flag"
_NO_FP8 = "weights are published in the dtype that was trained; write --bf16"
_NO_GRAPHS = "packed groups differ in length from one micro-batch to the next, and a graph needs one length; drop it"
_NO_INFERENCE = "it belongs to Megatron's own inference, and the engines here are vLLM's; drop the flag"
_ONE_CONTEXT = (
    "every pack is split over all context-parallel ranks, which exchange attention's heads all with all; write "
    "--context-parallel-size alone"
)
_NO_OVERLAP = "its buffers are made for one sequence length, and packed groups differ in length; drop the flag"
_NOT_TRAINED = "the policy would not be the one that the engines sample from; drop the flag"
_ALLTOALL = "packed groups differ in length, and alltoall alone takes them here"
_NOT_KNOWN = "it has not been shown to keep log-probs and exported weights right; drop the flag"

# Patterns of fields, the first that matches counts.
REFUSED = {
    "fp32_residual_connection": "the local layers compute in the parameters' dtype; drop the flag",
    "calculate_per_token_loss": "losses are sums with denominators of the whole update already; drop the flag",
    "hierarchical_context_parallel_sizes": _ONE_CONTEXT,
    "hybrid_context_parallel": _ONE_CONTEXT,
    "max_seqlen_per_dp_cp_rank": _ONE_CONTEXT,
    "fp8*": _NO_FP8,
    "fp4*": _NO_FP8,
    "first_last_layers_bf16": _NO_FP8,
    "num_layers_at_*_in_bf16": _NO_FP8,
    "*kitchen*": _NO_FP8,
    "moe_router_padding_for_*": _NO_FP8,
    "*cuda_graph*": _NO_GRAPHS,
    "mtp_*": "multi-token prediction is not trained here; drop the flag",
    "multi_latent_attention": _NO_MODEL,
    "dsa_*": _NO_MODEL,
    "linear_*": _NO_MODEL,
    "experimental_attention_variant": _NO_MODEL,
    "mamba_*": _NO_MODEL,
    "use_mamba_*": _NO_MODEL,
    "is_hybrid_model": _NO_MODEL,
    "mup_*": _NO_MODEL,
    "use_mup": _NO_MODEL,
    "mrope_section": _NO_MODEL,
    "moe_shared_expert_*": _NO_MODEL,
    "use_grouped_gemm_for_*": _NO_MODEL,
    "moe_latent_size": _NO_MODEL,
    "moe_router_num_groups": _NO_MODEL,
    "moe_router_group_topk": _NO_MODEL,
    "moe_router_topk_scaling_factor": _NO_MODEL,
    "moe_router_score_function": _NO_MODEL,
    "moe_router_enable_expert_bias": _NO_MODEL,
    "moe_router_bias_update_rate": _NO_MODEL,
    "moe_apply_probs_on_input": _NO_MODEL,
    "apply_residual_connection_post_layernorm": _NO_MODEL,
    "layernorm_zero_centered_gamma": _NO_MODEL,
    "rotary_interleaved": _NO_MODEL,
    "softmax_type": _NO_MODEL,
    "glu_linear_offset": _NO_MODEL,
    "activation_func_clamp_value": _NO_MODEL,
    "attention_output_gate": _NO_MODEL,
    "qk_l2_norm": _NO_MODEL,
    "qk_clip*": _NOT_TRAINED,
    "moe_expert_*capacity*": _NOT_TRAINED,
    "moe_pad_expert_input_to_capacity": _NOT_TRAINED,
    "moe_token_drop_policy": _NOT_TRAINED,
    "moe_input_jitter_eps": _NOT_TRAINED,
    "moe_router_force_*": _NOT_TRAINED,
    "moe_router_quantile_*": _NOT_TRAINED,
    "tp_comm_*": _NO_OVERLAP,
    "overlap_moe_expert_parallel_comm": _NO_OVERLAP,
    "flash_decode": _NO_INFERENCE,
    "inference_*": _NO_INFERENCE,
    "symmetric_ar_type": _NO_INFERENCE,
    "*_for_prefill": _NO_INFERENCE,
    "*_for_cuda_graph_inference": _NO_INFERENCE,
    "moe_enable_deepep": f"{_ALLTOALL}; drop the flag",
    "moe_use_legacy_grouped_gemm": "megatron-core has given it up; write --moe-grouped-gemm",
    "moe_extended_tp": "megatron-core has given it up; write --expert-tensor-parallel-size",
    "*": _NOT_KNOWN,
}

# Choices of used fields that are not.
ALLOWED: dict[str, tuple[tuple[object, ...], str]] = {
    "hidden_dropout": ((0.0,), f"with dropout {_NOT_TRAINED}"),
    "attention_dropout": ((0.0,), f"with dropout {_NOT_TRAINED}"),
    "normalization": (("RMSNorm",), "every supported model has RMSNorm; write --normalization RMSNorm"),
    "moe_token_dispatcher_type": (("alltoall",), f"{_ALLTOALL}; write alltoall"),
    "optimizer": (("adam", "sgd"), "the state of others cannot be resharded here; write --optimizer adam"),
    "transformer_impl": (("local", "transformer_engine"), f"inference_optimized: {_NO_INFERENCE}"),
}

# Fields whose flag does not change anything here.
_OWN_ATTENTION = "attention is shared-prompt attention, which --shared-prompt-backend chooses"
_LOADED = "weights are those of --hf-model or --load: none are drawn"
_OWN_METRICS = "metrics are those of this package"
IGNORED = {
    "cross_entropy_loss_fusion": "log-probs are computed by an operation of this package",
    "cross_entropy_fusion_impl": "log-probs are computed by an operation of this package",
    "log_max_attention_logit": _OWN_METRICS,
    "moe_per_layer_logging": _OWN_METRICS,
    "barrier_with_L1_time": _OWN_METRICS,
    "attention_backend": _OWN_ATTENTION,
    "flash_attention_version": _OWN_ATTENTION,
    "perform_initialization": _LOADED,
    "use_cpu_initialization": _LOADED,
    "init_method_std": _LOADED,
    "embedding_init_method_std": _LOADED,
    "pipeline_model_parallel_comm_backend": "each platform has one backend of collectives",
    "moe_flex_dispatcher_backend": _ALLTOALL,
    "moe_flex_dispatcher_num_sms": _ALLTOALL,
    "moe_deepep_num_sms": _ALLTOALL,
    "moe_hybridep_num_sms": _ALLTOALL,
}

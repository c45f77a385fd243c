"""Operations on CUDA and NPU whose sums are taken in whatever order threads come in, after torch's own lists."""

# torch sums these in a fixed order if asked (`torch.use_deterministic_algorithms`).
ORDERED_IF_ASKED = {
    "aten::_flash_attention_backward",
    "aten::embedding_dense_backward",
    "aten::index_add",
    "aten::index_add_",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::index_reduce",
    "aten::scatter_add",
    "aten::scatter_add_",
}
# These have no such kernel: torch raises if asked.
NEVER_ORDERED = {
    "aten::bincount",
    "aten::cumsum",
    "aten::cumsum_",
    "aten::_embedding_bag",
    "aten::histc",
    "aten::kthvalue",
    "aten::median",
    "aten::nll_loss2d_forward",
    "aten::put_",
    "aten::scatter_reduce",
    "aten::scatter_reduce_",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_efficient_attention_backward",
}

"""The table of operations a worker may run: nothing outside it ever runs.

Each line of the space `aten` is a signature of ATen, without the arguments that a worker decides for itself
(device, layout, pinned memory, generator). Kinds: T tensor, A tensor or number, i integer, s number, f real,
b bool, d dtype, e one of a few words, q an equation of einsum, m memory format; `*` a list, `?` may be None, `T?*` a
list whose entries may be None.
Left out on purpose: operations that write in place, whose result size depends on data, or that show
memory they did not write (`empty` reads as zeros). The space `dist` is ours: collectives of a program that is one of
several on an axis (collectives.py).
"""

from __future__ import annotations

OPERATIONS = """
# elementwise, one tensor
aten.abs.default(T self) -> T
aten.neg.default(T self) -> T
aten.exp.default(T self) -> T
aten.expm1.default(T self) -> T
aten.log.default(T self) -> T
aten.log2.default(T self) -> T
aten.log10.default(T self) -> T
aten.log1p.default(T self) -> T
aten.sqrt.default(T self) -> T
aten.rsqrt.default(T self) -> T
aten.reciprocal.default(T self) -> T
aten.square.default(T self) -> T
aten.sin.default(T self) -> T
aten.cos.default(T self) -> T
aten.tan.default(T self) -> T
aten.asin.default(T self) -> T
aten.acos.default(T self) -> T
aten.atan.default(T self) -> T
aten.sinh.default(T self) -> T
aten.cosh.default(T self) -> T
aten.tanh.default(T self) -> T
aten.sigmoid.default(T self) -> T
aten.erf.default(T self) -> T
aten.erfc.default(T self) -> T
aten.floor.default(T self) -> T
aten.ceil.default(T self) -> T
aten.round.default(T self) -> T
aten.trunc.default(T self) -> T
aten.frac.default(T self) -> T
aten.sign.default(T self) -> T
aten.isnan.default(T self) -> T
aten.isinf.default(T self) -> T
aten.isfinite.default(T self) -> T
aten.logical_not.default(T self) -> T
aten.bitwise_not.default(T self) -> T
aten.relu.default(T self) -> T
aten.relu6.default(T self) -> T
aten.silu.default(T self) -> T
aten.mish.default(T self) -> T
aten.log_sigmoid.default(T self) -> T
aten.hardswish.default(T self) -> T
aten.hardsigmoid.default(T self) -> T
aten.hardtanh.default(T self, s min_val=-1, s max_val=1) -> T
aten.gelu.default(T self, *, e approximate=none) -> T
aten.elu.default(T self, s alpha=1, s scale=1, s input_scale=1) -> T
aten.selu.default(T self) -> T
aten.celu.default(T self, s alpha=1.0) -> T
aten.leaky_relu.default(T self, s negative_slope=0.01) -> T
aten.softplus.default(T self, s beta=1, s threshold=20) -> T
aten.positive.default(T self) -> T
aten.logit.default(T self, f? eps=None) -> T
aten.sinc.default(T self) -> T
aten.deg2rad.default(T self) -> T
aten.isneginf.default(T self) -> T
aten.isposinf.default(T self) -> T
aten.threshold.default(T self, s threshold, s value) -> T
aten.hardshrink.default(T self, s lambd=0.5) -> T
aten.softshrink.default(T self, s lambd=0.5) -> T
aten.prelu.default(T self, T weight) -> T
aten.glu.default(T self, i dim=-1) -> T
aten.nan_to_num.default(T self, f? nan=None, f? posinf=None, f? neginf=None) -> T
# elementwise, two tensors
aten.add.Tensor(T self, A other, *, s alpha=1) -> T
aten.add.Scalar(T self, s other, s alpha=1) -> T
aten.sub.Tensor(T self, A other, *, s alpha=1) -> T
aten.sub.Scalar(T self, s other, s alpha=1) -> T
aten.rsub.Scalar(T self, s other, s alpha=1) -> T
aten.rsub.Tensor(T self, A other, *, s alpha=1) -> T
aten.mul.Tensor(T self, A other) -> T
aten.mul.Scalar(T self, s other) -> T
aten.div.Tensor(T self, A other) -> T
aten.div.Scalar(T self, s other) -> T
aten.div.Tensor_mode(T self, A other, *, e? rounding_mode) -> T
aten.div.Scalar_mode(T self, s other, *, e? rounding_mode) -> T
aten.true_divide.Tensor(T self, A other) -> T
aten.floor_divide.default(T self, A other) -> T
aten.floor_divide.Scalar(T self, s other) -> T
aten.remainder.Tensor(T self, A other) -> T
aten.remainder.Scalar(T self, s other) -> T
aten.fmod.Tensor(T self, A other) -> T
aten.fmod.Scalar(T self, s other) -> T
aten.pow.Tensor_Scalar(T self, s exponent) -> T
aten.pow.Tensor_Tensor(T self, A exponent) -> T
aten.pow.Scalar(s self, A exponent) -> T
aten.maximum.default(T self, A other) -> T
aten.minimum.default(T self, A other) -> T
aten.max.other(T self, A other) -> T
aten.min.other(T self, A other) -> T
aten.atan2.default(T self, A other) -> T
aten.eq.Tensor(T self, A other) -> T
aten.eq.Scalar(T self, s other) -> T
aten.ne.Tensor(T self, A other) -> T
aten.ne.Scalar(T self, s other) -> T
aten.lt.Tensor(T self, A other) -> T
aten.lt.Scalar(T self, s other) -> T
aten.le.Tensor(T self, A other) -> T
aten.le.Scalar(T self, s other) -> T
aten.gt.Tensor(T self, A other) -> T
aten.gt.Scalar(T self, s other) -> T
aten.ge.Tensor(T self, A other) -> T
aten.ge.Scalar(T self, s other) -> T
aten.logical_and.default(T self, A other) -> T
aten.logical_or.default(T self, A other) -> T
aten.logical_xor.default(T self, A other) -> T
aten.bitwise_and.Tensor(T self, A other) -> T
aten.bitwise_and.Scalar(T self, s other) -> T
aten.bitwise_or.Tensor(T self, A other) -> T
aten.bitwise_or.Scalar(T self, s other) -> T
aten.bitwise_xor.Tensor(T self, A other) -> T
aten.__and__.Tensor(T self, A other) -> T
aten.__and__.Scalar(T self, s other) -> T
aten.__or__.Tensor(T self, A other) -> T
aten.__or__.Scalar(T self, s other) -> T
aten.__xor__.Tensor(T self, A other) -> T
aten.where.self(T condition, T self, A other) -> T
aten.where.ScalarOther(T condition, T self, s other) -> T
aten.where.ScalarSelf(T condition, s self, A other) -> T
aten.where.Scalar(T condition, s self, s other) -> T
aten.masked_fill.Scalar(T self, T mask, s value) -> T
aten.masked_fill.Tensor(T self, T mask, T value) -> T
aten.clamp.default(T self, s? min=None, s? max=None) -> T
aten.clamp.Tensor(T self, T? min=None, T? max=None) -> T
aten.clamp_min.default(T self, s min) -> T
aten.clamp_max.default(T self, s max) -> T
aten.clamp_min.Tensor(T self, T min) -> T
aten.clamp_max.Tensor(T self, T max) -> T
aten.addcmul.default(T self, A tensor1, T tensor2, *, s value=1) -> T
aten.addcdiv.default(T self, A tensor1, T tensor2, *, s value=1) -> T
aten.lerp.Scalar(T self, T end, s weight) -> T
aten.lerp.Tensor(T self, T end, T weight) -> T
aten.fill.Scalar(T self, s value) -> T
aten.fill.Tensor(T self, T value) -> T
aten.xlogy.Tensor(T self, A other) -> T
aten.logaddexp.default(T self, A other) -> T
aten.hypot.default(T self, A other) -> T
aten.clip.default(T self, s? min=None, s? max=None) -> T
# matrix products
aten.linear.default(T input, T weight, T? bias=None) -> T
aten.matmul.default(T self, T other) -> T
aten.mm.default(T self, T mat2) -> T
aten.bmm.default(T self, T mat2) -> T
aten.mv.default(T self, T vec) -> T
aten.dot.default(T self, T tensor) -> T
aten.addmm.default(T self, T mat1, T mat2, *, s beta=1, s alpha=1) -> T
aten.baddbmm.default(T self, T batch1, T batch2, *, s beta=1, s alpha=1) -> T
aten.outer.default(T self, T vec2) -> T
aten.einsum.default(q equation, T* tensors, *, i*? path=None) -> T
# convolution and pooling
aten.conv1d.default(T input, T weight, T? bias=None, i* stride=[1], i* padding=[0], i* dilation=[1], i groups=1) -> T
aten.conv2d.default(T input, T weight, T? bias=None, i* stride=[1, 1], i* padding=[0, 0], i* dilation=[1, 1], i groups=1) -> T
aten.conv3d.default(T input, T weight, T? bias=None, i* stride=[1, 1, 1], i* padding=[0, 0, 0], i* dilation=[1, 1, 1], i groups=1) -> T
aten.conv1d.padding(T input, T weight, T? bias=None, i* stride=[1], e padding=valid, i* dilation=[1], i groups=1) -> T
aten.conv2d.padding(T input, T weight, T? bias=None, i* stride=[1, 1], e padding=valid, i* dilation=[1, 1], i groups=1) -> T
aten.conv_transpose1d.default(T input, T weight, T? bias=None, i* stride=[1], i* padding=[0], i* output_padding=[0], i groups=1, i* dilation=[1]) -> T
aten.conv_transpose2d.input(T input, T weight, T? bias=None, i* stride=[1, 1], i* padding=[0, 0], i* output_padding=[0, 0], i groups=1, i* dilation=[1, 1]) -> T
aten.max_pool1d.default(T self, i* kernel_size, i* stride=[], i* padding=[0], i* dilation=[1], b ceil_mode=False) -> T
aten.max_pool2d.default(T self, i* kernel_size, i* stride=[], i* padding=[0, 0], i* dilation=[1, 1], b ceil_mode=False) -> T
aten.avg_pool1d.default(T self, i* kernel_size, i* stride=[], i* padding=[0], b ceil_mode=False, b count_include_pad=True) -> T
aten.avg_pool2d.default(T self, i* kernel_size, i* stride=[], i* padding=[0, 0], b ceil_mode=False, b count_include_pad=True, i? divisor_override=None) -> T
aten.adaptive_avg_pool1d.default(T self, i* output_size) -> T
aten.adaptive_avg_pool2d.default(T self, i* output_size) -> T
# normalisation, softmax
aten.layer_norm.default(T input, i* normalized_shape, T? weight=None, T? bias=None, f eps=1e-05, b cudnn_enable=True) -> T
aten.rms_norm.default(T input, i* normalized_shape, T? weight=None, f? eps=None) -> T
aten.group_norm.default(T input, i num_groups, T? weight=None, T? bias=None, f eps=1e-05, b cudnn_enabled=True) -> T
aten.batch_norm.default(T input, T? weight, T? bias, T? running_mean, T? running_var, b training, f momentum, f eps, b cudnn_enabled) -> T
aten.softmax.int(T self, i dim, d? dtype=None) -> T
aten.log_softmax.int(T self, i dim, d? dtype=None) -> T
# reductions
aten.sum.default(T self, *, d? dtype=None) -> T
aten.sum.dim_IntList(T self, i*? dim, b keepdim=False, *, d? dtype=None) -> T
aten.mean.default(T self, *, d? dtype=None) -> T
aten.mean.dim(T self, i*? dim, b keepdim=False, *, d? dtype=None) -> T
aten.prod.default(T self, *, d? dtype=None) -> T
aten.prod.dim_int(T self, i dim, b keepdim=False, *, d? dtype=None) -> T
aten.amax.default(T self, i* dim=[], b keepdim=False) -> T
aten.amin.default(T self, i* dim=[], b keepdim=False) -> T
aten.max.default(T self) -> T
aten.min.default(T self) -> T
aten.max.dim(T self, i dim, b keepdim=False) -> T, T
aten.min.dim(T self, i dim, b keepdim=False) -> T, T
aten.argmax.default(T self, i? dim=None, b keepdim=False) -> T
aten.argmin.default(T self, i? dim=None, b keepdim=False) -> T
aten.var.default(T self, b unbiased=True) -> T
aten.var.dim(T self, i*? dim, b unbiased=True, b keepdim=False) -> T
aten.var.correction(T self, i*? dim=None, *, s? correction=None, b keepdim=False) -> T
aten.std.default(T self, b unbiased=True) -> T
aten.std.dim(T self, i*? dim, b unbiased=True, b keepdim=False) -> T
aten.std.correction(T self, i*? dim=None, *, s? correction=None, b keepdim=False) -> T
aten.var_mean.correction(T self, i*? dim=None, *, s? correction=None, b keepdim=False) -> T, T
aten.norm.Scalar(T self, s p=2) -> T
aten.norm.ScalarOpt_dim(T self, s? p, i* dim, b keepdim=False) -> T
aten.linalg_vector_norm.default(T self, s ord=2, i*? dim=None, b keepdim=False, *, d? dtype=None) -> T
aten.logsumexp.default(T self, i* dim, b keepdim=False) -> T
aten.any.default(T self) -> T
aten.any.dim(T self, i dim, b keepdim=False) -> T
aten.all.default(T self) -> T
aten.all.dim(T self, i dim, b keepdim=False) -> T
aten.cumsum.default(T self, i dim, *, d? dtype=None) -> T
aten.cumprod.default(T self, i dim, *, d? dtype=None) -> T
aten.sort.default(T self, i dim=-1, b descending=False) -> T, T
aten.argsort.default(T self, i dim=-1, b descending=False) -> T
aten.topk.default(T self, i k, i dim=-1, b largest=True, b sorted=True) -> T, T
# shape
aten.view.default(T self, i* size) -> T
aten.reshape.default(T self, i* shape) -> T
aten.flatten.using_ints(T self, i start_dim=0, i end_dim=-1) -> T
aten.unflatten.int(T self, i dim, i* sizes) -> T
aten.transpose.int(T self, i dim0, i dim1) -> T
aten.t.default(T self) -> T
aten.permute.default(T self, i* dims) -> T
aten.unsqueeze.default(T self, i dim) -> T
aten.squeeze.default(T self) -> T
aten.squeeze.dim(T self, i dim) -> T
aten.squeeze.dims(T self, i* dim) -> T
aten.expand.default(T self, i* size, *, b implicit=False) -> T
aten.expand_as.default(T self, T other) -> T
aten.view_as.default(T self, T other) -> T
aten.reshape_as.default(T self, T other) -> T
aten.select.int(T self, i dim, i index) -> T
aten.slice.Tensor(T self, i dim=0, i? start=None, i? end=None, i step=1) -> T
aten.narrow.default(T self, i dim, i start, i length) -> T
aten.movedim.int(T self, i source, i destination) -> T
aten.movedim.intlist(T self, i* source, i* destination) -> T
aten.swapaxes.default(T self, i axis0, i axis1) -> T
aten.swapdims.default(T self, i dim0, i dim1) -> T
aten.mT.default(T self) -> T
aten.numpy_T.default(T self) -> T
aten.alias.default(T self) -> T
aten.detach.default(T self) -> T
aten.split.Tensor(T self, i split_size, i dim=0) -> T*
aten.split.sizes(T self, i* split_size, i dim=0) -> T*
aten.split_with_sizes.default(T self, i* split_sizes, i dim=0) -> T*
aten.chunk.default(T self, i chunks, i dim=0) -> T*
aten.unbind.int(T self, i dim=0) -> T*
aten.tensor_split.sections(T self, i sections, i dim=0) -> T*
aten.cat.default(T* tensors, i dim=0) -> T
aten.stack.default(T* tensors, i dim=0) -> T
aten.hstack.default(T* tensors) -> T
aten.vstack.default(T* tensors) -> T
aten.concat.default(T* tensors, i dim=0) -> T
aten.repeat.default(T self, i* repeats) -> T
aten.repeat_interleave.self_int(T self, i repeats, i? dim=None, *, i? output_size=None) -> T
aten.tile.default(T self, i* dims) -> T
aten.flip.default(T self, i* dims) -> T
aten.roll.default(T self, i* shifts, i* dims=[]) -> T
aten.tril.default(T self, i diagonal=0) -> T
aten.triu.default(T self, i diagonal=0) -> T
aten.diagonal.default(T self, i offset=0, i dim1=0, i dim2=1) -> T
aten.diag_embed.default(T self, i offset=0, i dim1=-2, i dim2=-1) -> T
aten.broadcast_to.default(T self, i* size) -> T
aten.broadcast_tensors.default(T* tensors) -> T*
aten.clone.default(T self, *, m? memory_format=None) -> T
aten.contiguous.default(T self, *, m memory_format=contiguous) -> T
aten.pad.default(T self, i* pad, e mode=constant, f? value=None) -> T
aten.constant_pad_nd.default(T self, i* pad, s value=0) -> T
aten.meshgrid.indexing(T* tensors, *, e indexing) -> T*
aten.to.dtype(T self, d dtype, b non_blocking=False, b copy=False, m? memory_format=None) -> T
aten.type_as.default(T self, T other) -> T
aten.unfold.default(T self, i dimension, i size, i step) -> T
aten.atleast_1d.default(T self) -> T
aten.atleast_2d.default(T self) -> T
aten.ravel.default(T self) -> T
aten.view_as_real.default(T self) -> T
aten.view_as_complex.default(T self) -> T
aten.complex.default(T real, T imag) -> T
aten.polar.default(T abs, T angle) -> T
# indexing
aten.embedding.default(T weight, T indices, i padding_idx=-1, b scale_grad_by_freq=False, b sparse=False) -> T
aten.index.Tensor(T self, T?* indices) -> T
aten.index_select.default(T self, i dim, T index) -> T
aten.gather.default(T self, i dim, T index, *, b sparse_grad=False) -> T
aten.scatter.src(T self, i dim, T index, T src) -> T
aten.scatter.value(T self, i dim, T index, s value) -> T
aten.scatter_add.default(T self, i dim, T index, T src) -> T
aten.index_put.default(T self, T?* indices, T values, b accumulate=False) -> T
aten.index_add.default(T self, i dim, T index, T source, *, s alpha=1) -> T
aten.index_fill.int_Scalar(T self, i dim, T index, s value) -> T
aten.take_along_dim.default(T self, T indices, i? dim=None) -> T
aten.slice_scatter.default(T self, T src, i dim=0, i? start=None, i? end=None, i step=1) -> T
aten.select_scatter.default(T self, T src, i dim, i index) -> T
# made from sizes
aten.arange.default(s end, *, d? dtype=None) -> T
aten.arange.start(s start, s end, *, d? dtype=None) -> T
aten.arange.start_step(s start, s end, s step=1, *, d? dtype=None) -> T
aten.zeros.default(i* size, *, d? dtype=None) -> T
aten.ones.default(i* size, *, d? dtype=None) -> T
aten.full.default(i* size, s fill_value, *, d? dtype=None) -> T
aten.zeros_like.default(T self, *, d? dtype=None, m? memory_format=None) -> T
aten.ones_like.default(T self, *, d? dtype=None, m? memory_format=None) -> T
aten.full_like.default(T self, s fill_value, *, d? dtype=None, m? memory_format=None) -> T
aten.new_zeros.default(T self, i* size, *, d? dtype=None) -> T
aten.new_ones.default(T self, i* size, *, d? dtype=None) -> T
aten.new_full.default(T self, i* size, s fill_value, *, d? dtype=None) -> T
aten.eye.default(i n, *, d? dtype=None) -> T
aten.eye.m(i n, i m, *, d? dtype=None) -> T
aten.scalar_tensor.default(s s, *, d? dtype=None) -> T
# losses
aten.cross_entropy_loss.default(T self, T target, T? weight=None, i reduction=1, i ignore_index=-100, f label_smoothing=0.0) -> T
aten.nll_loss.default(T self, T target, T? weight=None, i reduction=1, i ignore_index=-100) -> T
aten.nll_loss_nd.default(T self, T target, T? weight=None, i reduction=1, i ignore_index=-100) -> T
aten.mse_loss.default(T self, T target, i reduction=1) -> T
aten.l1_loss.default(T self, T target, i reduction=1) -> T
aten.smooth_l1_loss.default(T self, T target, i reduction=1, f beta=1.0) -> T
aten.huber_loss.default(T self, T target, i reduction=1, f delta=1.0) -> T
aten.binary_cross_entropy.default(T self, T target, T? weight=None, i reduction=1) -> T
aten.binary_cross_entropy_with_logits.default(T self, T target, T? weight=None, T? pos_weight=None, i reduction=1) -> T
aten.kl_div.default(T self, T target, i reduction=1, *, b log_target=False) -> T
aten.soft_margin_loss.default(T self, T target, i reduction=1) -> T
aten.cosine_embedding_loss.default(T input1, T input2, T target, f margin=0.0, i reduction=1) -> T
aten.margin_ranking_loss.default(T input1, T input2, T target, f margin=0.0, i reduction=1) -> T
aten.hinge_embedding_loss.default(T self, T target, f margin=1.0, i reduction=1) -> T
aten.triplet_margin_loss.default(T anchor, T positive, T negative, f margin=1.0, f p=2.0, f eps=1e-06, b swap=False, i reduction=1) -> T
aten.cosine_similarity.default(T x1, T x2, i dim=1, f eps=1e-08) -> T
aten.pairwise_distance.default(T x1, T x2, f p=2.0, f eps=1e-06, b keepdim=False) -> T
# attention and random
aten.scaled_dot_product_attention.default(T query, T key, T value, T? attn_mask=None, f dropout_p=0.0, b is_causal=False, *, f? scale=None, b enable_gqa=False) -> T
aten.dropout.default(T input, f p, b train) -> T
aten.feature_dropout.default(T input, f p, b train) -> T
aten.rand.default(i* size, *, d? dtype=None) -> T
aten.randn.default(i* size, *, d? dtype=None) -> T
aten.rand_like.default(T self, *, d? dtype=None, m? memory_format=None) -> T
aten.randn_like.default(T self, *, d? dtype=None, m? memory_format=None) -> T
# between the ranks of an axis
dist.enter.default(T self, *, e axis) -> T
dist.reduce.default(T self, *, e axis) -> T
dist.once.default(T self, *, e axis) -> T
dist.maximum.default(T self, *, e axis) -> T
dist.gather.default(T self, i dim, i* lengths, i* owners, i outer=1, i inner=1, *, e axis) -> T
dist.collect.default(T self, i dim, i* lengths, i* owners, i outer=1, i inner=1, *, e axis) -> T
dist.split.default(T self, i dim, i* lengths, i* owners, i outer=1, i inner=1, *, e axis) -> T
dist.attention.default(T query, T key, T value, T? attn_mask, b is_causal, f? scale, i* lengths, i* owners, e method, *, e axis) -> T
dist.cross_entropy.default(T self, T target, T? weight=None, i reduction=1, i ignore_index=-100, f label_smoothing=0.0, *, i start, i classes, e axis) -> T
"""  # noqa: E501  one signature is one line

WORDS = frozenset(
    {"none", "tanh", "trunc", "floor", "valid", "same", "constant", "reflect", "replicate", "circular", "ij", "xy"}
    | {"tp", "cp", "all_gather", "ring", "ulysses"}
)
"""What an argument of kind `e` may say."""

MEMORY_FORMATS = frozenset({"contiguous", "preserve", "channels_last"})

FIXED_ARGUMENTS = {
    ("aten.batch_norm.default", "training"): False,
    ("aten.embedding.default", "sparse"): False,
    ("aten.gather.default", "sparse_grad"): False,
}
"""Arguments that may only have this value: the others write into buffers or give sparse gradients."""

RANDOM = frozenset(
    {
        "aten.dropout.default",
        "aten.feature_dropout.default",
        "aten.rand.default",
        "aten.rand_like.default",
        "aten.randn.default",
        "aten.randn_like.default",
        "aten.scaled_dot_product_attention.default",
    }
)
"""Operations that may draw random numbers; they carry a site."""

ELEMENTWISE_LOSSES = frozenset(
    {
        "aten.mse_loss.default",
        "aten.l1_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.huber_loss.default",
        "aten.binary_cross_entropy.default",
        "aten.binary_cross_entropy_with_logits.default",
        "aten.kl_div.default",
        "aten.soft_margin_loss.default",
        "aten.hinge_embedding_loss.default",
    }
)
"""Losses of single elements; `reduction` says whether they are summed, averaged or left."""

TARGET_LOSSES = frozenset({"aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default"})
"""Losses over classes, with a target and an index to ignore."""

"""What each op does to the parts of a tensor, by class of op: the rules that `Shadow` follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankprobe.graph import op_key, tensors_in

if TYPE_CHECKING:
    from rankprobe.shadow import Parts, Shadow

__all__ = ["ACTIVATIONS", "FROZEN", "JOINT", "LINEAR", "PRODUCTS", "RULES", "THROUGH_ZERO", "without_dtype"]

# Their results are taken for constants: what they are made of does not pass.
FROZEN = {
    *("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "logsumexp", "rsqrt", "sqrt", "reciprocal", "var"),
    *("var_mean", "std", "linalg_vector_norm", "norm", "amax", "amin", "max", "min", "argmax", "argmin", "topk", "sort", "any", "all"),
    *("eq", "ne", "gt", "lt", "ge", "le", "isnan", "isinf", "sign", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros"),
    *(
        "new_ones",
        "new_full",
        "new_empty",
        "bernoulli",
        "rand_like",
        "randn_like",
        "floor",
        "ceil",
        "round",
        "one_hot",
        "histc",
        "bincount",
    ),
}
# Linear in the first argument.
LINEAR = {
    *("clone", "contiguous", "sum", "mean", "neg", "index", "index_select", "gather", "roll", "flip", "repeat", "cumsum", "tril", "triu"),
    *("_unsafe_view", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool1d", "avg_pool1d", "im2col", "col2im", "pixel_shuffle"),
    *("pixel_unshuffle", "repeat_interleave", "masked_select", "reflection_pad1d", "reflection_pad2d", "replication_pad2d", "take"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("upsample_linear1d", "upsample_nearest1d", "constant_pad_nd", "unfold", "native_channel_shuffle", "view", "expand", "permute"),
    *(
        "diff",
        "trace",
        "rot90",
        "take_along_dim",
        "upsample_nearest3d",
        "avg_pool3d",
        "view_copy",
        "expand_copy",
        "permute_copy",
        "slice_copy",
    ),
}
# Linear in several arguments together.
JOINT: dict[str, tuple[int, ...]] = {
    "where": (1, 2),
    "index_put": (0, 2),
    "_index_put_impl": (0, 2),
    "index_add": (0, 3),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "masked_scatter": (0, 2),
    "index_copy": (0, 3),
    "copy": (0, 1),
}
ACTIVATIONS = {
    *(
        "gelu",
        "relu",
        "silu",
        "tanh",
        "sigmoid",
        "erf",
        "exp",
        "expm1",
        "log",
        "log1p",
        "sin",
        "cos",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
    ),
    *(
        "leaky_relu",
        "elu",
        "softplus",
        "mish",
        "clamp",
        "clamp_min",
        "clamp_max",
        "abs",
        "relu6",
        "threshold",
        "selu",
        "celu",
        "log_sigmoid",
    ),
    *(
        "pow",
        "square",
        "prelu",
        "_prelu_kernel",
        "softsign",
        "tan",
        "atan",
        "hardshrink",
        "softshrink",
        "nan_to_num",
        "log_sigmoid_forward",
    ),
}
# Activations that are zero at zero, as most are.
THROUGH_ZERO = {"gelu", "relu", "silu", "tanh", "erf", "sin", "hardswish", "leaky_relu", "elu", "mish", "abs", "relu6", "pow", "square"}
PRODUCTS = {"mul", "mm", "bmm", "matmul", "dot", "mv", "_grouped_mm"}


Rule = Callable[["Shadow", Any, Any, Any, Any], "Parts | None"]


def _add(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    name = op_key(func)
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    first, second = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name]
    return s.add_up(((s.any_parts(args[0], out), first), (s.any_parts(args[1], out), second)), out.shape)


def _addmm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    times = torch.bmm if args[1].dim() == 3 else torch.mm
    product = s.product(times, args[1], args[2])
    return s.add_up(((s.parts(args[0]), kwargs.get("beta", 1)), (product, kwargs.get("alpha", 1))), out.shape)


def _addcmul(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    return s.add_up(((s.parts(args[0]), 1), (s.product(torch.mul, args[1], args[2]), kwargs.get("value", 1))), out.shape)


def _linear(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    product = s.product(torch.nn.functional.linear, args[0], args[1])
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return product if bias is None else s.add_up(((product, 1), (s.parts(bias), 1)), out.shape)


def _convolution(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    product = s.product(lambda x, w: func(x, w, None, *args[3:], **kwargs), args[0], args[1])
    if args[2] is None:
        return product
    bias = {k: p.view(-1, *(1,) * (out.dim() - 2)) for k, p in s.parts(args[2]).items()}
    return s.add_up(((product, 1), (bias, 1)), out.shape)


def _div(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts | None:
    if not s.is_live(args[0]) or kwargs.get("rounding_mode") is not None:
        return None
    below = s.widen(args[1])
    return {k: part / below for k, part in s.parts(args[0]).items()}


def _to_copy(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    s.narrowest = min(s.narrowest, out.dtype, key=lambda d: -torch.finfo(d).eps)
    return {k: part.to(out.device) for k, part in s.parts(args[0]).items()}


def _cat(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    pieces = [s.parts(t) for t in args[0]]
    blank = [s.widen(t) for t in args[0]]
    labels = dict.fromkeys(k for parts in pieces for k in parts)
    return {
        k: func([p[k] if k in p else torch.zeros_like(b) for p, b in zip(pieces, blank, strict=True)], *args[1:], **kwargs) for k in labels
    }


def _masked_fill(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    made = {k: part.masked_fill(args[1], 0.0) for k, part in s.parts(args[0]).items()}
    if isinstance(args[2], Tensor) or args[2] != 0:
        base = made.get(s.constant, torch.zeros_like(s.widen(out)))
        made[s.constant] = base.expand(out.shape).masked_fill(args[1], s.widen(args[2]))
    return made


def _pad(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    made = {k: torch.nn.functional.pad(part, list(args[1])) for k, part in s.parts(args[0]).items()}
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if value:
        edge = torch.nn.functional.pad(torch.zeros_like(s.widen(args[0])), list(args[1]), value=value)
        made[s.constant] = made[s.constant] + edge if s.constant in made else edge
    return made


def _layer_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, shape, weight, bias = args[0], args[1], args[2], args[3]
    dims = tuple(range(-len(shape), 0))
    if isinstance(out, tuple):
        rstd = s.widen(out[2])
    else:
        eps = args[4] if len(args) > 4 else 1e-5
        rstd = (s.widen(x).var(dims, correction=0, keepdim=True) + eps).rsqrt()
    factor = rstd if weight is None else rstd * s.widen(weight)
    made = {k: (part - part.mean(dims, keepdim=True)) * factor for k, part in s.parts(x).items()}
    return made if bias is None else s.add_up(((made, 1), (s.parts(bias), 1)), x.shape)


def _rms_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    weight = args[2]
    rstd = s.widen(out[1])
    return {k: part * rstd if weight is None else part * rstd * s.widen(weight) for k, part in s.parts(args[0]).items()}


def _group_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, weight, bias, samples, channels, _, groups = args[:7]
    rstd = s.widen(out[2]).view(samples, groups, 1)
    wide = (1, channels, *(1,) * (x.dim() - 2))

    def apply(part: Tensor) -> Tensor:
        split = part.reshape(samples, groups, -1)
        normed = ((split - split.mean(-1, keepdim=True)) * rstd).view(x.shape)
        return normed if weight is None else normed * s.widen(weight).view(wide)

    made = {k: apply(part) for k, part in s.parts(x).items()}
    return made if bias is None else s.add_up(((made, 1), ({k: p.view(wide) for k, p in s.parts(bias).items()}, 1)), x.shape)


def _batch_norm(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    x, weight, bias, mean, variance = args[:5]
    eps = args[-1]
    wide = (1, -1, *(1,) * (x.dim() - 2))
    factor = (s.widen(variance) + eps).rsqrt() * (1 if weight is None else s.widen(weight))
    shift = (0 if bias is None else s.widen(bias)) - s.widen(mean) * factor
    made = {k: part * factor.view(wide) for k, part in s.parts(x).items()}
    return s.add_up(((made, 1), ({s.constant: shift.view(wide)}, 1)), x.shape)


def _attention(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    """The kernel itself, on each part of the values: it is linear in them once queries and keys are given."""
    named = [a.name for a in func._schema.arguments]
    place = named.index("value")
    wide = [s.widen(a) for a in args]
    more = {k: s.widen(v) for k, v in kwargs.items()}
    made = {}
    for k, part in s.parts(args[place]).items():
        wide[place] = part
        made[k] = next(iter(tensors_in(func(*wide, **more))))
    return made


def _max_pool(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    values, places = out
    flat = places.flatten(-2)
    return {k: part.flatten(-2).gather(-1, flat).view(values.shape) for k, part in s.parts(args[0]).items()}


def _glu(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    dim = args[1] if len(args) > 1 else -1
    first, second = args[0].chunk(2, dim)
    gate = second.sigmoid()
    s.pointwise(torch.ops.aten.sigmoid, "sigmoid", (second,), {}, gate)
    return s.product(torch.mul, first, gate)


def _dropout(s: Shadow, func: Any, args: Any, kwargs: Any, out: Any) -> Parts:
    return s.parts(args[0])


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"), _convolution),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("native_layer_norm", "layer_norm"), _layer_norm),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm"), _batch_norm),
    "addcmul": _addcmul,
    "linear": _linear,
    "div": _div,
    "_to_copy": _to_copy,
    "masked_fill": _masked_fill,
    "constant_pad_nd": _pad,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "sdpa": _attention,
    "max_pool2d_with_indices": _max_pool,
    "glu": _glu,
    "native_dropout": _dropout,
    "dropout": _dropout,
}


def without_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "dtype"}

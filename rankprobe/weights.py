"""Which weights an attention call works with, read off how its tensors lie in memory.

Queries, keys and values of a head are columns of a product with a weight, reached through views. The columns follow from where
the view begins in that product's storage and from its strides, whether a model has one projection for each or one for all three.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankprobe.graph import Node, moved_from
from rankprobe.sites import Tap

__all__ = ["Head", "Product", "Projections", "columns_of", "made_by", "read_product"]

# Ops that put features elsewhere and leave them as they are.
_MOVES = {
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "clone", "contiguous", "split", "split_with_sizes"),
    *("select", "slice", "unbind", "squeeze", "unsqueeze", "alias", "detach", "_reshape_alias", "chunk", "unflatten", "flatten"),
}


@dataclass(frozen=True, slots=True)
class Product:
    """x times a weight: where it happens, and how the weight, (features in, features out), lies in its parameter."""

    tap: Tap
    x: int  # position of the other operand
    parameter: weakref.ref[Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int  # of the result
    result_offset: int

    def weight(self) -> Tensor | None:
        parameter: Tensor | None = self.parameter()
        return None if parameter is None else parameter.detach().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Head:
    """The columns of a product that a tensor (…, heads, tokens, width) holds: for head h, start + h·step + (0 … width − 1)."""

    product: Product
    start: int
    step: int
    heads: int
    width: int

    def matrix(self, head: int) -> Tensor | None:
        weight = self.product.weight()
        if weight is None:
            return None
        begin = self.start + head * self.step
        return weight[:, begin : begin + self.width]


@dataclass(slots=True)
class Projections:
    """What makes queries, keys and values, and what takes in the result."""

    query: Head
    key: Head
    value: Head
    scale: float
    output: Product | None = None


def read_product(
    tap: Tap, name: str, args: Any, out: Tensor, weights: list[bool], parameters: Mapping[int, weakref.ref[Any]]
) -> Product | None:
    """`weights`: which tensors among `args` are made of parameters."""
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor)]
    flags = dict(zip((i for i, _ in tensors), weights, strict=False))
    sides = [(i, a) for i, a in tensors if a.dim() >= 2]
    if len(sides) != 2 or flags[sides[0][0]] or not flags[sides[1][0]] or sides[1][1].dim() != 2 or "conv" in name:
        return None
    weight = sides[1][1].mT if name == "linear" else sides[1][1]
    try:
        storage, made = weight.untyped_storage()._cdata, out.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # quantised, sparse: no strided storage
        return None
    if storage not in parameters:
        return None  # a cast copy, say
    return Product(
        tap, sides[0][0], parameters[storage], tuple(weight.shape), tuple(weight.stride()), int(weight.storage_offset()),
        made, int(out.storage_offset()),
    )  # fmt: skip


def made_by(node: Node, products: dict[int, Product]) -> Product | None:
    """The product that `node` holds the result of, perhaps laid out otherwise."""
    if node.id in products:
        return products[node.id]
    chain = [node]
    for earlier in moved_from(node):
        if earlier.id in products:
            return products[earlier.id] if all(n.op in _MOVES for n in chain) else None
        chain.append(earlier)
    return None


def columns_of(tensor: Tensor, node: Node, products: dict[int, Product]) -> Head | None:
    """`tensor`: (samples, heads, tokens, width)."""
    product = made_by(node, products)
    if product is None or tensor.dim() != 4:
        return None
    features, (heads, width) = product.shape[1], (tensor.shape[1], tensor.shape[3])
    if tensor.untyped_storage()._cdata == product.storage and tensor.stride(3) == 1:
        start = (int(tensor.storage_offset()) - product.result_offset) % features
        step = tensor.stride(1) % features if heads > 1 else width
    elif features == heads * width:  # a copy; heads follow each other in every model
        start, step = 0, width
    else:
        return None
    return Head(product, start, step, heads, width) if start + (heads - 1) * step + width <= features else None


def composite(matrix: Tensor) -> Tensor:
    """sqrt(‖·‖₁ ‖·‖∞), the paper's norm."""
    size = matrix.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def norms(projections: Projections) -> tuple[list[float], list[float]] | None:
    """For each head ‖W_Q W_Kᵀ‖₁ and the composite norm of W_V W_O. None where a weight is gone or does not fit."""
    output = None if projections.output is None else projections.output.weight()
    heads, width = projections.query.heads, projections.value.width
    if output is None or output.shape[0] != heads * width:
        return None
    scores, values = [], []
    for head in range(heads):
        shared = head * projections.key.heads // heads
        q, k, v = projections.query.matrix(head), projections.key.matrix(shared), projections.value.matrix(shared)
        if q is None or k is None or v is None or q.shape[0] != k.shape[0]:
            return None
        both = torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(both), k.to(both), v.to(both)
        scores.append(float((q @ k.mT).abs().sum(0).amax()))
        values.append(float(composite(v @ output[head * width : (head + 1) * width].to(both))))
    return scores, values

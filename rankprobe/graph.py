"""The ancestry of tensors in one forward pass, so that a model's parts can be read off how its tensors descend
from each other and not off its class names.

A tensor is known by its storage and its place in it, not by its Python object: autograd hands out new objects for
views, and an in-place write through one view changes what all others hold.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "FUSED_LAYER",
    "Graph",
    "Kind",
    "Node",
    "Op",
    "between",
    "decomposed",
    "kind_of",
    "moved_from",
    "op_key",
    "remove_mode",
    "shape_of",
    "tensors_in",
    "terms",
    "written_arguments",
]


class Kind(enum.Enum):
    """What an op does to the tokens that pass through it."""

    MOVE = "move"  # reshapes, casts, slices, pointwise arithmetic: no mixing
    MULTIPLY = "multiply"  # matrix products and convolutions
    NORM = "norm"
    SOFTMAX = "softmax"
    ATTENTION = "attention"  # a fused kernel: scores, softmax and product in one op


_MULTIPLY = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "einsum"),
    *("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "mkldnn_linear", "_mkl_linear", "bilinear"),
    *("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm"),
    *("mkldnn_convolution", "cudnn_convolution", "_trilinear", "convolution_overrideable"),
}
_NORM = {
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm", "rsqrt", "batch_norm"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_no_update"),
    *("layer_norm", "rms_norm", "group_norm", "instance_norm", "linalg_vector_norm", "_batch_norm_with_update", "_fused_rms_norm_backward"),
}
_FUSED = (
    *("scaled_dot_product_attention", "_scaled_dot_product_", "_flash_attention_forward"),
    *("_efficient_attention_forward", "_cudnn_attention_forward"),
)
FUSED_LAYER = "_transformer_encoder_layer_fwd"  # all of an nn.TransformerEncoderLayer


@functools.cache
def op_key(func: Any) -> str:
    """An op's name without its overload; every fused attention kernel is called `sdpa`, since which one runs depends on
    masks, dtypes and devices and not on the model."""
    packet = getattr(func, "overloadpacket", func)
    name = str(getattr(packet, "__name__", packet))
    return "sdpa" if name.startswith(_FUSED) else name


@functools.cache
def kind_of(func: Any) -> Kind:
    name = op_key(func)
    if name == "sdpa" or name in ("_native_multi_head_attention", FUSED_LAYER):
        return Kind.ATTENTION
    if "softmax" in name and "backward" not in name:
        return Kind.SOFTMAX
    if name in _MULTIPLY:
        return Kind.MULTIPLY
    if name in _NORM:
        return Kind.NORM
    return Kind.MOVE


def decomposed(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What an einsum gives when run as the products it is made of, under `mode`; NotImplemented for other ops.

    In inference mode composite ops arrive whole; elsewhere autograd has taken them apart before a mode sees them. The others
    say what they do (linear, softmax, layer_norm); an einsum may be anything."""
    if op_key(func) != "einsum":
        return NotImplemented
    with mode:
        return func.decompose(*args, **kwargs)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take `mode` off the stack, also from under others that were entered since and are still wanted."""
    depth = torch._C._len_torch_dispatch_stack()
    if depth and torch._C._get_dispatch_stack_at(depth - 1) is mode:
        mode.__exit__(None, None, None)
        return
    stack = _get_current_dispatch_mode_stack()
    if not any(m is mode for m in stack):
        return
    above = []
    while stack[-1] is not mode:
        above.append(stack.pop())
        above[-1].__exit__(None, None, None)
    mode.__exit__(None, None, None)
    for other in reversed(above):
        other.__enter__()


@functools.cache
def written_arguments(func: Any) -> tuple[int | str, ...]:
    """Positions (or names, for keyword-only ones) of the arguments that an op writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclass-like outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def shape_of(tensor: Tensor) -> torch.Size:
    """A tensor's shape; empty for a nested tensor, which has none."""
    return torch.Size() if tensor.is_nested else tensor.shape


@dataclass(slots=True, eq=False)
class Node:
    """One value of one tensor: the op that made it and what it was made from."""

    id: int
    op: str
    kind: Kind
    parents: tuple[Node, ...]
    shape: torch.Size
    call: int = 0
    weight: bool = False  # a parameter, or made of parameters alone
    by_weight: bool = False  # a product with a weight
    noise: bool = False  # random numbers: dropout
    stream: bool = False  # descends from embedded tokens: an embedding, a float input, a product with a weight
    decoder: bool = False  # descends from an argument that speaks of a decoder


class Op(NamedTuple):
    """One op of a traced forward, and the nodes it made: from `start` up to `stop`."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class _Storage:
    alive: StorageWeakRef  # held so that the address is not given to another storage
    views: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    written: Node | None = None
    latest: Node | None = None


class Graph:
    """Nodes in order of execution; `node(tensor)` finds the one that a tensor holds now."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._storages: dict[int, _Storage] = {}
        self._loose: dict[int, tuple[Tensor, Node]] = {}

    def add(self, op: str, kind: Kind, parents: Iterable[Node], shape: torch.Size, call: int) -> Node:
        node = Node(len(self.nodes), op, kind, tuple(parents), shape, call)
        self.nodes.append(node)
        return node

    def bind(self, tensor: Tensor, node: Node, written: bool = False) -> None:
        """From now on `tensor` holds `node`; with `written`, so do all views of the same storage."""
        try:
            storage = tensor.untyped_storage()
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        except (RuntimeError, NotImplementedError):  # sparse, nested, opaque: known by object, kept alive
            self._loose[id(tensor)] = (tensor, node)
            return
        record = self._storages.get(storage._cdata)
        if record is None:
            record = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage))
        record.views[place] = node
        record.latest = node
        if written:
            record.written = node

    def node(self, tensor: Tensor) -> Node | None:
        try:
            record = self._storages.get(tensor.untyped_storage()._cdata)
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        except (RuntimeError, NotImplementedError):
            loose = self._loose.get(id(tensor))
            return loose[1] if loose else None
        if record is None:
            return None
        exact = record.views.get(place)
        if exact is not None and (record.written is None or exact.id >= record.written.id):
            return exact
        return record.written or record.latest

    def source(self, tensor: Tensor, op: str, weight: bool = False) -> Node:
        """The node of a tensor that nothing seen has made: an input, a parameter, a constant."""
        found = self.node(tensor)
        if found is None:
            found = self.add(op, Kind.MOVE, (), shape_of(tensor), 0)
            found.weight = weight
            self.bind(tensor, found)
        return found


def between(start: Node, end: Node) -> list[Node]:
    """Nodes on ways from `start` to `end`, in order of execution; empty if `start` is no ancestor of `end`."""
    seen: dict[int, Node] = {}
    todo = [end]
    while todo:
        node = todo.pop()
        if node.id in seen or node.id < start.id:
            continue
        seen[node.id] = node
        todo.extend(node.parents)
    if start.id not in seen:
        return []
    on_way = {start.id}
    way = []
    for number in sorted(seen):
        node = seen[number]
        if number != start.id and any(parent.id in on_way for parent in node.parents):
            on_way.add(number)
            way.append(node)
    return way


def terms(node: Node, limit: int = 64, norms: bool = False) -> Iterator[Node]:
    """`node` and what it was moved or pointwise computed from, nearest first, stopping where tokens or features mix."""
    seen = {node.id}
    todo = [node]
    while todo and limit:
        current = todo.pop(0)
        yield current
        limit -= 1
        if current.kind is Kind.MOVE or (norms and current.kind is Kind.NORM):
            for parent in current.parents:
                if parent.id not in seen and parent.stream and not parent.weight:
                    seen.add(parent.id)
                    todo.append(parent)


def moved_from(node: Node) -> Iterator[Node]:
    """What `node` is a part, a pooling or another shape of, nearest first: through ops with one operand."""
    while node.kind is Kind.MOVE:
        live = [p for p in node.parents if not p.weight]
        if len(live) != 1 or not live[0].stream:
            return
        node = live[0]
        yield node

"""What a caller may hand to a dispatcher, checked before anything is sent."""

from __future__ import annotations

import torch

from dispatch.errors import CapacityExceeded, InputInvalid
from dispatch.layout import DTYPES, DispatchLayout
from dispatch.routing import Indices


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Accept a contiguous CPU tensor of this shape and type.

    Raises:
        InputInvalid: Names the first property that differs.
    """
    if tensor.shape != shape:
        raise InputInvalid(
            name=f"shape of {name}", observed=str(list(tensor.shape)), expected=str(list(shape))
        )
    if tensor.dtype is not dtype:
        raise InputInvalid(name=f"dtype of {name}", observed=str(tensor.dtype), expected=str(dtype))
    if tensor.device.type != "cpu":
        raise InputInvalid(name=f"device of {name}", observed=str(tensor.device), expected="cpu")
    if not tensor.is_contiguous():
        raise InputInvalid(
            name=f"stride of {name}", observed=str(tensor.stride()), expected="contiguous"
        )


def check_choices(
    layout: DispatchLayout, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> Indices:
    """Accept the arguments of `dispatch`; return `topk_ids` as an array that shares its memory.

    Raises:
        InputInvalid: A tensor is not as the layout says. The ids are checked when routed.
        CapacityExceeded: More tokens than `layout.max_tokens`.
    """
    if x.ndim != 2:
        raise InputInvalid(name="shape of x", observed=str(list(x.shape)), expected="[T, H]")
    num_tokens = x.shape[0]
    check_tensor("x", x, (num_tokens, layout.hidden), layout.dtype)
    check_tensor("topk_ids", topk_ids, (num_tokens, layout.topk), torch.int64)
    check_tensor("topk_weights", topk_weights, (num_tokens, layout.topk), torch.float32)
    if num_tokens > layout.max_tokens:
        raise CapacityExceeded(num_tokens=num_tokens, max_tokens=layout.max_tokens)
    ids: Indices = topk_ids.numpy()
    return ids


def id_out_of_range(layout: DispatchLayout, ids: Indices) -> InputInvalid:
    """Return the error that names an id which is neither an expert nor -1; there must be one."""
    worst = int(ids.max() if ids.max() >= layout.num_logical else ids.min())
    return InputInvalid(
        name="an id in topk_ids", observed=str(worst), expected=f"-1..{layout.num_logical - 1}"
    )


def check_layer(layout: DispatchLayout, layer: int) -> None:
    """Accept a layer of the layout.

    Raises:
        InputInvalid: There is no such layer.
    """
    if not 0 <= layer < layout.num_layers:
        raise InputInvalid(
            name="layer", observed=str(layer), expected=f"0..{layout.num_layers - 1}"
        )


def check_expert_out(layout: DispatchLayout, expert_out: torch.Tensor, num_rows: int) -> None:
    """Accept what the experts returned: [R, H] of any wire type that fits the windows.

    Raises:
        InputInvalid: It is something else.
    """
    dtype = expert_out.dtype
    widest = max(layout.dtype.itemsize, layout.combine_dtype.itemsize)
    if dtype not in DTYPES or dtype.itemsize > widest:
        raise InputInvalid(
            name="dtype of expert_out",
            observed=str(dtype),
            expected=f"a floating type of at most {widest} bytes",
        )
    check_tensor("expert_out", expert_out, (num_rows, layout.hidden), dtype)

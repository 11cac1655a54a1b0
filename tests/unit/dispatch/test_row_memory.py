"""Memory of rows comes back when, and only when, nobody can see it any more."""

from __future__ import annotations

import torch

from dispatch.row_memory import KEPT_MAX, SMALL_BYTES, RowMemory

ROWS, WIDTH = SMALL_BYTES // 2048, 1024


def test_a_tensor_is_what_was_asked_for():
    memory = RowMemory()
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        for rows in (0, 1, ROWS, 3 * ROWS + 1):
            tensor = memory.empty(rows, WIDTH, dtype)
            assert (tensor.shape, tensor.dtype) == ((rows, WIDTH), dtype)
            assert tensor.is_contiguous()
            tensor.fill_(1)


def test_memory_is_used_again_only_when_the_last_view_has_ended():
    memory = RowMemory()
    first = memory.empty(ROWS, WIDTH, torch.bfloat16).fill_(1)
    address, part = first.data_ptr(), first[3:5, 7]
    second = memory.empty(ROWS, WIDTH, torch.bfloat16).fill_(2)
    del first
    third = memory.empty(ROWS, WIDTH, torch.bfloat16).fill_(3)
    assert len({address, second.data_ptr(), third.data_ptr()}) == 3
    assert part.tolist() == [1, 1]
    as_numbers = part.view(torch.int16).numpy()
    del part
    assert address != memory.empty(ROWS, WIDTH, torch.bfloat16).data_ptr(), "numpy looks at it"
    del as_numbers
    again = [memory.empty(ROWS, WIDTH, torch.bfloat16) for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in again}


def test_smaller_rows_find_room_in_larger_memory():
    memory = RowMemory()
    address = memory.empty(4 * ROWS, WIDTH, torch.bfloat16).data_ptr()
    assert memory.empty(ROWS, WIDTH, torch.bfloat16).data_ptr() == address
    assert memory.empty(4 * ROWS, WIDTH, torch.bfloat16).data_ptr() == address


def test_what_is_kept_is_bounded():
    memory = RowMemory()
    tensors = [memory.empty(ROWS, WIDTH, torch.bfloat16) for _ in range(3 * KEPT_MAX)]
    tensors.clear()
    assert len(memory._kept) == KEPT_MAX
    assert not memory._lent


def test_it_works_in_inference_mode_and_after_it():
    memory = RowMemory()
    with torch.inference_mode():
        tensor = memory.empty(ROWS, WIDTH, torch.bfloat16).fill_(1)
    assert tensor.sum() == ROWS * WIDTH
    address = tensor.data_ptr()
    del tensor
    plain = memory.empty(ROWS, WIDTH, torch.bfloat16)
    assert plain.data_ptr() == address
    assert not plain.is_inference()

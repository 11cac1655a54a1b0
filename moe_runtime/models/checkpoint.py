"""A Hugging Face checkpoint directory, read tensor by tensor.

A rank reads the tensors that it holds and no others: files are mapped, so what is not read costs
nothing. Every fault of the directory is reported as one line that names the file and the tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_runtime.errors import (
    CheckpointConfigInvalid,
    CheckpointFileInvalid,
    CheckpointNotFound,
    TensorInvalid,
    TensorMissing,
)
from moe_runtime.models.spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FINGERPRINT_BYTES = 1 << 20
READABLE = (torch.bfloat16, torch.float32, torch.float16)
READABLE_STORED = ("BF16", "F32", "F16")


class Checkpoint:
    """An opened checkpoint. Not thread-safe; close it when the weights are loaded.

    Attributes:
        directory: Where it lies.
        spec: Sizes from its `config.json`.
        names_read: Names of all tensors read so far.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.spec = ModelSpec.from_directory(self.directory)
        self.names_read: set[str] = set()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] | None = None

    def open(self) -> Checkpoint:
        """Find out which file holds which tensor.

        Raises:
            CheckpointNotFound: There is neither an index nor a single tensor file.
            CheckpointConfigInvalid: The index is not understood.
            CheckpointFileInvalid: The single tensor file is truncated or not safetensors.
        """
        index = self.directory / INDEX_FILE
        if index.is_file():
            self._file_of = _read_index(index)
        elif (self.directory / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._opened(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise CheckpointNotFound(path=str(self.directory / SINGLE_FILE), what="file")
        return self

    def close(self) -> None:
        """Unmap the files. Tensors that were returned are copies and stay valid."""
        self._files.clear()
        self._file_of = None

    def __enter__(self) -> Checkpoint:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights on disk: the configuration's, else that of the embedding."""
        if self.spec.dtype is not None:
            return self.spec.dtype
        found = self._read("model.embed_tokens.weight").dtype
        return torch.float32 if found == torch.float32 else torch.bfloat16

    def fingerprint(self) -> str:
        """Name the weights, the same on every worker that serves them.

        A digest of the configuration and of each file's name, size, first and last MiB: reading
        every byte of a large checkpoint would cost each start minutes.
        """
        state = hashlib.sha256((self.directory / "config.json").read_bytes())
        for name in sorted(set(self._names.values())):
            path = self.directory / name
            state.update(f"{name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                state.update(file.read(FINGERPRINT_BYTES))
                file.seek(-min(path.stat().st_size, FINGERPRINT_BYTES), os.SEEK_END)
                state.update(file.read())
        return state.hexdigest()[:32]

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor into fresh memory.

        Args:
            name: Its name in the files.
            shape: The shape that the configuration implies.
            dtype: Type to convert to.

        Raises:
            TensorMissing: In no file.
            TensorInvalid: Another shape, or not a floating type.
            CheckpointNotFound: The index names a file that does not exist.
            CheckpointFileInvalid: Its file is truncated or not safetensors.
        """
        found = self._read(name)
        self._check(name, found, shape)
        # Even without a conversion a copy: what safetensors returns may be the mapped file.
        return found.to(dtype, copy=True)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Look at one tensor without reading it.

        Raises:
            CheckpointError: As `tensor`.
        """
        found = self._look_at(name, lambda file: file.get_slice(name))
        stored = tuple(found.get_shape())
        if stored != shape:
            raise self._invalid(name, f"shape {list(shape)}", f"{list(stored)}")
        if found.get_dtype() not in READABLE_STORED:
            raise self._invalid(name, "a floating type", str(found.get_dtype()))

    def read_expert(self, moe_layer: int, logical_expert: int, blob: torch.Tensor) -> None:
        """Read one expert's three matrices into a blob of the bank.

        Args:
            moe_layer: Ordinal among the layers with experts.
            logical_expert: Expert.
            blob: [3, I, H] in the model's dtype: gate and up rows, then down [H, I] in the rest.

        Raises:
            CheckpointError: As `tensor`; the blob then holds anything.
        """
        spec = self.spec
        inner, hidden = spec.moe_intermediate_size, spec.hidden_size
        layer = spec.moe_layers[moe_layer]
        prefix = f"model.layers.{layer}.mlp.experts.{logical_expert}"
        parts = (
            ("gate_proj", (inner, hidden), blob[0]),
            ("up_proj", (inner, hidden), blob[1]),
            ("down_proj", (hidden, inner), blob[2].view(hidden, inner)),
        )
        for part, shape, target in parts:
            name = f"{prefix}.{part}.weight"
            found = self._read(name)
            self._check(name, found, shape)
            target.copy_(found)

    @property
    def _names(self) -> dict[str, str]:
        assert self._file_of is not None, "open() first"
        return self._file_of

    def _opened(self, filename: str) -> Any:
        """The mapped file; opening it checks its header against its length."""
        if filename not in self._files:
            path = self.directory / filename
            if not path.is_file():
                raise CheckpointNotFound(path=str(path), what="file")
            try:
                self._files[filename] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointFileInvalid(path=str(path), problem=str(error)) from error
        return self._files[filename]

    def _read(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._look_at(name, lambda file: file.get_tensor(name))
        self.names_read.add(name)
        return found

    def _look_at(self, name: str, look: Callable[[Any], Any]) -> Any:
        """Apply `look` to the file that holds a tensor."""
        filename = self._names.get(name)
        if filename is None:
            raise TensorMissing(path=str(self.directory), name=name)
        file = self._opened(filename)
        try:
            return look(file)
        except SafetensorError as error:
            if name not in set(file.keys()):
                raise TensorMissing(path=str(self.directory / filename), name=name) from error
            path = str(self.directory / filename)
            raise CheckpointFileInvalid(path=path, problem=str(error)) from error

    def _check(self, name: str, found: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(found.shape) != shape:
            raise self._invalid(name, f"shape {list(shape)}", f"{list(found.shape)}")
        if found.dtype not in READABLE:
            raise self._invalid(name, "a floating type", str(found.dtype))

    def _invalid(self, name: str, expected: str, found: str) -> TensorInvalid:
        path = str(self.directory / self._names[name])
        return TensorInvalid(path=path, name=name, expected=expected, found=found)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a tensor index: {error}"
        raise CheckpointConfigInvalid(
            path=str(path), field="weight_map", problem=problem
        ) from error
    if not isinstance(files, dict):
        raise CheckpointConfigInvalid(path=str(path), field="weight_map", problem="not a table")
    return {str(name): str(file) for name, file in files.items()}

"""Errors of the serving runtime. Configuration errors live in `configs`.

    MoeRuntimeError
    ├── CheckpointError
    │   ├── CheckpointNotFound
    │   ├── CheckpointConfigInvalid
    │   ├── UnsupportedModel
    │   ├── CheckpointFileInvalid
    │   ├── TensorMissing
    │   └── TensorInvalid
    ├── ExpertNotResident
    └── ExactnessUnavailable

Every message is one line: what, where, expected, found.
"""

from __future__ import annotations

from transfer.typed_error import TypedError


class MoeRuntimeError(TypedError):
    """Base of all errors of this package; `retryable` says whether trying again can help."""

    def __post_init__(self) -> None:
        """Keep the text one line, whatever it quotes."""
        self.args = (" ".join(self._message().split()),)


class CheckpointError(MoeRuntimeError):
    """A checkpoint directory can't be served."""


class CheckpointNotFound(CheckpointError):
    """The directory, or a file that it must have, does not exist."""

    path: str
    what: str

    def _message(self) -> str:
        return f"checkpoint {self.what} not found: {self.path}"


class CheckpointConfigInvalid(CheckpointError):
    """`config.json` or the tensor index is not understood."""

    path: str
    field: str
    problem: str

    def _message(self) -> str:
        named = f"{self.field}: " if self.field else ""
        return f"{self.path}: {named}{self.problem}"


class UnsupportedModel(CheckpointError):
    """A sound checkpoint of a model, or a variant, that this runtime does not compute."""

    path: str
    found: str
    expected: str

    def _message(self) -> str:
        return f"{self.path}: {self.found} is not supported (expected {self.expected})"


class CheckpointFileInvalid(CheckpointError):
    """A tensor file is truncated or is not a safetensors file."""

    path: str
    problem: str

    def _message(self) -> str:
        return f"{self.path}: not readable: {self.problem}"


class TensorMissing(CheckpointError):
    """A tensor that the model needs is in no file of the checkpoint."""

    path: str
    name: str

    def _message(self) -> str:
        return f"{self.path}: tensor {self.name} is missing"


class TensorInvalid(CheckpointError):
    """A tensor has another shape or type than the configuration says."""

    path: str
    name: str
    expected: str
    found: str

    def _message(self) -> str:
        return f"{self.path}: tensor {self.name}: expected {self.expected}, found {self.found}"


class ExpertNotResident(MoeRuntimeError, LookupError):
    """An expert was asked for whose weights are not (or not completely) in the bank."""

    layer: int
    logical_expert: int

    def _message(self) -> str:
        return f"expert {self.logical_expert} of layer {self.layer} is not resident"


class ExactnessUnavailable(MoeRuntimeError):
    """No row tile gives the same bits at every row position on this machine."""

    in_features: int
    out_features: int
    dtype: str

    def _message(self) -> str:
        return (
            f"no row tile of a {self.dtype} product {self.in_features} -> {self.out_features}"
            " gives equal bits at every row position on this machine: use exactness: tolerant"
        )

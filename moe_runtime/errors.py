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

from typing import Any, ClassVar


class MoeRuntimeError(Exception):
    """Base of all errors of this package; `retryable` says whether trying again can help."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(" ".join(message.split()))
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword fields; without this an error could not cross processes.
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[MoeRuntimeError], fields: dict[str, object]) -> MoeRuntimeError:
    return kind(**fields)  # type: ignore[arg-type]


class CheckpointError(MoeRuntimeError):
    """A checkpoint directory can't be served."""


class CheckpointNotFound(CheckpointError):
    """The directory, or a file that it must have, does not exist."""

    def __init__(self, *, path: str, what: str) -> None:
        super().__init__(f"checkpoint {what} not found: {path}", path=path, what=what)
        self.path = path


class CheckpointConfigInvalid(CheckpointError):
    """`config.json` or the tensor index is not understood."""

    def __init__(self, *, path: str, field: str, problem: str) -> None:
        named = f"{field}: " if field else ""
        super().__init__(f"{path}: {named}{problem}", path=path, field=field, problem=problem)
        self.path = path
        self.field = field


class UnsupportedModel(CheckpointError):
    """A sound checkpoint of a model, or a variant, that this runtime does not compute."""

    def __init__(self, *, path: str, found: str, expected: str) -> None:
        message = f"{path}: {found} is not supported (expected {expected})"
        super().__init__(message, path=path, found=found, expected=expected)
        self.path = path
        self.found = found


class CheckpointFileInvalid(CheckpointError):
    """A tensor file is truncated or is not a safetensors file."""

    def __init__(self, *, path: str, problem: str) -> None:
        super().__init__(f"{path}: not readable: {problem}", path=path, problem=problem)
        self.path = path


class TensorMissing(CheckpointError):
    """A tensor that the model needs is in no file of the checkpoint."""

    def __init__(self, *, path: str, name: str) -> None:
        super().__init__(f"{path}: tensor {name} is missing", path=path, name=name)
        self.path = path
        self.name = name


class TensorInvalid(CheckpointError):
    """A tensor has another shape or type than the configuration says."""

    def __init__(self, *, path: str, name: str, expected: str, found: str) -> None:
        message = f"{path}: tensor {name}: expected {expected}, found {found}"
        super().__init__(message, path=path, name=name, expected=expected, found=found)
        self.path = path
        self.name = name


class ExpertNotResident(MoeRuntimeError, LookupError):
    """An expert was asked for whose weights are not (or not completely) in the bank."""

    def __init__(self, *, layer: int, logical_expert: int) -> None:
        message = f"expert {logical_expert} of layer {layer} is not resident"
        super().__init__(message, layer=layer, logical_expert=logical_expert)
        self.layer = layer
        self.logical_expert = logical_expert


class ExactnessUnavailable(MoeRuntimeError):
    """No row tile gives the same bits at every row position on this machine."""

    def __init__(self, *, in_features: int, out_features: int, dtype: str) -> None:
        message = (
            f"no row tile of a {dtype} product {in_features} -> {out_features} gives equal bits "
            "at every row position on this machine: use exactness: tolerant"
        )
        super().__init__(message, in_features=in_features, out_features=out_features, dtype=dtype)

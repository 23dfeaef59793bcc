"""The layout of the weights in vLLM, which are read and written under the policy's names.

vLLM fuses q, k and v into one tensor, and gate and up into another. On a CPU it packs linear layers so that their
parameters look empty. These functions run in the process of vLLM's model: the trainer, or a server's worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lgrpo.functional import CHUNK_BYTES, as_numbers, chunks, named_checksums, tensor_checksums

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED_INDEX = {part: (fused, i) for fused, parts in _FUSED.items() for i, part in enumerate(parts)}
"""The policy's name of a part → vLLM's name of the fused tensor, and the part's index in it."""

Layout = dict[str, list[tuple[str, int]]]
"""vLLM's name of a tensor → the policy's tensors in it, in order, each with its number of rows."""


def engine_layout(shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Return which of the policy's tensors each tensor of vLLM consists of.

    >>> engine_layout({"l.k_proj.weight": (2, 4), "l.q_proj.weight": (4, 4), "norm.weight": (4,)})
    {'l.qkv_proj.weight': [('l.q_proj.weight', 4), ('l.k_proj.weight', 2)], 'norm.weight': [('norm.weight', 4)]}
    """
    found: dict[str, list[tuple[int, str, int]]] = {}
    for name, shape in shapes.items():
        pieces = name.split(".")
        part = next((p for p in pieces if p in FUSED_INDEX), None)
        fused, order = FUSED_INDEX[part] if part else ("", 0)
        engine_name = ".".join(fused if p == part else p for p in pieces) if part else name
        found.setdefault(engine_name, []).append((order, name, int(shape[0])))
    return {name: [(part, rows) for _, part, rows in sorted(parts)] for name, parts in found.items()}


@torch.no_grad()
def read_tensor(model: nn.Module, name: str) -> Tensor:
    """Return one of vLLM's tensors, read through the kernel if it is packed, whole, and without vocabulary padding."""
    module, leaf = _owner(model, name), name.rpartition(".")[2]
    tensor = getattr(module, leaf)
    kernel = getattr(module, "cpu_linear", None)
    if leaf == "weight" and kernel is not None:
        width = int(tensor.shape[1] if tensor.numel() else module.input_size_per_partition)  # type: ignore[arg-type]
        tensor = kernel(torch.eye(width, dtype=tensor.dtype), tensor, None).t()  # exact: 1 · w + 0
    if leaf == "weight" and getattr(module, "input_size", 0) != getattr(module, "input_size_per_partition", 0):
        tensor = gather_shards(tensor, 1, int(module.input_size))  # type: ignore[arg-type]
    rows = getattr(module, "org_vocab_size", None)
    if rows is None:
        return tensor
    whole = gather_shards(tensor, 0, int(module.num_embeddings_padded))  # type: ignore[arg-type]
    return whole[: int(rows)]


def gather_shards(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return the whole tensor if the workers of a server have shards of it along ``dim``. All workers must call it."""
    if tensor.shape[dim] == size:
        return tensor
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    num_workers = get_tensor_model_parallel_world_size()
    copies = tensor.shape[dim] * num_workers // size  # with fewer heads than workers, some shards are equal
    if copies * size != tensor.shape[dim] * num_workers:
        return tensor
    pieces = tensor_model_parallel_all_gather(tensor.contiguous(), dim).chunk(num_workers, dim)
    return torch.cat(pieces[::copies], dim)


def read_parts(model: nn.Module, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the layout under the policy's name."""
    for name, parts in layout.items():
        try:
            tensor = read_tensor(model, name)
        except AttributeError as error:
            raise LookupError(f"vLLM's {type(model).__name__} has no {name}") from error
        rows = [count for _, count in parts]
        local = rows if tensor.shape[0] == sum(rows) else _local_rows(model, name)
        if tensor.shape[0] != sum(local) or len(local) != len(rows):
            names = [part for part, _ in parts]
            raise LookupError(f"vLLM's {name} has {tensor.shape[0]} rows, but {names} have {sum(rows)}")
        for (part, count), piece in zip(parts, tensor.split(local), strict=True):
            yield part, gather_shards(piece, 0, count)


class WeightViews:
    """Views of the policy's tensors in the memory of a vLLM model that stores them unchanged.

    Finding them takes longer than copying the weights, so it is done once, and ``is_current`` checks them before use.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        check_complete(model, layout)
        self.tensors = dict(read_parts(model, layout))
        """Views by the policy's names."""
        self._owners = [(module, *item) for module in model.modules() for item in module._parameters.items()]
        self._addresses = self._current_addresses()

    @staticmethod
    @torch.no_grad()
    def find(model: nn.Module, layout: Layout) -> WeightViews | None:
        """Return the views, or None if vLLM packs, pads or shards a tensor."""
        held = {name: parameter.shape[0] for name, parameter in model.named_parameters(remove_duplicate=False)}
        if held != {name: sum(rows for _, rows in parts) for name, parts in layout.items()}:
            return None
        try:
            views = WeightViews(model, layout)
        except LookupError:
            return None
        storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        if any(tensor.untyped_storage().data_ptr() not in storages for tensor in views.tensors.values()):
            return None  # a copy was read, which vLLM does not sample from
        for tensor in {tensor.dtype: tensor for tensor in views.tensors.values()}.values():
            torch._foreach_copy_([tensor[:1]], [tensor[:1].clone()])  # loads the CUDA kernel before the next sync
        return views

    def is_current(self) -> bool:
        """Return whether vLLM still has the tensors that were found, in the same memory."""
        return self._current_addresses() == self._addresses

    def _current_addresses(self) -> list[int]:
        pairs = [(module._parameters.get(name), found) for module, name, found in self._owners]
        return [now.data_ptr() if now is not None and now is found else -1 for now, found in pairs]

    @torch.no_grad()
    def copy_from(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's tensors into vLLM's; raise ``LookupError`` if one is missing or unknown.

        >>> model = nn.ModuleDict({"qkv_proj": nn.Linear(1, 3, bias=False)})
        >>> views = WeightViews(model, engine_layout({"q_proj.weight": (2, 1), "k_proj.weight": (1, 1)}))
        >>> views.copy_from({"k_proj.weight": torch.zeros(1, 1), "q_proj.weight": torch.ones(2, 1)}.items())
        >>> model["qkv_proj"].weight.flatten().tolist()
        [1.0, 1.0, 0.0]
        """
        missing = dict(self.tensors)
        for chunk in chunks(weights, CHUNK_BYTES):
            for name, tensor in chunk.items():
                if name not in missing or missing[name].shape != tensor.shape:
                    raise LookupError(f"the first sync did not have {name} of shape {tuple(tensor.shape)}")
            torch._foreach_copy_([missing.pop(name) for name in chunk], list(chunk.values()))
        for name in missing:
            raise LookupError(f"{name} is missing")

    def checksums(self) -> dict[str, int]:
        """Return checksums of the current values; a GPU reads all tensors at once."""
        sums = tensor_checksums(list(self.tensors.values()))
        return dict(zip(self.tensors, as_numbers([sums]), strict=True))


def _local_rows(model: nn.Module, name: str) -> list[int]:
    """Return how many rows of each part of a sharded tensor this worker has."""
    return [int(size) for size in getattr(_owner(model, name), "output_partition_sizes", ())]


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a tensor; inside of the one that applies an adapter to it, if any."""
    module = model.get_submodule(name.rpartition(".")[0])
    return getattr(module, "base_layer", module)


def check_complete(model: nn.Module, layout: Layout) -> None:
    """Raise ``LookupError`` if a weight of vLLM's model is not in the layout."""
    with_weight = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    if missing := sorted(f"{name}.weight" for name in with_weight if f"{name}.weight" not in layout):
        raise LookupError(f"vLLM's {missing[0]} was not among the synced weights")


def checksums(model: nn.Module, layout: Layout) -> dict[str, int]:
    """Return checksums of vLLM's weights under the policy's names."""
    check_complete(model, layout)
    return named_checksums(read_parts(model, layout))

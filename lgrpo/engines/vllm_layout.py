"""The weights inside vLLM, read back under the policy's names.

vLLM fuses q, k and v into one tensor, and gate and up into another; on a CPU it packs linear layers so that their
parameters look empty. These functions run where vLLM's model is: in this process, or in a server's worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lgrpo.functional import AT_ONCE, as_numbers, chunks, named_checksums, tensor_checksums

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Layout = dict[str, list[tuple[str, int]]]
"""vLLM's name of a tensor → the policy's tensors in it, each with its number of rows, from the top."""


def engine_layout(shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Where each of the policy's tensors lies in vLLM.

    >>> engine_layout({"l.k_proj.weight": (2, 4), "l.q_proj.weight": (4, 4), "norm.weight": (4,)})
    {'l.qkv_proj.weight': [('l.q_proj.weight', 4), ('l.k_proj.weight', 2)], 'norm.weight': [('norm.weight', 4)]}
    """
    layout: Layout = {}
    place = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}
    orders: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        pieces = name.split(".")
        part = next((p for p in pieces if p in place), None)
        fused, order = place[part] if part else ("", 0)
        engine_name = ".".join(fused if p == part else p for p in pieces) if part else name
        layout.setdefault(engine_name, []).append((name, int(shape[0])))
        orders.setdefault(engine_name, []).append(order)
    return {
        name: [parts[j] for j in sorted(range(len(parts)), key=orders[name].__getitem__)]
        for name, parts in layout.items()
    }


@torch.no_grad()
def read_tensor(model: nn.Module, name: str) -> Tensor:
    """One of vLLM's tensors as it is used: through the kernel where it is packed, without a vocabulary's padding."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module = getattr(module, "base_layer", module)  # below an adapter
    tensor = getattr(module, leaf)
    kernel = getattr(module, "cpu_linear", None)
    if leaf == "weight" and kernel is not None:
        width = int(tensor.shape[1] if tensor.numel() else module.input_size_per_partition)  # type: ignore[arg-type]
        tensor = kernel(torch.eye(width, dtype=tensor.dtype), tensor, None).t()  # exact: 1 · w + 0
    if leaf == "weight" and getattr(module, "input_size", 0) != getattr(module, "input_size_per_partition", 0):
        tensor = gathered(tensor, 1, int(module.input_size))  # type: ignore[arg-type]
    rows = getattr(module, "org_vocab_size", None)
    if rows is None:
        return tensor
    whole = gathered(tensor, 0, int(module.num_embeddings_padded))  # type: ignore[arg-type]
    return whole[: int(rows)]


def gathered(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor that is spread over the workers of a server along a dimension, whole. All of them call it together."""
    if tensor.shape[dim] == size:
        return tensor
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

    num_workers = get_tensor_model_parallel_world_size()
    copies = tensor.shape[dim] * num_workers // size  # where heads are fewer than workers, several have the same
    if copies * size != tensor.shape[dim] * num_workers:
        return tensor
    pieces = tensor_model_parallel_all_gather(tensor.contiguous(), dim).chunk(num_workers, dim)
    return torch.cat(pieces[::copies], dim)


def read_parts(model: nn.Module, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the layout under the policy's name for it."""
    for name, parts in layout.items():
        try:
            tensor = read_tensor(model, name)
        except AttributeError as error:
            raise LookupError(f"vLLM's {type(model).__name__} has no {name}") from error
        rows = [count for _, count in parts]
        own = rows if tensor.shape[0] == sum(rows) else own_rows(model, name)
        if tensor.shape[0] != sum(own) or len(own) != len(rows):
            names = [part for part, _ in parts]
            raise LookupError(f"vLLM's {name} has {tensor.shape[0]} rows, but {names} were given {sum(rows)}")
        for (part, count), piece in zip(parts, tensor.split(own), strict=True):
            yield part, gathered(piece, 0, count)


class Places:
    """Where each of the policy's tensors lies in vLLM's model, of one that keeps them as they come.

    To look takes longer than to copy, so it is done once.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        check_covered(model, layout)
        self.tensors = dict(read_parts(model, layout))
        """Parts of vLLM's own, by the policy's names."""
        self._owners = [(module, *own) for module in model.modules() for own in module._parameters.items()]
        self._addresses = self._look()

    @staticmethod
    @torch.no_grad()
    def found(model: nn.Module, layout: Layout) -> Places | None:
        """None where vLLM packs, pads or spreads a tensor; else those of a layer lie below each other."""
        held = {name: parameter.shape[0] for name, parameter in model.named_parameters(remove_duplicate=False)}
        if held != {name: sum(rows for _, rows in parts) for name, parts in layout.items()}:
            return None
        try:
            places = Places(model, layout)
        except LookupError:
            return None
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        is_own = all(tensor.untyped_storage().data_ptr() in own for tensor in places.tensors.values())
        if not is_own:  # what was read is a copy: nobody would sample from it
            return None
        for tensor in {tensor.dtype: tensor for tensor in places.tensors.values()}.values():
            torch._foreach_copy_([tensor[:1]], [tensor[:1].clone()])  # else the next sync waits for CUDA to load that
        return places

    def are_current(self) -> bool:
        """Whether vLLM's tensors are those that were found, in the same memory."""
        return self._look() == self._addresses

    def _look(self) -> list[int]:
        own = [(module._parameters.get(name), then) for module, name, then in self._owners]
        return [now.data_ptr() if now is not None and now is then else -1 for now, then in own]

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The policy's tensors straight into vLLM's: every one of them, or an error.

        >>> model = nn.ModuleDict({"qkv_proj": nn.Linear(1, 3, bias=False)})
        >>> places = Places(model, engine_layout({"q_proj.weight": (2, 1), "k_proj.weight": (1, 1)}))
        >>> places.fill({"k_proj.weight": torch.zeros(1, 1), "q_proj.weight": torch.ones(2, 1)}.items())
        >>> model["qkv_proj"].weight.flatten().tolist()
        [1.0, 1.0, 0.0]
        """
        missing = dict(self.tensors)
        for chunk in chunks(weights, AT_ONCE):
            for name, tensor in chunk.items():
                if name not in missing or missing[name].shape != tensor.shape:
                    raise LookupError(f"vLLM was not given {name} of shape {tuple(tensor.shape)} before")
            torch._foreach_copy_([missing.pop(name) for name in chunk], list(chunk.values()))
        for name in missing:
            raise LookupError(f"{name} is missing")

    def checksums(self) -> dict[str, int]:
        """Of the tensors as they are now, which a GPU reads all at once."""
        sums = tensor_checksums(list(self.tensors.values()))
        return dict(zip(self.tensors, as_numbers([sums]), strict=True))


def own_rows(model: nn.Module, name: str) -> list[int]:
    """Of a tensor's parts, how many rows this worker has, where others have the rest."""
    module = model.get_submodule(name.rpartition(".")[0])
    module = getattr(module, "base_layer", module)
    return [int(size) for size in getattr(module, "output_partition_sizes", ())]


def check_covered(model: nn.Module, layout: Layout) -> None:
    """An error where a weight of vLLM's model is reached by no tensor of the policy."""
    with_weight = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    if missing := sorted(f"{name}.weight" for name in with_weight if f"{name}.weight" not in layout):
        raise LookupError(f"vLLM's {missing[0]} was not among the weights it was given")


def checksums(model: nn.Module, layout: Layout) -> dict[str, int]:
    """Checksums of vLLM's own weights, under the policy's names."""
    check_covered(model, layout)
    return named_checksums(read_parts(model, layout))

"""How much memory an update takes, from the sizes of the model alone."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from lgrpo.policy.causal import CausalPolicy


def activation_bytes(
    config: PretrainedConfig, tokens: float, bytes_each: int, checkpointed: bool, share: float = 1.0
) -> float:
    """What the layers keep of a micro-batch for the backward pass. With checkpointing: the input of each.

    ``share`` is ``policy.activation_memory``. Torch means by it a share of what lies between the inputs of a layer, its
    weights among them, and all it would keep; so where weights are larger than activations, it changes nothing.
    """
    text = config.get_text_config()
    width, inner = text.hidden_size, getattr(text, "intermediate_size", 4 * text.hidden_size)
    inputs = tokens * width * bytes_each
    if checkpointed:
        return text.num_hidden_layers * inputs
    whole = tokens * (10 * width + 3 * inner) * bytes_each
    least = inputs + 4 * width * (4 * width + 3 * inner)
    return text.num_hidden_layers * min(whole, share * whole + (1 - share) * least)


def logit_bytes(config: PretrainedConfig, tokens: float, chunk_size: int) -> float:
    """Logits of a chunk: themselves, their gradient, and room for a copy."""
    return 3 * min(chunk_size, tokens) * config.get_text_config().vocab_size * 4


def local_bytes(parameter: Tensor) -> int:
    """Of a parameter, this process's part."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.numel() * own.element_size()


def refuse_over_budget(policy: CausalPolicy, budget: int, bytes_each: int, free: float) -> None:
    """An error where an update in micro-batches of that many tokens will not fit into what is free."""
    config, is_checkpointed = policy.model.config, policy.gradient_checkpointing

    def needs(tokens: float) -> float:
        kept = activation_bytes(config, tokens, bytes_each, is_checkpointed, policy.activation_memory)
        return kept + logit_bytes(config, tokens, policy.chunk_size)

    state = 3 * sum(local_bytes(p) for p in policy.parameters() if p.requires_grad)  # gradients, two moments at most
    refuse_what_does_not_fit(budget, needs, state, free)


def refuse_what_does_not_fit(budget: int, needs: Callable[[float], float], state: float, free: float) -> None:
    """An error where a micro-batch of that many tokens needs more memory than there is.

    Args:
        budget: Tokens of a micro-batch.
        needs: Bytes that so many tokens need: what the layers keep of them, and logits.
        state: Bytes of gradients and optimizer, which are not there yet.
        free: Bytes there are.
    """
    if needs(budget) + state > free:
        fitting = max(0, bisect(range(budget), free - state, key=needs) - 1)
        raise ValueError(
            f"micro-batches of data.micro_batch_tokens {budget:,} would need about {in_words(needs(budget))} "
            f"beside {in_words(state)} of gradients and optimizer, and {in_words(free)} are free: about {fitting:,} "
            "tokens fit. Lower it, set policy.gradient_checkpointing, or lower policy.chunk_size"
        )


def in_words(num_bytes: float) -> str:
    """A size as people read it.

    >>> in_words(3 * 2**29)
    '1.5 GiB'
    """
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"

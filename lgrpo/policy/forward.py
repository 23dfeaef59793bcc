"""Hidden states and logits of a causal language model, with its rows packed or padded."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lgrpo.policy.attention import PACKED, UnsupportedAttentionError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def is_packed(attention: str) -> bool:
    """Return whether an attention implementation takes rows one after another, without padding."""
    return attention == "packed" or attention.startswith("flash_attention")


def hidden_states(model: PreTrainedModel, tokens: Tensor, is_read: Tensor, packed: bool) -> Tensor:
    """Return the last hidden states [N, H] of the tokens to read, row after row.

    ``is_read`` [B, T] is a prefix of each row of ``tokens`` [B, T]; the rest of the row is padding. With ``packed`` the
    rows are concatenated instead of padded. Attention and linear attention then read the bounds of rows, convolutions
    the index of each token's row (``seq_idx``).
    """
    if not packed:
        return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[is_read]
    lengths = is_read.sum(1)
    bounds = _bounds(lengths)
    row, column = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    positions = column.expand_as(tokens)[is_read]
    longest = int(lengths.max())
    output = model.base_model(
        input_ids=tokens[is_read][None],
        position_ids=positions[None],
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
        seq_idx=row[:, None].expand_as(tokens)[is_read][None].to(torch.int32),
    )
    return output.last_hidden_state[0]


def predicting_states(
    model: PreTrainedModel, tokens: Tensor, completion_mask: Tensor, packed: bool, share_prompts: bool = False
) -> Tensor:
    """Return the hidden states [N, H] that predict the N tokens of ``completion_mask`` [B, T], row after row.

    Each row of ``tokens`` is a prompt, its completion, then padding. Tokens after the last one that predicts a
    completion token are not read. With ``share_prompts`` a prompt that several rows have is read once; it takes
    ``packed`` rows.
    """
    sampled = completion_mask[:, 1:]  # the state at t - 1 predicts token t
    column = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    last = torch.where(sampled, column, 0).amax(1)  # the last state of each row that predicts a token, or the first
    is_read = column <= last[:, None]
    if share_prompts:
        return _states_of_shared_prompts(model, tokens[:, :-1], is_read, sampled)
    return hidden_states(model, tokens[:, :-1], is_read, packed)[sampled[is_read]]


def _states_of_shared_prompts(model: PreTrainedModel, tokens: Tensor, is_read: Tensor, sampled: Tensor) -> Tensor:
    """Return the states of ``tokens`` [B, T] where ``sampled``, with each prompt read by the first row that has it.

    The other rows with the same prompt hold only what follows it, and their keys are those of the prompt as well.
    """
    row, column = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    prompt = torch.where(sampled.any(1), sampled.int().argmax(1) + 1, 0)
    in_prompt = column < prompt[:, None]
    _, group = torch.where(in_prompt, tokens, -1).unique(dim=0, return_inverse=True)
    first = torch.empty_like(row).scatter_reduce(0, group, row, "amin", include_self=False)[group]
    is_own = is_read & (~in_prompt | (first == row)[:, None])
    place = (is_own.flatten().cumsum(0) - 1).view_as(tokens)  # of each token among those that are read
    place = torch.where(in_prompt, place[first], place)
    lengths, key_lengths = is_own.sum(1), is_read.sum(1)
    has_own = lengths > 0  # a completion of one token is predicted by its prompt alone
    lengths, key_lengths = lengths[has_own], key_lengths[has_own]
    output = model.base_model(
        input_ids=tokens[is_own][None],
        position_ids=column.expand_as(tokens)[is_own][None],
        use_cache=False,
        cu_seq_lens_q=_bounds(lengths),
        cu_seq_lens_k=_bounds(key_lengths),
        max_length_q=int(lengths.max()),
        max_length_k=int(key_lengths.max()),
        key_index=place[is_read & has_own[:, None]],
        seq_idx=row[:, None].expand_as(tokens)[is_own][None].to(torch.int32),
    )
    hidden = output.last_hidden_state[0]
    return hidden.float().index_select(0, place[sampled]).to(hidden.dtype)  # gradients are summed in float32


def _bounds(lengths: Tensor) -> Tensor:
    """Return the offsets at which sequences of these lengths begin, and their sum."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states, with the scaling that a few architectures apply after the linear head."""
    logits = model.get_output_embeddings()(hidden)
    config = model.config.get_text_config()
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raise a ``ValueError`` if ``logits`` differs from what the model itself computes."""
    tokens = torch.tensor([[0, 1, 2]], device=model.device)
    was_training = model.training
    model.eval()
    expected = model(input_ids=tokens, use_cache=False).logits
    found = logits(model, model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    model.train(was_training)
    if expected.shape != found.shape or not torch.allclose(expected.float(), found.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the linear head in a way lgrpo does not know, so "
            "log-probabilities would be wrong"
        )


@torch.no_grad()
def choose_attention(model: PreTrainedModel) -> Literal["packed", "sdpa", "eager"]:
    """Return "packed" if packed rows of this model do not see each other, or else the attention for padded rows.

    Packed and padded rows must agree, and a row must not change with the row before it. The second test is the
    stricter one: with the small weights of a new model, even a convolution across rows changes hidden states little.
    The model, whose attention is packed, is switched to the result.
    """
    tokens = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]], device=model.device)
    is_read = torch.tensor([[True, True, True, True], [True, True, False, False]], device=model.device)
    other = torch.tensor([[2, 0, 1, 2], [2, 1, 0, 0]], device=model.device)
    was_training = model.training
    model.eval()
    padding: Literal["sdpa", "eager"] = "sdpa"
    found = []
    try:
        found = [hidden_states(model, rows, is_read, packed=True) for rows in (tokens, other)]
    except UnsupportedAttentionError:
        padding = "eager"  # SDPA would leave out what packed attention refuses
    except (TypeError, ValueError, RuntimeError):
        pass
    model.set_attn_implementation(padding)
    padded = hidden_states(model, tokens, is_read, packed=False)
    model.train(was_training)
    if not found:
        return padding
    packed, after_other = found
    tolerance = 1e-4 if packed.dtype == torch.float32 else 1e-2  # experts with other tokens round differently
    is_separate = torch.allclose(packed[4:].float(), after_other[4:].float(), rtol=tolerance, atol=tolerance)
    if not is_separate or not torch.allclose(packed.float(), padded.float(), rtol=1e-2, atol=1e-2):
        return padding
    model.set_attn_implementation(PACKED)
    return "packed"


@torch.no_grad()
def can_share_prompts(model: PreTrainedModel) -> bool:
    """Return whether packed rows of this model, of which one reads their prompt, are as if each read it.

    A layer other than attention would need the state after the prompt.
    """
    if not set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= _ATTENTION_LAYERS:
        return False
    tokens = torch.tensor([[0, 1, 2, 1, 2], [0, 1, 1, 2, 0], [0, 1, 0, 0, 0]], device=model.device)
    sampled = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0]], device=model.device).bool()
    was_training = model.training
    model.eval()
    try:
        alone, shared = (predicting_states(model, tokens, sampled, True, share).float() for share in (False, True))
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        model.train(was_training)
    tolerance = 1e-4 if model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type) else 1e-2
    return torch.allclose(shared, alone, rtol=tolerance, atol=tolerance)

"""A causal language model as a policy: log-probabilities of tokens, weights by their Hugging Face names, adapters."""

from lgrpo.policy.adapters import LoRA, add_adapter, is_reference
from lgrpo.policy.causal import CausalPolicy
from lgrpo.policy.loading import character_tokenizer
from lgrpo.policy.reference import make_reference
from lgrpo.policy.step_rules import EffectiveSampleSize, GradientProjection, StepRule

__all__ = [
    "CausalPolicy",
    "EffectiveSampleSize",
    "GradientProjection",
    "LoRA",
    "StepRule",
    "add_adapter",
    "character_tokenizer",
    "is_reference",
    "make_reference",
]

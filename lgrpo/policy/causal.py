"""A causal language model as a policy: log-probabilities of tokens, and weights by their Hugging Face names.

Not here: sampling (engines), the loss (losses), who is trained and who is frozen (module).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lgrpo.functional import (
    chunked_token_logprobs,
    combined_checksum,
    named_checksums,
    quick_products,
)
from lgrpo.policy import adapters, flat
from lgrpo.policy.adapters import LoRA
from lgrpo.policy.attention import PACKED
from lgrpo.policy.characters import character_tokenizer
from lgrpo.policy.compilation import KeepingShare
from lgrpo.types import Adapter, PolicyWeights


@final
class CausalPolicy(nn.Module):
    """Any Hugging Face causal language model, by name, by path, or freshly initialised from a config.

    Nothing is loaded before ``build``, which the Lightning module calls when the strategy is ready for it.
    """

    model: PreTrainedModel

    def __init__(
        self,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        characters: str | None = None,
        pad_token: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: str = "packed",
        compile: bool = False,
        activation_memory: float = 0.8,
        gradient_checkpointing: bool = False,
        chunk_size: int = 1024,
        lora: LoRA | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            name: Hub name or folder of the model.
            config: Instead of ``name``: ``model_type`` and the sizes of a model to initialise at random.
            tokenizer: Hub name or folder of the tokenizer. By default the model's.
            characters: Instead of ``tokenizer``: the alphabet of a character-level tokenizer built on the spot.
            pad_token: For a tokenizer that has none: which of its tokens pads.
            dtype: Of the trained weights. Keep float32 and use ``trainer.precision: bf16-mixed`` for speed.
            attention: ``packed``: rows lie behind one another without padding. Or an implementation of transformers:
                sdpa and eager with padding, flash_attention_2 and _3 without.
            compile: Compile the layers, and on a GPU the softmax (``torch.compile``): slow to start, faster at every
                step. For GPUs.
            activation_memory: At most this share of activations is kept for the backward pass by compiled layers;
                the rest, chosen as what is cheapest, is computed again there. 1 keeps all. Without ``compile`` all are
                kept, with ``gradient_checkpointing`` none.
            gradient_checkpointing: Compute activations again in the backward pass, to save memory.
            chunk_size: Tokens whose logits are held at a time.
            lora: Train low-rank adapters (needs peft) instead of the weights, which may then be bfloat16.
            trust_remote_code: Let the model's repository run its own code on this machine.
        """
        super().__init__()
        if (name is None) == (config is None):
            raise ValueError("a policy is given by its name or by a config to initialise it from: set one of the two")
        if config is not None and "model_type" not in config:
            raise ValueError(f"policy.config has no model_type (it has {sorted(config)}): set it to qwen2, llama, …")
        if tokenizer is not None and characters is not None:
            raise ValueError("policy.tokenizer and policy.characters exclude each other")
        if config is not None and tokenizer is None and characters is None:
            raise ValueError("a policy made from a config needs a tokenizer: set policy.tokenizer or policy.characters")
        if not 0 <= activation_memory <= 1:
            raise ValueError(f"policy.activation_memory is {activation_memory}; it is a share, from 0 to 1")
        if chunk_size < 1:
            raise ValueError(f"policy.chunk_size is {chunk_size}; it must be 1 or more")
        self.name = name
        self.settings = config
        self.tokenizer_name = tokenizer
        self.characters = characters
        self.pad_token = pad_token
        self.dtype = getattr(torch, dtype)
        self.attention = attention
        self.compile_layers = compile
        is_chosen = compile and not gradient_checkpointing  # which keeps none, whatever would be cheap
        self.activation_memory = activation_memory if is_chosen else 1.0
        self.gradient_checkpointing = gradient_checkpointing
        self.chunk_size = chunk_size
        self.lora = lora
        self.trust_remote_code = trust_remote_code
        self._units: list[flat.Unit] = []  # of a policy that is spread by the first FSDP

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a pad token or an error that says how to choose one."""
        if self.characters is not None:
            return character_tokenizer(self.characters)
        source = self.tokenizer_name or self.name
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=self.trust_remote_code)
        if self.pad_token is not None:
            if self.pad_token not in tokenizer.get_vocab():
                raise ValueError(f"policy.pad_token {self.pad_token!r} is not a token of {source}")
            tokenizer.pad_token = self.pad_token
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"the tokenizer of {source} has no pad token: set policy.pad_token to one of its tokens that never "
                "occurs in a text, such as a reserved one"
            )
        return tokenizer

    @cached_property
    def config(self) -> PretrainedConfig:
        """The architecture, read without loading weights."""
        if self.settings is None:
            return AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        special = {"pad_token_id": self.tokenizer.pad_token_id, "eos_token_id": self.tokenizer.eos_token_id}
        return AutoConfig.for_model(
            **{"vocab_size": len(self.tokenizer), "bos_token_id": None} | special | self.settings
        )

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and completion together, the model was made for."""
        return self.config.get_text_config().max_position_embeddings

    @property
    def is_built(self) -> bool:
        """Whether the weights are here."""
        return "model" in self._modules

    def build(self) -> None:
        """Loads the weights, or initialises them. Does nothing the second time."""
        if self.is_built:
            return
        options = {
            "dtype": self.dtype,
            "attn_implementation": PACKED if self.attention == "packed" else self.attention,
            "trust_remote_code": self.trust_remote_code,
        }
        for key in self.config.to_dict():  # with dropout a policy differs from itself: there would be no ratio
            if key.endswith(("dropout", "pdrop", "dropout_prob")):
                setattr(self.config, key, 0.0)
        if self.name is not None:
            self.model = AutoModelForCausalLM.from_pretrained(self.name, config=self.config, **options)
        else:
            self.model = AutoModelForCausalLM.from_config(self.config, **options)
        self.model.config.eos_token_id = self._eos_token_ids()
        self.model.train()
        if len(self.tokenizer) > self.model.get_input_embeddings().num_embeddings:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, the model only "
                f"{self.model.get_input_embeddings().num_embeddings}: they do not belong together"
            )
        self.model.config.architectures = [type(self.model).__name__]
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._check_head()
        self._check_packing()
        if self.lora is not None:
            adapters.add_adapter(self.model, self.lora, self.model.get_output_embeddings())
        if self.compile_layers:
            for layer in self._layers:
                layer.compile(dynamic=True, backend=KeepingShare(self.activation_memory))

    def forward(
        self, tokens: Tensor, completion_mask: Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """log π(token) and the entropy it was drawn at, [B, T] float32, 0 outside ``completion_mask``.

        Rows are a prompt, its completion, then padding; what follows a completion's last but one token predicts nothing
        and is left out.
        """
        sampled = completion_mask[:, 1:]  # the state at t - 1 predicts token t
        column = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        last = torch.where(sampled, column, -1).amax(1)  # of each row, the last state that predicts a token
        is_read = column <= last[:, None]
        with quick_products(tokens.device, self.dtype):
            hidden = self._hidden_states(tokens[:, :-1], is_read)
            logprobs, entropy = chunked_token_logprobs(
                hidden[sampled[is_read]],
                self._head,
                tokens[:, 1:][sampled],
                temperature,
                self.chunk_size,
                entropy_gradient,
                compile=self.compile_layers and hidden.is_cuda,
            )
        empty = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        return empty.masked_scatter(completion_mask, logprobs), empty.masked_scatter(completion_mask, entropy)

    def _hidden_states(self, tokens: Tensor, is_read: Tensor) -> Tensor:
        """[N, H]: states of the tokens that are read, row after row; the rest of each row is padding on the right."""
        if not self._packs:
            return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[is_read]
        lengths = is_read.sum(1)
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)[is_read]
        longest = int(lengths.max())
        packed = self.model.base_model(
            input_ids=tokens[is_read][None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )
        return packed.last_hidden_state[0]

    def shard(self, mesh: DeviceMesh) -> None:
        """Spreads the weights over processes (FSDP2), layer by layer. Does nothing the second time."""
        if not isinstance(self, FSDPModule):
            for layer in self._layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def wrap(self, mixed_precision: MixedPrecision | None) -> CausalPolicy:
        """Itself in a wrapper that spreads the weights over processes, layer by layer: the first FSDP.

        Its other settings are those of ``enable_wrap`` around the call. What the wrapper does not know it asks the
        policy for. Does nothing the second time.
        """
        if not self._units:
            self._units = flat.wrap_layers(self, self.model, self._layers, mixed_precision)
        return cast(CausalPolicy, self._units[0].module)

    def settle(self) -> None:
        """Gives back what a pass without gradients has gathered: every process holds its own part again."""
        if isinstance(self, FSDPModule):
            self.reshard()
        flat.settle(self._units)

    def weights(self) -> PolicyWeights:
        """The weights by their Hugging Face names, a tied head under both of its names.

        Of a policy that is spread over processes, each tensor is gathered when its turn comes, on all of them.
        """
        if self.lora is not None:
            return self.adapted_weights(adapters.POLICY)
        return PolicyWeights(config=self.model.config, tensors=lambda: self._gathered(lambda name: True))

    def make_reference(self) -> CausalPolicy | AdapterReference:
        """Who stands still while this one trains. At first both are the same."""
        if self.lora is None:
            return copy.deepcopy(self).requires_grad_(False).eval()
        adapters.add_adapter(self.model, self.lora, self.model.get_output_embeddings(), adapters.REFERENCE)
        adapters.copy_to_reference(self.model)
        return AdapterReference(self)

    @torch.no_grad()
    def follow(self, other: CausalPolicy, decay: float) -> None:
        """``self ← decay · self + (1 - decay) · other``."""
        for policy in (self, other):
            policy.settle()
        for own, new in zip(self.parameters(), other.parameters(), strict=True):
            own.lerp_(new.to(own.dtype), 1 - decay) if decay else own.copy_(new)

    @cached_property
    def base_checksum(self) -> str:
        """Of the weights below the adapters, which never change."""
        tensors = adapters.base_tensors(self._gathered(adapters.is_base))
        return combined_checksum(named_checksums(tensors))

    def checkpoint_leaves_out(self, name: str) -> bool:
        """Whether a tensor can be found again where it came from: then a checkpoint has the adapters alone."""
        can = self.lora is not None and self.name is not None and not isinstance(self, FSDPModule)
        return can and adapters.is_base(name)

    def adapted_weights(self, name: str) -> PolicyWeights:
        """The weights with one of the adapters, and that adapter by itself."""
        assert self.lora is not None
        adapter = Adapter(
            rank=self.lora.rank,
            base=lambda: adapters.base_tensors(self._gathered(adapters.is_base)),
            tensors=lambda: adapters.adapter_tensors(
                self.model, self._gathered(lambda path: not adapters.is_base(path)), name
            ),
        )
        return PolicyWeights.adapted(self.model.config, adapter)

    def _gathered(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the model, each whole."""
        self.settle()
        if self._units:
            yield from flat.gathered(self.model, self._units)
            return
        for name, tensor in self.model.state_dict().items():
            if wanted(name):
                tensor = tensor.detach()
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @property
    def _layers(self) -> nn.ModuleList:
        """The transformer blocks."""
        return self.model.base_model.layers

    @property
    def _packs(self) -> bool:
        """Whether rows lie behind one another, without padding."""
        return self.attention == "packed" or self.attention.startswith("flash_attention")

    def _eos_token_ids(self) -> list[int]:
        """Every token that ends a sequence: the tokenizer's, the config's, and those of the generation config."""
        ids: set[int] = set()
        for named in (
            self.tokenizer.eos_token_id,
            self.model.config.eos_token_id,
            self.model.generation_config and self.model.generation_config.eos_token_id,
        ):
            ids |= set(named if isinstance(named, list) else [] if named is None else [named])
        return sorted(ids)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, with the scaling a few architectures put behind the linear layer."""
        logits = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _check_head(self) -> None:
        """The chunked path must see the logits the model itself would give."""
        tokens = torch.tensor([[0, 1, 2]], device=self.model.device)
        was_training = self.model.training
        self.model.eval()
        expected = self.model(input_ids=tokens, use_cache=False).logits
        got = self._head(self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        self.model.train(was_training)
        if expected.shape != got.shape or not torch.allclose(expected.float(), got.float(), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(self.model).__name__} does something to its logits behind the linear head that lgrpo does not "
                "know, so log-probabilities would be wrong"
            )

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Rows behind one another must not see each other: where this architecture lets them, they are padded."""
        if self.attention != "packed":
            return
        tokens = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]], device=self.model.device)
        is_read = torch.tensor([[True, True, True, True], [True, True, False, False]], device=self.model.device)
        try:
            packed = self._hidden_states(tokens, is_read)
        except (TypeError, ValueError, RuntimeError):
            packed = None
        self.attention = "sdpa"
        self.model.set_attn_implementation("sdpa")
        padded = self._hidden_states(tokens, is_read)
        if packed is not None and torch.allclose(packed.float(), padded.float(), rtol=1e-2, atol=1e-2):
            self.attention = "packed"
            self.model.set_attn_implementation(PACKED)
        else:
            warnings.warn(f"{type(self.model).__name__} cannot be packed, so rows are padded", stacklevel=2)


@final
class AdapterReference:
    """The reference of a policy with adapters: the same model with an adapter that stands still."""

    def __init__(self, policy: CausalPolicy) -> None:
        self._policy = policy

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        with adapters.as_reference(self._policy.model):
            return self._policy(*arguments)

    def weights(self) -> PolicyWeights:
        """Its weights, by their Hugging Face names."""
        return self._policy.adapted_weights(adapters.REFERENCE)

    def follow(self, other: CausalPolicy, decay: float) -> None:
        """Takes over the policy's adapter."""
        if decay:
            raise ValueError(
                f"reference_refresh.decay is {decay}: the mean of two adapters' A and B is not the mean of their "
                "products. With LoRA set it to 0"
            )
        other.settle()
        adapters.copy_to_reference(other.model)

    def shard(self, mesh: DeviceMesh) -> None:
        """Nothing of its own to spread: the policy's model has it."""

    def eval(self) -> None:
        """Nothing in it acts otherwise in training."""

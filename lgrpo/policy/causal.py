"""A causal language model as a policy: log-probabilities of tokens, and weights by their Hugging Face names.

Not here: sampling (engines), the loss (losses), which models are trained or frozen (module).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lgrpo.checks import check_count, check_range
from lgrpo.functional import KeptSets, TeacherDivergence, chunked_token_logprobs, combined_checksum, named_checksums
from lgrpo.policy import adapters, fsdp1
from lgrpo.policy.adapters import LoRA
from lgrpo.policy.attention import PACKED
from lgrpo.policy.compilation import ActivationBudgetBackend, whole_layers
from lgrpo.policy.forward import (
    can_share_prompts,
    check_logits,
    choose_attention,
    is_packed,
    logits,
    predicting_states,
)
from lgrpo.policy.loading import check_folder, check_hub, find_tokenizer, load_model
from lgrpo.run.chat_templates import read_chat_template
from lgrpo.run.resume import (
    ResumeSettings,
    architecture_of,
    chat_template_fingerprint,
    computation_of,
    describe,
    tokenization_fingerprint,
    vocabulary_fingerprint,
)
from lgrpo.weights import Adapter, PolicyWeights


@final
class CausalPolicy(nn.Module):
    """Any Hugging Face causal language model, by name, by path, or initialised at random from a config.

    The constructor loads nothing. The Lightning module calls ``build`` when the strategy is ready for the weights, then
    passes it to ``make_reference`` if the loss needs a reference, then calls ``shard_fsdp1`` or ``shard_fsdp2`` if the
    strategy shards.
    """

    model: PreTrainedModel

    def __init__(
        self,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        characters: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: str = "packed",
        share_prompts: bool = False,
        compile: bool = False,
        activation_memory: float = 0.8,
        gradient_checkpointing: bool = False,
        chunk_size: int = 1024,
        reshard: bool | None = None,
        lora: LoRA | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            name: Hub name or folder of the model.
            config: Instead of ``name``: ``model_type`` and the sizes of a model to initialise at random.
            tokenizer: Hub name or folder of the tokenizer. By default the model's.
            characters: Instead of ``tokenizer``: the alphabet of a character-level tokenizer.
            pad_token: Padding token, for a tokenizer that defines none: one of its tokens.
            chat_template: Chat template instead of the tokenizer's: a file, or the name of one that TRL ships, such as
                ``qwen3_training``.
            dtype: Data type of the trained weights. Keep float32 and use ``trainer.precision: bf16-mixed`` for speed.
            attention: ``packed``: rows are concatenated without padding. Or an implementation of transformers: sdpa and
                eager with padding, flash_attention_2 and _3 without.
            share_prompts: Read a prompt once for all its completions in a micro-batch, instead of once for each. The
                results differ by rounding. For ``attention`` packed.
            compile: Compile the layers, and on a GPU the softmax (``torch.compile``): slow to start, faster at every
                step. For GPUs.
            activation_memory: Largest share of activations that compiled layers keep for the backward pass. The others,
                those cheapest to recompute, are recomputed. 1 keeps all. Without ``compile`` all are kept, with
                ``gradient_checkpointing`` none.
            gradient_checkpointing: Recompute activations in the backward pass, to save memory.
            chunk_size: Number of tokens whose logits are in memory at a time.
            reshard: With FSDP2: free the gathered weights of a layer after each use, and reduce gradients in every
                micro-batch. False keeps whole weights and gradients on every process until the optimizer step: one
                gather and one reduction a step. By default False if there is only one process.
            lora: Low-rank adapters to train (needs peft) instead of the weights, which may then be bfloat16.
            trust_remote_code: Allow the model's repository to run its code on this machine.
        """
        super().__init__()
        if (name is None) == (config is None):
            raise ValueError("a policy has a policy.name or a policy.config to initialise it from: set one of the two")
        if config is not None and "model_type" not in config:
            raise ValueError(f"policy.config has no model_type (it has {sorted(config)}): set it to qwen2, llama, …")
        if tokenizer is not None and characters is not None:
            raise ValueError("policy.tokenizer and policy.characters exclude each other")
        if config is not None and tokenizer is None and characters is None:
            raise ValueError("a policy made from a config needs a tokenizer: set policy.tokenizer or policy.characters")
        if share_prompts and attention != "packed":
            raise ValueError(f"policy.share_prompts needs policy.attention packed, not {attention}: set it to false")
        if name is not None:
            check_folder("policy.name", name)
        check_range("policy.activation_memory", activation_memory, at_least=0, at_most=1)
        check_count("policy.chunk_size", chunk_size, at_least=1)
        self.name = name
        self.settings = config
        self.tokenizer_name = tokenizer
        self.characters = characters
        self.pad_token = pad_token
        self.chat_template = chat_template
        self.dtype = getattr(torch, dtype)
        self.attention = attention
        self.share_prompts = share_prompts
        self.compile_layers = compile
        self.activation_memory = activation_memory if compile and not gradient_checkpointing else 1.0
        self.gradient_checkpointing = gradient_checkpointing
        self.chunk_size = chunk_size
        self.reshard_layers = reshard
        self.lora = lora
        self.trust_remote_code = trust_remote_code
        self.is_frozen = False
        """Whether the weights are not trained; a frozen policy is always in evaluation mode."""
        self._fsdp1_units: list[fsdp1.Unit] = []

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which has a pad token."""
        tokenizer = find_tokenizer(
            self.name, self.tokenizer_name, self.characters, self.pad_token, self.trust_remote_code
        )
        if self.chat_template is not None:
            tokenizer.chat_template = read_chat_template(self.chat_template)
        return tokenizer

    @cached_property
    def config(self) -> PretrainedConfig:
        """The architecture, read without loading weights."""
        if self.settings is None:
            check_hub("policy.name", cast(str, self.name))
            return AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        special = {"pad_token_id": self.tokenizer.pad_token_id, "eos_token_id": self.tokenizer.eos_token_id}
        return AutoConfig.for_model(
            **{"vocab_size": len(self.tokenizer), "bos_token_id": None} | special | self.settings
        )

    @property
    def context_length(self) -> int:
        """The largest number of tokens, prompt and completion together, that the model supports."""
        return self.config.get_text_config().max_position_embeddings

    @property
    def num_logits(self) -> int:
        """Number of tokens in the model's distribution; it may be more than the tokenizer has."""
        return self.config.get_text_config().vocab_size

    @property
    def is_built(self) -> bool:
        """Whether the weights are loaded or initialised."""
        return "model" in self._modules

    @property
    def is_packed(self) -> bool:
        """Whether rows are read one after another, without padding."""
        return is_packed(self.attention)

    def build(self) -> None:
        """Load or initialise the weights. Does nothing the second time."""
        if self.is_built:
            return
        self.model = self._load()
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        check_logits(self.model)
        if self.attention == "packed" and (attention := choose_attention(self.model)) != "packed":
            self.attention = attention
            warnings.warn(f"{type(self.model).__name__} cannot be packed, so rows are padded", stacklevel=2)
        if self.share_prompts and not (self.attention == "packed" and can_share_prompts(self.model)):
            self.share_prompts = False
            warnings.warn(
                f"{type(self.model).__name__} cannot share prompts, so each completion is read with its own",
                stacklevel=2,
            )
        if self.lora is not None:
            adapters.add_adapter(self.model, self.lora, self.model.get_output_embeddings())
        if self.compile_layers:
            for layer in self._layers:
                layer.compile(dynamic=True, backend=ActivationBudgetBackend(self.activation_memory))

    def _load(self) -> PreTrainedModel:
        return load_model(
            self.name,
            self.config,
            self.tokenizer,
            dtype=self.dtype,
            attn_implementation=PACKED if self.attention == "packed" else self.attention,
            trust_remote_code=self.trust_remote_code,
        )

    def train(self, mode: bool = True) -> CausalPolicy:
        return super().train(mode and not self.is_frozen)

    def forward(
        self,
        tokens: Tensor,
        completion_mask: Tensor,
        temperature: float,
        entropy_gradient: bool = False,
        divergence: TeacherDivergence | None = None,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log π(token) and the entropy of its distribution, [B, T] float32, 0 outside ``completion_mask``.

        With ``divergence``, whose tokens are those of ``completion_mask`` row after row, it comes third. With ``kept``
        (``RolloutBatch.kept``) the distributions are those over the kept tokens. Each row is a prompt, its completion,
        then padding.
        """
        with whole_layers() if self.compile_layers else nullcontext():
            hidden = predicting_states(self.model, tokens, completion_mask, self.is_packed, self.share_prompts)
        found = chunked_token_logprobs(
            hidden,
            partial(logits, self.model),
            tokens[:, 1:][completion_mask[:, 1:]],
            temperature,
            self.chunk_size,
            entropy_gradient,
            compile=self.compile_layers and hidden.is_cuda,
            divergence=divergence,
            kept=None if kept is None else KeptSets.of(*kept, completion_mask),
        )
        empty = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        return tuple(empty.masked_scatter(completion_mask, values) for values in found)

    # Sharding

    def shard_fsdp2(self, mesh: DeviceMesh) -> None:
        """Shard the weights over processes with FSDP2, layer by layer. Does nothing the second time."""
        if isinstance(self, FSDPModule):
            return
        if self.reshard_layers is None:
            self.reshard_layers = mesh.size() > 1
        for layer in self._layers:
            # a frozen policy has no backward pass, which would free what it keeps
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard_layers or self.is_frozen)
        fully_shard(self, mesh=mesh)

    @contextmanager
    def accumulating_gradients(self) -> Iterator[None]:
        """Keep the gradients of a backward pass, and gathered weights, whole on each process if FSDP2 is to do so."""
        if not isinstance(self, FSDPModule) or self.reshard_layers:
            yield
            return
        try:
            self.set_requires_gradient_sync(False)
            self.set_reshard_after_backward(False)
            yield
        finally:
            self.set_requires_gradient_sync(True)
            self.set_reshard_after_backward(True)

    def shard_fsdp1(self, mixed_precision: MixedPrecision | None) -> CausalPolicy:
        """Return the policy in a wrapper that shards its weights with FSDP1, layer by layer.

        The other settings of FSDP1 are those of the ``enable_wrap`` context around the call. The wrapper forwards
        unknown attributes to the policy. Returns the same wrapper the second time.
        """
        if not self._fsdp1_units:
            self._fsdp1_units = fsdp1.wrap_layers(self, self.model, self._layers, mixed_precision)
        return cast(CausalPolicy, self._fsdp1_units[0].module)

    def free_gathered(self) -> None:
        """Free the weights that a pass without gradients gathered, so that each process holds only its shard."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        fsdp1.free_gathered(self._fsdp1_units)

    # Weights

    def weights(self) -> PolicyWeights:
        """Return the weights by their Hugging Face names, a tied head under both of its names.

        Sharded tensors are gathered on all processes, one at a time, while the result is iterated.
        """
        if self.lora is not None:
            return self.adapted_weights(adapters.POLICY)
        return PolicyWeights(config=self.model.config, tensors=lambda: self._gathered(lambda name: True))

    def adapted_weights(self, name: str) -> PolicyWeights:
        """Return the weights with an adapter merged into them, and that adapter separately."""
        assert self.lora is not None
        adapter = Adapter(
            rank=self.lora.rank,
            base=lambda: adapters.base_tensors(self._gathered(adapters.is_base)),
            tensors=lambda: adapters.adapter_tensors(
                self.model, self._gathered(lambda path: not adapters.is_base(path)), name
            ),
        )
        return PolicyWeights.adapted(self.model.config, adapter)

    def omitted_weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the weights that a checkpoint omits: with LoRA, the base weights, which can be loaded by ``name``."""
        if self.lora is None or self.name is None or isinstance(self, FSDPModule):
            return {}
        return {name: w for name, w in self.state_dict(prefix=prefix).items() if adapters.is_base(name)}

    def source_state(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` of a new policy with the same settings, loaded again by ``name``; without LoRA."""
        return {f"model.{name}": weight for name, weight in self._load().state_dict().items()}

    @torch.no_grad()
    def update_from(self, policy: CausalPolicy, decay: float) -> None:
        """Set the weights to ``decay · self + (1 - decay) · policy``."""
        self.free_gathered()
        policy.free_gathered()
        for own, new in zip(self.parameters(), policy.parameters(), strict=True):
            own.lerp_(new.to(own.dtype), 1 - decay) if decay else own.copy_(new)

    def resume_settings(self) -> ResumeSettings:
        """Return what a resumed run or an evaluation of a checkpoint must have in common with the run that wrote it."""
        return {
            "model": architecture_of(self.model.config),
            "model config": computation_of(self.model.config),
            "tokenizer": vocabulary_fingerprint(self.tokenizer),
            "tokenization": tokenization_fingerprint(self.tokenizer),
            "chat template": chat_template_fingerprint(self.tokenizer),
            "lora": describe(self.lora),
            "base": None if self.lora is None else self._base_checksum,
        }

    @cached_property
    def _base_checksum(self) -> str:
        """Checksum of the weights below the adapters, which never change."""
        return combined_checksum(named_checksums(adapters.base_tensors(self._gathered(adapters.is_base))))

    def _gathered(self, is_selected: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield selected tensors of the model, each gathered from all shards."""
        self.free_gathered()
        if self._fsdp1_units:
            yield from fsdp1.gathered(self.model, self._fsdp1_units)
            return
        for name, tensor in self.model.state_dict().items():
            if is_selected(name):
                yield name, _whole(tensor.detach())

    @property
    def _layers(self) -> nn.ModuleList:
        """The transformer blocks."""
        return self.model.base_model.layers


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from all processes; without a copy if this process has all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()

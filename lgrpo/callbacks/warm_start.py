"""A short supervised phase before the first rollout, for a model that cannot solve the task yet."""

from __future__ import annotations

from typing import cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.utils.rnn import pad_sequence

from lgrpo.callbacks.demonstrations import Demonstrations
from lgrpo.checks import check_count, check_range
from lgrpo.hooks import policy_owner
from lgrpo.policy import CausalPolicy
from lgrpo.tasks.template import longest_token
from lgrpo.types import Prompt


class SupervisedWarmStart(L.Callback):
    """Trains the policy on the ``solution`` field of the training rows, then refreshes the reference.

    A solution is a text, or the list of the policy's turns in an episode; the environment answers them, and its
    observations are not trained on.

    Group-relative methods learn from differences between siblings, and a model that is always wrong has none. Does
    nothing when a run is resumed.
    """

    def __init__(
        self,
        num_steps: int = 50,
        batch_size: int = 128,
        learning_rate: float = 3e-3,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            num_steps: Number of optimizer steps.
            batch_size: Number of solutions in each step.
            learning_rate: Learning rate of AdamW.
            seed: Seed of the choice of rows. By default the data module's.
        """
        reason = "leave the callback out for a run without a warm start"
        check_count("SupervisedWarmStart.num_steps", num_steps, at_least=1, reason=reason)
        check_count("SupervisedWarmStart.batch_size", batch_size, at_least=1)
        check_range("SupervisedWarmStart.learning_rate", learning_rate, above=0)
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        policy = cast(CausalPolicy, pl_module.policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=self.learning_rate)
        device = trainer.strategy.root_device
        pl_module.train()
        data = trainer.datamodule  # type: ignore[attr-defined]
        demonstrations = Demonstrations(data.tokenizer, data.task.environment)
        for step in range(self.num_steps):
            tokens, mask = self._batch(trainer, step, demonstrations)
            logprobs, _ = policy(tokens.to(device), mask.to(device), temperature=1.0)
            loss = -logprobs.sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        if policy_owner(trainer).loss.needs_reference:
            policy_owner(trainer).refresh_reference()
        rank_zero_info(f"Warm start: {self.num_steps} supervised steps, last loss {loss.item():.3f} per token.")

    def _batch(
        self, trainer: L.Trainer, step: int, demonstrations: Demonstrations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, T] and the mask of the solutions in them."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        prompts = data.train_prompts
        seed = data.seed if self.seed is None else self.seed
        generator = torch.Generator().manual_seed(hash((seed, 1, step)) % 2**63)
        chosen: list[Prompt] = [
            prompts.at(i) for i in torch.randint(len(prompts), (self.batch_size,), generator=generator).tolist()
        ]
        rows, masks = [], []
        for prompt in chosen:
            if "solution" not in prompt.row:
                raise ValueError(
                    f"a warm start needs the field 'solution'; the training rows have {sorted(prompt.row)}"
                )
            solution, context = prompt.row["solution"], policy_owner(trainer).policy.context_length
            length = sum(len(str(turn)) for turn in solution) if isinstance(solution, list) else len(str(solution))
            if length > context and length > context * longest_token(data.tokenizer):
                raise ValueError(
                    f"the solution of the prompt {prompt.text[:60]!r} has {length} characters, more than the "
                    f"{context} tokens of the model's context can hold: shorten it, or leave the row out"
                )
            token_ids, is_trained = demonstrations(prompt)
            rows.append(torch.tensor(prompt.token_ids + token_ids))
            masks.append(torch.tensor([False] * len(prompt.token_ids) + is_trained))
        tokens = pad_sequence(rows, batch_first=True, padding_value=data.tokenizer.pad_token_id)
        return tokens, pad_sequence(masks, batch_first=True, padding_value=False)

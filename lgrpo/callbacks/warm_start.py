"""A short supervised phase before the first rollout, for a model that cannot do the task at all yet."""

from __future__ import annotations

from typing import cast

import lightning as L
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.utils.rnn import pad_sequence

from lgrpo.hooks import policy_owner
from lgrpo.policy import CausalPolicy
from lgrpo.types import Prompt


class SupervisedWarmStart(L.Callback):
    """Trains the policy on the ``solution`` field of the training rows, then takes it as the reference too.

    Group-relative methods learn from differences between siblings: a model that is always wrong has none. Does nothing
    when a run is resumed.
    """

    def __init__(
        self,
        num_steps: PositiveInt = 50,
        batch_size: PositiveInt = 128,
        learning_rate: PositiveFloat = 3e-3,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            num_steps: Optimizer steps.
            batch_size: Solutions in each.
            learning_rate: Of AdamW.
            seed: Chooses the rows; by default the data module's.
        """
        if num_steps < 1 or batch_size < 1:
            raise ValueError(
                f"SupervisedWarmStart has num_steps {num_steps} and batch_size {batch_size}; each is 1 or more. "
                "Leave the callback out for a run without a warm start"
            )
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
        for step in range(self.num_steps):
            tokens, mask = self._batch(trainer, step)
            logprobs, _ = policy(tokens.to(device), mask.to(device), temperature=1.0)
            loss = -logprobs.sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        if policy_owner(trainer).needs_reference:
            policy_owner(trainer).refresh_reference()
        rank_zero_info(f"Warm start: {self.num_steps} supervised steps, last loss {loss.item():.3f} per token.")

    def _batch(self, trainer: L.Trainer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, T] and the mask of the solutions in them."""
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
            solution = data.tokenizer(str(prompt.row["solution"]), add_special_tokens=False).input_ids
            solution = [*solution, data.tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt.token_ids + solution))
            masks.append(torch.tensor([False] * len(prompt.token_ids) + [True] * len(solution)))
        tokens = pad_sequence(rows, batch_first=True, padding_value=data.tokenizer.pad_token_id)
        return tokens, pad_sequence(masks, batch_first=True, padding_value=False)

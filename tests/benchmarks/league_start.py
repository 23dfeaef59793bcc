"""The supervised phase that makes the start models of the league."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence

from lgrpo.callbacks import SupervisedWarmStart
from lgrpo.callbacks.demonstrations import Demonstrations

CHECK_EVERY = 3
"""Supervised steps between two checks of the validation problems."""


class SupervisedStart(SupervisedWarmStart):
    """Trains on solutions until the policy solves a share of the validation problems, so that starts are alike."""

    def __init__(self, target: float, max_steps: int = 400) -> None:
        """
        Args:
            target: Mean probability of the solutions of the validation problems that ends the phase.
            max_steps: Upper limit of the optimizer steps.
        """
        super().__init__(num_steps=max_steps)
        self.target = target

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        policy: Any = pl_module.policy
        optimizer = torch.optim.AdamW(policy.parameters(), lr=self.learning_rate)
        data: Any = trainer.datamodule
        problems = validation_solutions(data)
        demonstrations = Demonstrations(data.tokenizer, data.task.environment)
        pl_module.train()
        for step in range(self.num_steps):
            tokens, mask = self._batch(trainer, step, demonstrations)
            logprobs, _ = policy(tokens, mask, temperature=1.0)
            (-logprobs.sum() / mask.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % CHECK_EVERY == CHECK_EVERY - 1 and solved(policy, *problems) >= self.target:
                return
        raise RuntimeError(f"the start model solves less than {self.target} after {self.num_steps} steps")


def validation_solutions(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the validation problems with their solutions as tokens [B, T], and the mask of the solutions."""
    rows, masks = [], []
    for row in data.task.rows("validation"):
        prompt, _ = data.task.template.render(row, data.tokenizer)
        question, answer = (data.tokenizer(t, add_special_tokens=False).input_ids for t in (prompt, row["solution"]))
        answer = [*answer, data.tokenizer.eos_token_id]
        rows.append(torch.tensor(question + answer))
        masks.append(torch.tensor([False] * len(question) + [True] * len(answer)))
    tokens = pad_sequence(rows, batch_first=True, padding_value=data.tokenizer.pad_token_id)
    return tokens, pad_sequence(masks, batch_first=True, padding_value=False)


@torch.no_grad()
def solved(policy: Any, tokens: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean probability of the solutions: pass@1 at temperature 1, as each problem has one solution."""
    logprobs, _ = policy(tokens, mask, temperature=1.0)
    return float(logprobs.sum(1).exp().mean())

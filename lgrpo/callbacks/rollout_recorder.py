"""Every rollout, whole, on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.engines import text_before_stop
from lgrpo.hooks import RolloutCallback, RolloutOwner, Stage, policy_owner, rollout_owner, run_folder
from lgrpo.tasks.recording import tokenizer_fingerprint, write_recording
from lgrpo.types import RolloutBatch


class RolloutRecorder(RolloutCallback):
    """Writes rollouts to Parquet as they are trained on: a file for each, and of each rank.

    A file is named by its rollout and appears whole or not at all, so an interrupted run that goes on writes the same
    names again and nothing is there twice. ``ReplayEngine`` trains on them.
    """

    def __init__(self, every: PositiveInt = 1, path: str | None = None) -> None:
        """
        Args:
            every: Which rollouts: 0, every, 2 · every, …
            path: Folder of the files; by default ``rollouts`` in the run folder.
        """
        self.every = every
        self.path = path
        self._batch: RolloutBatch | None = None
        self._facts: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = rollout_owner(trainer)
        self._facts = self._about(trainer, data)
        own = sorted(self._folder(trainer).glob(f"*-rank{trainer.global_rank}.parquet"))
        if own and trainer.ckpt_path is None:
            raise ValueError(
                f"{self._folder(trainer)} holds rollouts of another run already: give RolloutRecorder another path"
            )
        at_hand = trainer.global_step // data.reuse
        for file in own:  # what comes after the checkpoint is sampled again
            if int(file.name.partition("-")[0]) > at_hand:
                file.unlink()

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        if batch.rollout % self.every == 0:
            self._batch = batch

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Writes before the update, when the log-probabilities are final."""
        if stage != "update" or self._batch is None:
            return
        batch, self._batch = self._batch, None
        data = rollout_owner(trainer)
        rows = [row for group in range(0, len(batch), batch.group_size) for row in self._group(data, batch, group)]
        if rows:
            versions = {row["version"] for row in rows}
            syncs = [record.as_dict() for record in data.engine.ledger if record.version in versions]
            path = self._folder(trainer) / f"{batch.rollout:08}-rank{trainer.global_rank}.parquet"
            write_recording(rows, self._facts | {"syncs": syncs, "logprobs_from": batch.logprobs_from}, path)

    def _folder(self, trainer: L.Trainer) -> Path:
        return run_folder(trainer) / "rollouts" if self.path is None else Path(self.path)

    def _about(self, trainer: L.Trainer, data: RolloutOwner) -> dict[str, Any]:
        config = policy_owner(trainer).policy_weights().config
        settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
        name = config.name_or_path or ""
        return {
            "task": f"{type(data.task).__module__}.{type(data.task).__qualname__}",
            "model": {
                "type": config.model_type,
                "name": Path(name).name if os.path.isdir(name) else name,  # a folder's place is nobody's business
                "fingerprint": hashlib.sha256(settings.encode()).hexdigest()[:16],
            },
            "tokenizer": tokenizer_fingerprint(data.tokenizer),
            "sampling": dataclasses.asdict(data.sampling),
            "seed": data.seed,
            "world_size": trainer.world_size,
        }

    def _group(self, data: RolloutOwner, batch: RolloutBatch, first: int) -> list[dict[str, Any]]:
        """The rows of a group; none of a place that nobody took."""
        if not bool(batch.is_known[first]):
            return []
        position = int(batch.positions[first])
        prompt = data.train_prompts.at(position)
        shared = {
            "group": position,
            "position": position,
            "rollout": batch.rollout,
            "prompt": prompt.text,
            "prompt_token_ids": prompt.token_ids,
            "row": json.dumps(dict(prompt.row), ensure_ascii=False, default=str),
        }
        return [
            shared | {"sibling": sibling} | self._completion(data, batch, first + sibling)
            for sibling in range(batch.group_size)
        ]

    def _completion(self, data: RolloutOwner, batch: RolloutBatch, row: int) -> dict[str, Any]:
        sampled = batch.completion_mask[row]
        token_ids = batch.tokens[row][sampled].tolist()
        text = data.tokenizer.decode(token_ids, skip_special_tokens=True)
        logprobs = batch.behaviour_logprobs[row][sampled]
        is_recorded, step = bool(batch.is_recorded[row]), int(batch.behaviour_step[row])
        versions = [record.version for record in data.engine.ledger if record.step == step]
        return {
            "completion": text_before_stop(text, data.sampling.stop or []),
            "token_ids": token_ids,
            "logprobs": None if bool(logprobs.isnan().any()) else logprobs.tolist(),
            "finish_reason": "length" if bool(batch.truncated[row]) else "stop",
            "reward": float(batch.rewards[row]),
            "failed": bool(batch.failed[row]),
            "advantage": float(batch.advantages[row][sampled][0]),
            "behaviour_step": None if is_recorded else step,
            "version": None if is_recorded or not versions else versions[-1],
        }

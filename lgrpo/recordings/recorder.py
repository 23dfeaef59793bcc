"""A callback that records rollouts on disk."""

from __future__ import annotations

import dataclasses
import json
import os
from array import array
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.checks import check_count
from lgrpo.data.collate import completions_of
from lgrpo.functional.sync_cycle import is_selected
from lgrpo.hooks import RolloutCallback, RolloutOwner, Stage, policy_owner, rollout_owner
from lgrpo.kept import Kept
from lgrpo.recordings.recording import write_recording
from lgrpo.run.folder import run_folder
from lgrpo.run.resume import chat_template_fingerprint, fingerprint, vocabulary_fingerprint
from lgrpo.types import RolloutBatch


class RolloutRecorder(RolloutCallback):
    """Writes rollouts to Parquet as they are trained on: one file for each rollout and rank.

    A file is named after its rollout and written atomically, so a resumed run replaces files instead of duplicating
    completions. ``ReplayEngine`` trains on them.
    """

    def __init__(self, every: int = 1, path: str | None = None) -> None:
        """
        Args:
            every: Average number of rollouts from one that is written to the next. Rollout 0 is written, later ones at
                varying offsets, so that all lags occur.
            path: Folder of the files; by default ``rollouts`` in the run folder.
        """
        check_count("every of RolloutRecorder", every, at_least=1)
        self.every = every
        self.path = path
        self._batch: RolloutBatch | None = None
        self._metadata: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = rollout_owner(trainer)
        self._metadata = self._run_metadata(trainer, data)
        own = sorted(self._folder(trainer).glob(f"*-rank{trainer.global_rank}.parquet"))
        if own and trainer.ckpt_path is None:
            raise ValueError(
                f"{self._folder(trainer)} already holds rollouts of another run: give RolloutRecorder another path"
            )
        current = trainer.global_step // data.reuse
        for file in own:  # rollouts after the checkpoint are sampled again
            if int(file.name.partition("-")[0]) > current:
                file.unlink()

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        if is_selected(batch.rollout, self.every):
            self._batch = batch

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        """Write the rollout before its update, when its log-probabilities are final."""
        if stage != "update" or self._batch is None:
            return
        batch, self._batch = self._batch, None
        ledger = rollout_owner(trainer).engine.state.ledger
        if rows := self._rows(rollout_owner(trainer), batch):
            versions = {row["version"] for row in rows}
            versions |= {span["version"] for row in rows for span in row["spans"] or []}
            syncs = [record.as_dict() for record in ledger if record.version in versions]
            path = self._folder(trainer) / f"{batch.rollout:08}-rank{trainer.global_rank}.parquet"
            write_recording(rows, self._metadata | {"syncs": syncs, "logprobs_from": batch.logprobs_from}, path)

    def _folder(self, trainer: L.Trainer) -> Path:
        return run_folder(trainer) / "rollouts" if self.path is None else Path(self.path)

    def _run_metadata(self, trainer: L.Trainer, data: RolloutOwner) -> dict[str, Any]:
        config = policy_owner(trainer).policy_weights().config
        name = config.name_or_path or ""
        return {
            "task": f"{type(data.task).__module__}.{type(data.task).__qualname__}",
            "model": {
                "type": config.model_type,
                "name": Path(name).name if os.path.isdir(name) else name,  # local paths are private
                "fingerprint": fingerprint([json.dumps(config.to_dict(), sort_keys=True, default=str)]),
            },
            "tokenizer": vocabulary_fingerprint(data.tokenizer),
            "chat_template": chat_template_fingerprint(data.tokenizer),
            "sampling": dataclasses.asdict(data.sampling),
            "seed": data.seed,
            "world_size": trainer.world_size,
        }

    def _rows(self, data: RolloutOwner, batch: RolloutBatch) -> list[dict[str, Any]]:
        """Return a row for each completion, without those of placeholders."""
        completions = completions_of(batch, data.tokenizer, data.sampling)
        versions = {record.step: record.version for record in data.engine.state.ledger}
        rows = []
        for row in batch.is_known.nonzero().flatten().tolist():
            sibling = row % batch.group_size
            if sibling == 0:
                prompt = data.train_prompts.at(int(batch.positions[row]))
                dataset_row = json.dumps(dict(prompt.row), ensure_ascii=False, default=str)
            completion, sampled = completions[row], batch.completion_mask[row]
            step = None if bool(batch.is_recorded[row]) else completion.spans[0].step
            spans = [{"tokens": n, "step": s, "version": versions.get(s)} for n, s, _ in completion.spans]
            notes = None if batch.notes is None else batch.notes[row]
            kept = completion.kept
            if kept is None and data.sampling.is_truncated:  # replayed, and sampled from whole distributions
                kept = Kept(token_ids=array("i"), counts=array("i", [0]) * len(completion.token_ids))
            has_logprobs = not bool(batch.behaviour_logprobs[row][sampled].isnan().any())
            rows.append(
                {
                    "group": prompt.position,
                    "sibling": sibling,
                    "position": prompt.position,
                    "rollout": batch.rollout,
                    "prompt": prompt.text,
                    "prompt_token_ids": prompt.token_ids,
                    "row": dataset_row,
                    "completion": completion.text,
                    "token_ids": completion.token_ids,
                    "logprobs": completion.logprobs if has_logprobs else None,
                    "finish_reason": completion.finish_reason,
                    "reward": float(batch.rewards[row]),
                    "failed": bool(batch.failed[row]),
                    "advantage": batch.mean_advantage(row),
                    "behaviour_step": step,
                    "version": None if step is None else versions.get(step),
                    "spans": spans if len(spans) > 1 else None,
                    "observed": [{"start": start, "stop": stop} for start, stop in completion.observed] or None,
                    "turn_rewards": completion.turn_rewards,
                    "dropped": [one._asdict() for one in completion.dropped] or None,
                    "episode_failed": None if completion.turn_rewards is None else completion.failure is not None,
                    "kept_token_ids": None if kept is None else kept.token_ids.tolist(),
                    "kept_counts": None if kept is None else kept.counts.tolist(),
                    "score_notes": None if notes is None else json.dumps(notes),
                }
            )
        return rows

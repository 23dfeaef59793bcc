"""The model card that ``lgrpo export`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lgrpo import __version__
from lgrpo.commands.plan import plan_table
from lgrpo.policy import CausalPolicy
from lgrpo.report import read_series


def model_card(title: str, policy: CausalPolicy, config: Namespace, run: Path, step: int) -> str:
    """Return the text of the card: base model, results of the validations in ``run``, and the settings."""
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["grpo", "reinforcement-learning", "lgrpo"]
    if policy.name and not Path(policy.name).exists():
        head["base_model"] = policy.name
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    settings = {
        "model.loss": config.model.loss,
        "model.optimizer": config.model.optimizer,
        "model.policy.lora": config.model.policy.lora,
        "data.task": config.data.task,
        "data.sampling": config.data.sampling,
        "data.advantage": config.data.advantage,
        "weight_sync": config.weight_sync,
        "reference_refresh": config.reference_refresh,
        "zero_variance_mask": config.zero_variance_mask,
        "seed_everything": config.seed_everything,
    }
    plain = {name: _plain(value) for name, value in settings.items() if value is not None}
    return f"""---
{front}---

# {title}

{"Low-rank adapters trained" if policy.lora else "Trained"} from {policy.name or "a random initialisation"} by
group-relative policy optimisation, {step} optimizer steps, with lgrpo {__version__}.

## Results

{_results(run, step)}

## Training

```
{plan_table(config, with_memory=False)}
```

```yaml
{yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).strip()}
```
"""


def _results(run: Path, step: int) -> str:
    """Return a table with the first and the last value of every pass@k that was logged up to ``step``."""
    try:
        series = read_series(run)
    except FileNotFoundError:
        return "The checkpoint has no metrics beside it."
    rows = []
    for name, points in series.items():
        before = [(logged_at, value) for logged_at, value in points if logged_at <= step]
        if name.startswith("val/") and "pass@" in name and not name.endswith("_stderr") and before:
            errors = dict(series.get(f"{name}_stderr", []))
            (first, start), (last, end) = before[0], before[-1]
            spread = f" ± {errors[last]:.3f}" if last in errors else ""
            rows.append(
                f"| {name.removeprefix('val/')} | {start:.3f} (step {first}) | {end:.3f}{spread} (step {last}) |"
            )
    if not rows:
        return "The policy was not validated."
    return "\n".join(["| validation | first | last |", "|---|---|---|", *rows])


def _plain(value: Any) -> Any:
    """Convert settings to the types that YAML has."""
    text = json.dumps(value, default=lambda part: vars(part) if isinstance(part, Namespace) else str(part))
    return json.loads(text)

"""``lgrpo play``: one episode of an environment in the terminal, played by a checkpoint or by a person."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from lgrpo.commands import INTERRUPTED, command_parser

if TYPE_CHECKING:
    from lgrpo.commands.play_view import EpisodeView
    from lgrpo.data import RolloutDataModule
    from lgrpo.engines import EnvironmentEngine
    from lgrpo.policy import CausalPolicy
    from lgrpo.types import Completion, Prompt


def main(args: list[str]) -> None:
    """Play one problem, and print every turn as it comes."""
    parser = command_parser(
        "play",
        "Each turn is shown with its tool calls, its reward and its tokens: those that were sampled are trained on, "
        "those that were observed are not. The environment runs in this process, and the config's classes are "
        "imported.",
        "lgrpo play runs/guess --index 3 --seed 1",
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="Checkpoint, or folder of a run (its newest checkpoint)."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="Config of the run. Default: config.yaml of the checkpoint's run."
    )
    parser.add_argument("--index", type=int, default=0, metavar="N", help="Validation problem, from 0. Default: 0.")
    parser.add_argument("--seed", type=int, metavar="S", help="Seed of the sampled tokens. Default: data.seed, or 0.")
    parser.add_argument("--turns", type=int, metavar="N", help="Upper limit of turns. Default: the run's.")
    parser.add_argument("--human", action="store_true", help="Write the policy's turns yourself, one line each.")
    parser.add_argument("--tokens", action="store_true", help="List each token with its id, mask and log-probability.")
    parser.add_argument("--pause", action="store_true", help="Wait for Enter before each turn, on a terminal.")
    options = parser.parse_args(args)

    from lgrpo.commands.play_view import EpisodeView

    warnings.filterwarnings("ignore", "the model made mistakes")  # they are shown with their turns
    view = EpisodeView(sys.stdout, lists_tokens=options.tokens)
    try:
        play(options, view)
    except EOFError:
        view.note("The input has ended, and so has the episode.")
    except KeyboardInterrupt:
        view.note("Interrupted.")
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a thread of the environment may hang
    except (ValueError, OSError) as error:
        raise SystemExit(f"lgrpo: {error}") from error


def play(options: argparse.Namespace, view: EpisodeView) -> None:
    """Play the episode that the options describe, and show it."""
    from lgrpo.checks import check_count
    from lgrpo.commands.export import find_checkpoint, find_config
    from lgrpo.commands.hf_folder import load_policy
    from lgrpo.commands.play_engine import PlayerEngine, WatchedEngine, WatchedEnvironment
    from lgrpo.commands.settings import build_settings
    from lgrpo.engines import TransformersEngine
    from lgrpo.environments import ToolEnvironment

    checkpoint = find_checkpoint(options.checkpoint)
    settings, data = build_settings([f"--config={options.config or find_config(checkpoint)}"])
    engine = find_environment(data, checkpoint)
    environment = engine.environment
    assert environment is not None
    policy, step = load_policy(checkpoint, settings)
    prompt, total = find_prompt(data, policy, options.index, engine)
    view.tokenizer, view.tools = policy.tokenizer, environment if isinstance(environment, ToolEnvironment) else None
    model = TransformersEngine(trust_remote_code=policy.trust_remote_code)
    if options.human:
        engine.engine = PlayerEngine(model, view)
    else:
        engine.engine = WatchedEngine(model, view, pauses=options.pause and sys.stdin.isatty())
    engine.environment, engine.limits = WatchedEnvironment(environment, view), None
    if options.turns is not None:
        check_count("--turns", options.turns, at_least=1)
        engine.max_turns = options.turns
    view.begin(prompt, f"problem {options.index} of {total}, checkpoint of step {step}")
    try:
        engine.load_weights(policy.weights(), step)
        sampling = data.evaluation.sampling or data.sampling
        seed = data.seed if options.seed is None else options.seed
        [[completion]] = engine.generate([prompt], 1, sampling, seed, policy.tokenizer)
    finally:
        engine.close()
    view.end(completion, score(data, prompt, completion))


def find_environment(data: RolloutDataModule, checkpoint: Path) -> EnvironmentEngine:
    """Return the engine of the run that plays episodes; raise if it samples single turns."""
    from lgrpo.engines import EnvironmentEngine
    from lgrpo.engines.wrapper import WrapperEngine

    engine = data.engine
    while isinstance(engine, WrapperEngine) and not isinstance(engine, EnvironmentEngine):
        engine = engine.engine
    if not isinstance(engine, EnvironmentEngine) or engine.environment is None:
        raise ValueError(
            f"the run of {checkpoint} has no environment (its engine is {type(engine).__name__}), so there is nothing "
            "to play: its completions are in completions.jsonl of the run"
        )
    return engine


def find_prompt(
    data: RolloutDataModule, policy: CausalPolicy, index: int, engine: EnvironmentEngine
) -> tuple[Prompt, int]:
    """Return a validation problem, or one of training if there are none, and their number."""
    from lgrpo.data.prompts import load_prompts

    split = "validation" if len(data.task.rows("validation")) else "train"
    sampling = data.evaluation.sampling or data.sampling
    prompts = load_prompts(
        data.task,
        split,  # type: ignore[arg-type]
        policy.tokenizer,
        max_tokens=max(1, policy.context_length - sampling.max_tokens),
        overlong=data.overlong_prompts,
        tools=engine.tool_schemas(),
    )
    if not 0 <= index < len(prompts):
        raise ValueError(f"--index is {index}, but the run has {len(prompts)} problems: 0 to {len(prompts) - 1}")
    return prompts.at(index), len(prompts)


def score(data: RolloutDataModule, prompt: Prompt, completion: Completion) -> object:
    """Return the reward of the task for an episode."""
    from lgrpo.data.scorer import Scorer

    scorer = Scorer(data.task.reward, data.scoring)
    try:
        return scorer.submit(prompt, [completion]).result()[0]
    finally:
        scorer.close()

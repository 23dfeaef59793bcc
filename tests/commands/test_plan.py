"""``lgrpo plan``: the numbers of a config."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest
from transformers import Qwen2Config

from lgrpo.cli import main
from lgrpo.commands import plan_time
from tests.helpers import tiny_policy
from tests.test_cli import CONFIGS, with_base

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def plan(capsys, *options):
    main(["plan", *with_base("demo.yaml"), *options])
    lines = capsys.readouterr().out.splitlines()
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}


def test_a_schedule_of_v(capsys):
    rows = plan(capsys, "--weight_sync.period={0: 1, 6: 5}", "--data.num_rollouts=20", "--trainer.max_epochs=1")
    assert rows["schedule"] == "v = 1, from rollout 6 on 5; i = 1"
    assert rows["lags that occur"] == "0, 1, …, 4 optimizer steps, at most"
    assert "20 optimizer steps, 9 syncs" in rows["whole run"]  # before 0 to 5, 6, 11 and 16
    assert plan(capsys, "--weight_sync.period={0: null, 6: 5}")["lags that occur"].startswith("0, 1, …, 5 optimizer")


def test_off_policy(capsys):
    rows = plan(capsys)
    assert rows["schedule"].startswith("v = 10, i = 1: off-policy")
    assert rows["lags that occur"].startswith("0, 1, …, 9 optimizer steps")
    assert rows["whole run"] == "800 rollouts, 800 optimizer steps, 80 syncs, 204,800 completions"
    assert rows["policy"].startswith("223,488 parameters")
    assert "reference" in rows["memory, held"]


def test_adaptive_sync(capsys):
    rows = plan(capsys, f"--config={CONFIGS / 'adaptive.yaml'}")
    assert rows["schedule"].startswith("v by measurement, 1 to 50, i = 1")
    assert rows["sync"] == "when tv reaches 0.25, after 1 to 50 rollouts"
    assert rows["lags that occur"] == "0, 1, …, 49 optimizer steps, at most"
    assert "16 to 800 syncs" in rows["whole run"]


def test_the_lags_occur_in_a_run(capsys):
    from tests.helpers import fit

    rows = plan(capsys, "--weight_sync.period=3", "--data.reuse=2")
    assert rows["lags that occur"].startswith("0, 1, …, 5 ")
    assert set(fit(v=3, i=2, rollouts=6).recorder.lags) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(("v", "lead", "i"), [(1, 1, 1), (1, 2, 2), (3, 2, 1), (2, 1, 3)])
def test_lags_and_syncs_with_a_lead(capsys, v, lead, i):
    from tests.helpers import fit

    options = [f"--weight_sync.period={v}", f"--data.lead={lead}", f"--data.reuse={i}", "--data.num_rollouts=9"]
    rows = plan(capsys, *options, "--trainer.max_epochs=1")
    run = fit(v=v, i=i, rollouts=9, data={"lead": lead})
    lags = run.recorder.lags[lead * i :]
    words = rows["lags that occur"].split(" optimizer steps")[0].split(", ")
    assert [int(words[0]), int(words[-1])] == [min(lags), max(lags)]
    assert rows["lags that occur"].endswith(f"less in the first {lead} rollouts")
    assert max(run.recorder.lags[: lead * i]) < max(lags)
    assert f"{len(run.data.engine.state.ledger)} syncs" in rows["whole run"]


def test_max_lag_and_limited_epochs(capsys):
    rows = plan(capsys, "--data.max_lag=4", "--data.reuse=2", "--data.num_rollouts=8", "--trainer.max_epochs=3")
    assert rows["lags that occur"].endswith("; those above 4 (data.max_lag) are not trained on")
    assert rows["stage (epoch)"] == "8 rollouts, 16 optimizer steps"
    for limit in ("10", "0.625"):
        rows = plan(
            capsys,
            f"--trainer.limit_train_batches={limit}",
            "--data.reuse=2",
            "--data.num_rollouts=8",
            "--trainer.max_epochs=3",
        )
        assert rows["stage (epoch)"] == "5 rollouts, 10 optimizer steps"
        assert rows["whole run"].startswith("15 rollouts, 30 optimizer steps")


def test_on_policy_offline_and_no_reference(capsys):
    options = ["--weight_sync.period=1", "--model.loss.kl_coef=0"]
    rows = plan(capsys, *options)
    assert rows["lags that occur"] == "0: every completion is fresh"
    assert "reference" not in rows["memory, held"]
    grpo, dapo = (f"--config={CONFIGS / 'algorithms' / name}.yaml" for name in ("grpo", "dapo"))
    assert "reference 0.9 MiB" in plan(capsys, grpo)["memory, held"]
    assert "reference" not in plan(capsys, dapo)["memory, held"]
    assert plan(capsys, dapo)["zero-variance groups"].startswith("sampled again with other prompts, 4 times")
    rows = plan(capsys, "--weight_sync.period=null")
    assert rows["sync"] == "before the first rollout only"


def test_the_parts_of_a_checkpoint(capsys, tmp_path):
    assert "behaviour policy" in plan(capsys)["checkpoint"]
    assert "behaviour policy" in plan(capsys, "--weight_sync.period=1", "--data.lead=1")["checkpoint"]
    assert "behaviour policy" not in plan(capsys, "--weight_sync.period=1")["checkpoint"]
    policy = tiny_policy()
    policy.build()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    named = [f"--model.policy.name={tmp_path}", "--model.policy.config=null", "--model.policy.characters=null"]
    initial = ["--reference_refresh=null", "--trainer.callbacks=null"]
    lora = "--model.policy.lora.rank=4"
    assert "reference" in plan(capsys, *initial)["checkpoint"], "made from a config, it cannot be loaded"
    assert "reference" in plan(capsys, *named)["checkpoint"]
    assert "reference" in plan(capsys, *named, "--reference_refresh=null")["checkpoint"], "after the warm start"
    assert "reference" not in plan(capsys, *named, *initial)["checkpoint"]
    adapted = plan(capsys, *named, *initial, lora)["checkpoint"]
    assert ("weights" in adapted, "adapters" in adapted, "reference" in adapted) == (False, True, True)


def test_the_previous_gradient_of_gac(capsys):
    plain, gac = (plan(capsys, f"--config={CONFIGS / 'algorithms' / name}.yaml") for name in ("clip_cov", "gac"))
    for row in ("memory, held", "checkpoint"):
        assert "previous gradient 0.9 MiB" in gac[row]
        assert "previous gradient" not in plain[row]


def test_sharding(capsys):
    fsdp2 = [f"--config={CONFIGS / 'fsdp2.yaml'}", "--trainer.strategy.data_parallel_size=8"]
    assert "sharding" not in plan(capsys)
    row = plan(capsys, *fsdp2)["sharding"]
    assert row == "weights, gradients, optimizer and reference are divided among 8 processes"
    row = plan(capsys, *fsdp2, "--model.policy.reshard=false")["sharding"]
    assert row.endswith("each holds all weights and gradients, 1.7 MiB (policy.reshard: false)")
    row = plan(capsys, "--model.policy.reshard=false")["sharding"]
    assert row.startswith("policy.reshard is false, but has no effect with the strategy auto: only FSDP2")


def test_rollouts_in_one_call(capsys):
    ahead, offline = "--data.generate_ahead=true", "--weight_sync.period=null"
    assert "one call" not in plan(capsys)["rollout"]
    assert plan(capsys, ahead)["rollout"].endswith("; those of a cycle (10) in one call (data.generate_ahead)")
    assert plan(capsys, ahead, offline)["rollout"].endswith("; up to 16 of an epoch in one call (data.generate_ahead)")
    adaptive = plan(capsys, f"--config={CONFIGS / 'adaptive.yaml'}", ahead)
    assert adaptive["rollout"].endswith("; one in each call, because the next sync is not known in advance")


def test_partial(capsys):
    assert "partial rollouts" not in plan(capsys)
    for option, count in (("--data.partial=true", 40), ("--data.partial.extra_prompts=5", 37)):
        found = plan(capsys, option, "--data.num_prompts=32")["partial rollouts"]
        assert found == f"a rollout ends when 32 of {count} groups are whole (data.partial)"
    table = plan(capsys, f"--config={CONFIGS / 'partial.yaml'}", "--weight_sync.period=1", "--data.reuse=1")
    assert table["schedule"] == "v = 1, i = 1: on-policy GRPO, but for continued completions"
    assert table["lags that occur"].endswith(
        "first tokens of continued completions, which span up to 4 syncs (data.partial)"
    )


def test_overlap(capsys):
    on, both = "--data.overlap=true", "engine and trainer need their memory at the same time"
    assert "overlap" not in plan(capsys)
    within = "rollouts 1 to 9 of a cycle are sampled while earlier ones train (data.overlap); "
    assert plan(capsys, on)["overlap"] == within + both
    assert plan(capsys, on, "--weight_sync.period=2")["overlap"].startswith("rollout 1 of a cycle is sampled")
    assert plan(capsys, on, "--weight_sync.period=null")["overlap"].startswith("every rollout but the first")
    assert plan(capsys, on, "--weight_sync.period={0: 1, 6: 5}")["overlap"].startswith("the rollouts of a cycle, exc")
    assert plan(capsys, on, "--weight_sync.period=1")["overlap"].startswith("none at v = 1")
    assert plan(capsys, on, "--data.lead=1")["overlap"].startswith("each rollout is sampled while the one before it t")
    assert plan(capsys, on, "--data.lead=3")["overlap"].startswith("each rollout is sampled while the 3 before it tra")
    assert plan(capsys, on, f"--config={CONFIGS / 'adaptive.yaml'}")["overlap"].startswith("none, because the next sy")
    assert plan(capsys, f"--config={CONFIGS / 'overlap.yaml'}")["overlap"] == within + both
    assert plan(capsys, "--data.engine=lgrpo.engines.VLLMServerEngine")["overlap"] == within[:-2]
    replay = ["--data.engine=lgrpo.recordings.ReplayEngine", "--data.engine.path=nowhere"]
    assert plan(capsys, *replay, on)["overlap"] == within + both
    in_flight = plan(capsys, f"--config={CONFIGS / 'in_flight.yaml'}")
    assert "a sync interrupts sampling, which continues with the new weights" in in_flight["overlap"]
    assert in_flight["schedule"] == "v = 1, i = 1: off-policy: the sampler lags behind"
    assert in_flight["lags that occur"].endswith("and for tokens sampled after a sync in flight")
    with pytest.raises(ValueError, match="VLLMEngine cannot sample while the trainer updates"):
        plan(capsys, on, "--data.engine=lgrpo.engines.VLLMEngine")


def test_the_engine_has_the_precision_of_the_trainer(capsys):
    vllm, fast = (f"--config={CONFIGS / name}.yaml" for name in ("vllm", "fast"))
    on_gpu = ["--trainer.accelerator=auto", "--trainer.precision=bf16-mixed"]
    assert "engine's copy 0.9 MiB" in plan(capsys, *on_gpu)["memory, held"], "the policy's"
    assert "engine's copy 0.9 MiB" in plan(capsys, vllm)["memory, held"]
    assert "engine's copy 0.4 MiB" in plan(capsys, vllm, *on_gpu)["memory, held"]
    float32 = plan(capsys, vllm, *on_gpu, "--data.engine.dtype=float32")
    assert "engine's copy 0.9 MiB" in float32["memory, held"]
    assert "engines' 2 copies 0.9 MiB" in plan(capsys, fast, *on_gpu)["memory, held"]
    assert "engines' 2 copies 1.7 MiB" in plan(capsys, fast)["memory, held"], "on a CPU"


def test_the_length_of_a_run_follows_lightning(capsys):
    by_steps = plan(capsys, "--trainer.max_epochs=null", "--trainer.max_steps=1000")
    assert by_steps["whole run"].startswith("1000 rollouts, 1000 optimizer steps, 100 syncs")
    odd = plan(capsys, "--trainer.max_steps=10", "--data.reuse=3")
    assert odd["whole run"].startswith("4 rollouts, 10 optimizer steps, 1 syncs")
    assert plan(capsys, "--trainer.max_epochs=-1")["whole run"].startswith("no end")
    assert "each of 4 devices, about 64 completions" in plan(capsys, "--trainer.devices=4")["micro-batches"]


def test_activation_memory_counts_only_for_compiled_layers(capsys):
    share = "--model.policy.activation_memory=0.1"
    whole, plain, less = (
        plan(capsys, *options)["memory, in a step"] for options in ([], [share], [share, "--model.policy.compile=true"])
    )
    assert whole == plain != less


def test_a_model_that_cannot_be_read(capsys):
    rows = plan(capsys, "--model.policy.name=nobody/nothing", "--model.policy.config=null")
    assert rows["memory"].startswith("not estimated: the model's config cannot be read")


@pytest.fixture
def model(tmp_path):
    """Return a folder with the config of the model whose speed was measured."""
    Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    return tmp_path


def expected_time(capsys, *options):
    """Return the row with the time of the quick start, or None, and its minutes."""
    main(["plan", f"--config={CONFIGS / 'quickstart_gsm8k.yaml'}", *options])
    text = next((line for line in capsys.readouterr().out.splitlines() if line.startswith("time ")), None)
    return text, None if text is None else int(text.split("about ")[1].split(" minutes")[0])


def test_time_of_the_quick_start(capsys, model):
    row = json.loads((RESULTS / "quickstart.jsonl").read_text().splitlines()[0])
    text, minutes = expected_time(capsys, f"--model.policy.name={model}")
    assert minutes == pytest.approx(row["seconds"] / 60, abs=1)
    assert "for each of 40 rollouts" in text
    _, twice = expected_time(capsys, f"--model.policy.name={model}", "--data.num_rollouts=80")
    assert twice == pytest.approx(2 * minutes - 80 / 60, abs=1)
    reuse, _ = expected_time(capsys, f"--model.policy.name={model}", "--data.reuse=2")
    assert float(reuse.split(" s to update")[0].split()[-1]) == pytest.approx(9.7, abs=0.1)


def test_time_with_the_fast_settings(capsys, model):
    (row,) = [row for row in measured() if not row["kept_engine"]]
    given = ["--data.num_prompts=28", "--data.num_rollouts=30", f"--config={CONFIGS / 'fast.yaml'}"]
    _, minutes = expected_time(capsys, f"--model.policy.name={model}", *given)
    assert minutes == pytest.approx(row["seconds"] / 60, abs=1)


@pytest.mark.parametrize("option", ["data.engine=lgrpo.engines.TransformersEngine", "trainer.devices=2"])
def test_no_time_where_nothing_was_measured(capsys, model, option):
    options = [f"--model.policy.name={model}", f"--{option}"]
    assert expected_time(capsys, *options)[0] is None


def measured():
    """Return the rows from which the rates with ``fast.yaml`` were taken."""
    rows = [json.loads(line) for line in (RESULTS / "real_model.jsonl").read_text().splitlines()]
    return [row for row in rows if row["commit"] == "44cd757"]


def test_rates_are_those_of_the_rows():
    quick = json.loads((RESULTS / "quickstart.jsonl").read_text().splitlines()[0])
    rates = plan_time.RATES["VLLMEngine"]
    tokens = sum(512 * length for length in quick["completion_length"])
    seconds = sum(quick["generate_seconds"]), sum(quick["update_seconds"])
    assert (rates.sampled, rates.trained) == pytest.approx([tokens / each for each in seconds], rel=0.02)
    assert rates.start + 40 * rates.rest == pytest.approx(quick["seconds"] - sum(seconds), rel=0.02)
    assert pytest.approx(tokens / 40 / 512 / 320, rel=0.02) == plan_time.FILLED

    rates, rows = plan_time.RATES["EnginePool"], measured()
    tokens = [sum(448 * length for length in row["completion_length"]) for row in rows]
    sampled = [count / sum(row["generate_seconds"]) for count, row in zip(tokens, rows, strict=True)]
    trained = [count / (30 * median(row["update_seconds"])) for count, row in zip(tokens, rows, strict=True)]
    rest = [row["seconds"] - sum(row["generate_seconds"]) - sum(row["update_seconds"]) for row in rows]
    assert rates.sampled == pytest.approx(mean(sampled), rel=0.03)
    assert rates.trained == pytest.approx(mean(trained), rel=0.05)
    assert rates.rest == pytest.approx(mean(rest[1:]) / 30, rel=0.05), "the engine was kept in the last two"
    assert rates.start == pytest.approx(rest[0] - 30 * rates.rest, rel=0.05)


def test_contexts_of_episodes(capsys):
    """Training reads each context, so a micro-batch of as many completions takes as many times the memory."""
    game = ["--config", str(CONFIGS / "guess_number.yaml")]
    engine = "--data.engine.init_args."
    several = [f"{engine}max_contexts=3", f"{engine}max_tokens_per_turn=3"]
    budget = ["--data.micro_batch_tokens=2000", "--data.max_prompt_tokens=80"]

    def rows_of(*options):
        main(["plan", *game, *options])
        return dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)

    one, three = (rows_of(*options, *budget) for options in ([], several))
    assert "in each of up to 3 contexts (data.engine.max_contexts)" in three["rollout"]
    assert "contexts" not in one["rollout"]
    assert "at least 13 in each step" in one["micro-batches"]  # 128 completions, 10 of 200 tokens in each
    assert "at least 43 in each step" in three["micro-batches"]  # 3 of 600 tokens
    rows = [rows_of(*options)["memory, in a step"] for options in ([], several, budget, [*several, *budget])]
    plain, longer, *filled = (float(text.split("activations ")[1].split()[0]) for text in rows)
    assert longer == pytest.approx(3 * plain, rel=0.01)
    assert filled[0] == filled[1], "lengths may fill micro-batches up to the limit"
